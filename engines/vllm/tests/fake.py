"""An engine without a model: vLLM's scheduler as far as a connector sees it, and a forward pass that knows the truth.

The KV of a position is a digest of all tokens up to it. A pass that reads anything else writes poison, and every
sampled token comes from a context that was looked at byte by byte: wrong bytes cannot stay unseen.
"""

from __future__ import annotations

import copy
from collections import deque
from types import SimpleNamespace

import torch
from lmcache_engine_vllm import halves

from engines.vllm.tests.stand_ins import (
    BLOCK,
    CELL,
    LAYERS,
    NAMES,
    Pool,
    Request,
    cache_config,
    config,
    truths,
)


class Engine:
    """One engine on a daemon.

    Args:
        depth: steps scheduled before the output of the first is looked at.
        budget: tokens per step.
        hooked: layers around which hooks are called.
        most: tokens of an offer that are taken, as one of several connectors sees it.
    """

    def __init__(
        self,
        daemon,
        *,
        blocks=24,
        budget=16,
        depth=1,
        salt="",
        ranks=1,
        replicas=1,
        hooked=2,
        most=None,
        **how,
    ):
        self.cache = cache_config(blocks)
        self.cache.kv_tp_replicas = replicas
        self.ranks, self.arrays, self.workers = ranks, [], []
        how = {"engine": f"engine-{next(NAMES)}", "tensor": ranks} | how
        for rank in range(ranks):
            given = config(daemon, rank=rank, **how)
            names = self.cache.kv_cache_groups[0].layer_names
            memory = {
                n: torch.full((blocks, 1, BLOCK, CELL), 0xA5, dtype=torch.uint8) for n in names
            }
            self.arrays += [tensor.numpy() for tensor in memory.values()]
            self.workers.append(halves.Halves(given, self.cache, False, shared=False))
            self.workers[-1].register_kv_caches(memory)
        self.worker, self.given = self.workers[0], config(daemon, **how)
        self.replicas, self.hooked, self.most = replicas, hooked, most
        self.scheduler = halves.Halves(self.given, self.cache, True, shared=False)
        self.pool = Pool(blocks)
        self.budget, self.depth, self.salt = budget, depth, salt
        self.requests, self.waiting, self.running = {}, deque(), []
        self.queue = deque()
        self.over = set()
        self.outputs = {}
        self.zombies = {}
        self.recomputed = self.external = 0

    def close(self):
        for half in (*self.workers, self.scheduler):
            half.close()

    # -- what a test does ------------------------------------------------------------------------------------

    def add(self, tokens, most=1, **how):
        id = f"r{next(NAMES)}"
        self.requests[id] = Request(id, list(tokens), most, **how)
        self.waiting.append(id)
        self.scheduler.arrived(self.requests[id])
        return id

    def abort(self, id):
        request = self.requests.get(id)
        if request is not None:
            if id in self.waiting:
                self.waiting.remove(id)
            if id in self.running:
                self.running.remove(id)
            self._free(request)

    def run(self, most=400):
        """Step until everything is finished."""
        for _ in range(most):
            if not self.requests:
                while self.queue:
                    self.update(self.queue.popleft())
                return
            self.step()
        raise AssertionError(f"{len(self.requests)} requests never finish: {self.requests}")

    def step(self):
        self.queue.append(self.schedule())
        if len(self.queue) >= self.depth or not self.queue[-1].num_scheduled_tokens:
            self.update(self.queue.popleft())

    def reset(self, salt):
        """New weights, as a training loop sets them: everything is preempted, both caches are emptied."""
        while self.queue:
            self.update(self.queue.popleft())
        while any(request.state == "loading" for request in self.requests.values()):
            self.step()
            while self.queue:
                self.update(self.queue.popleft())
        while self.running:
            self._preempt(self.running.pop())
        for id in self.waiting:
            request = self.requests[id]
            self.pool.give(request.table)  # loaded and not begun
            request.table, request.num_computed_tokens = [], 0
        self.pool.reset()
        assert self.scheduler.reset() is not False
        self.salt = salt

    # -- scheduler -------------------------------------------------------------------------------------------

    def schedule(self):
        scheduled, left = {}, self.budget
        before = {}
        for id in list(self.running):
            request = self.requests[id]
            if id not in self.running:
                continue
            have = request.num_tokens + request.placeholders
            new = min(have - request.num_computed_tokens, left)
            if new <= 0 or request.num_computed_tokens + 1 > len(request.whole):
                continue
            while not self._grow(request, request.num_computed_tokens + new):
                victim = self.running.pop()
                self._preempt(victim)
                left += scheduled.pop(victim, 0)
                if victim == id:
                    break
            if id not in self.running:
                break
            scheduled[id], before[id] = new, request.num_computed_tokens
            left -= new
        fresh, resumed = [], []
        for id in sorted(self.waiting, key=lambda id: not self.requests[id].num_computed_tokens):
            if left <= 0:
                break
            request = self.requests[id]
            if request.state == "loading":
                continue
            if request.num_computed_tokens:  # loaded while it waited
                known, new = request.num_computed_tokens, request.num_tokens
                new = min(new - known, left)
                if not self._grow(request, known + new):
                    break
                self.scheduler.allocated(request, 0)
                self._admit(request, known, new, fresh, resumed, scheduled, before)
                left -= new
                continue
            local = self._local(request)
            external, waits = self.scheduler.matched(request, len(local) * BLOCK)
            if external is None:
                continue
            again, _ = self.scheduler.matched(request, len(local) * BLOCK)
            assert again == external, "asked again, another answer"
            if self.most is not None:
                external = min(external, self.most)
                waits = waits and external > 0
            assert external % BLOCK == 0
            known = len(local) * BLOCK + external
            assert known < request.num_tokens
            new = 0 if waits else min(request.num_tokens - known, left)
            if waits and not self._fits(request):
                break
            for block in local:
                self.pool.touch(block)
            request.table = list(local)
            if not self._grow(request, known + new):
                self.pool.give(request.table)
                request.table = []
                break
            table = SimpleNamespace(get_block_ids=lambda request=request: (list(request.table),))
            self.scheduler.allocated(request, external, table)
            self.external += external
            if request.served is None:
                request.served = known
            if waits:
                request.num_computed_tokens, request.before = known, request.state
                request.state = "loading"
                continue
            self._admit(request, known, new, fresh, resumed, scheduled, before)
            left -= new
        for id, new in scheduled.items():
            request = self.requests[id]
            for at in range((before[id] + new) // BLOCK):
                name = str((self.salt, request.cache_salt, request.whole[: (at + 1) * BLOCK]))
                if (at + 1) * BLOCK <= request.num_tokens:
                    self.pool.name(request.table[at], name)
        over, self.over = self.over, set()
        out = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            scheduled_new_reqs=[
                SimpleNamespace(req_id=id, num_computed_tokens=before[id]) for id in fresh
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[id for id in scheduled if id not in fresh],
                num_computed_tokens=[before[id] for id in scheduled if id not in fresh],
            ),
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda id: (self.requests[id].table,) if id in scheduled else None
            ),
            finished_req_ids=over,
        )
        step = self.scheduler.build(out)
        out.kv_connector_block_state = None
        out.before = before
        out.tables = {id: list(self.requests[id].table) for id in scheduled}
        out.asked = {id: self.requests[id] for id in scheduled}
        out.salt = self.salt
        out.lives = {id: self.requests[id].life for id in scheduled}
        self.execute(out, step)
        for id, new in scheduled.items():
            request = self.requests[id]
            request.num_computed_tokens += new
            request.flying += new
            if request.num_computed_tokens >= request.num_tokens + request.placeholders:
                request.placeholders += 1
        return out

    def _admit(self, request, known, new, fresh, resumed, scheduled, before):
        id = request.request_id
        self.waiting.remove(id)
        request.num_computed_tokens = known
        (resumed if request.state == "preempted" else fresh).append(id)
        request.state = "running"
        self.running.append(id)
        scheduled[id], before[id] = new, known

    def _local(self, request):
        found = []
        for at in range((request.num_tokens - 1) // BLOCK):
            name = str((self.salt, request.cache_salt, request.whole[: (at + 1) * BLOCK]))
            block = self.pool.by_name.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def _fits(self, request):
        """Whether all of a request has room beside those whose blocks are bound to a load."""
        bound = [each for each in self.requests.values() if each.state != "running" and each.table]
        need = [-(-len(each.whole) // BLOCK) - len(each.table) for each in (*bound, request)]
        return sum(need) <= len(self.pool.free)

    def _grow(self, request, tokens):
        need = -(-tokens // BLOCK) - len(request.table)
        found = self.pool.take(max(0, need))
        if found is None:
            return False
        request.table += found
        return True

    def _preempt(self, id):
        request = self.requests[id]
        self.pool.give(request.table)
        request.table, request.num_computed_tokens = [], 0
        request.life += 1
        request.flying = request.placeholders = 0
        request.state = "preempted"
        self.waiting.appendleft(id)

    def _free(self, request):
        self.requests.pop(request.request_id)
        assert self.scheduler.finished(request) == (False, None)
        self.over.add(request.request_id)
        if request.state == "loading":
            self.zombies[request.request_id] = request.table  # freed when the load has ended
        else:
            self.pool.give(request.table)

    # -- worker ----------------------------------------------------------------------------------------------

    def execute(self, out, step):
        steps = [
            copy.deepcopy(step) for _ in self.workers
        ]  # each rank gets its own through a pickle
        for worker, each in zip(self.workers, steps, strict=True):
            worker.begin(each)
            worker.load()
            for name in self.cache.kv_cache_groups[0].layer_names[: self.hooked]:
                worker.layer(name)
        out.right, written = {}, []
        order = sorted(out.num_scheduled_tokens, key=lambda id: out.before[id])
        for id in order:
            request, table, begin = out.asked[id], out.tables[id], out.before[id]
            kv = self.truths(request, out.salt)
            good = out.right[id] = self.right(kv, table, begin)
            for position in range(begin, begin + out.num_scheduled_tokens[id]):
                for layer, memory in enumerate(self.arrays):
                    cell = memory[table[position // BLOCK], 0, position % BLOCK]
                    cell[:] = list(kv[position][layer] if good else b"\xbd" * CELL)
                    written.append((layer % LAYERS, cell, cell.copy()))
        for _, cell, _ in written:
            cell[:] = 0xA6  # what is copied before its layer is computed is wrong
        for layer, name in enumerate(self.cache.kv_cache_groups[0].layer_names):
            for number, cell, value in written:
                if number == layer:
                    cell[:] = value
            for worker in self.workers if layer < self.hooked else ():
                worker.computed(name)
        out.failed, arrived = set(), []
        for worker in self.workers:
            worker.save()
            arrived.append(worker.get_finished(out.finished_req_ids)[1] or set())
            assert worker.missed() == set()
            out.failed |= worker.failures()
        out.arrived = set.intersection(*arrived)

    def truths(self, request, salt):
        kv = truths(request.whole, salt + request.cache_salt, self.ranks)
        if self.replicas > 1:  # every rank holds the same
            kv = [cells[:LAYERS] * self.ranks for cells in kv]
        return kv

    def right(self, kv, table, upto):
        """Whether all positions before ``upto`` hold the truth."""
        return all(
            memory[table[at // BLOCK], 0, at % BLOCK].tobytes() == kv[at][layer]
            for layer, memory in enumerate(self.arrays)
            for at in range(upto)
        )

    # -- output ----------------------------------------------------------------------------------------------

    def update(self, out):
        if out.failed:
            self._invalid(out)
        for id in out.arrived or ():
            request = self.requests.get(id)
            if request is not None:
                assert request.state == "loading"
                request.state = request.before
                if not request.num_computed_tokens:
                    self.pool.give(request.table)
                    request.table = []
            elif id in self.zombies:
                self.pool.give(self.zombies.pop(id))
        for id, new in out.num_scheduled_tokens.items():
            request = self.requests.get(id)
            if request is None or request is not out.asked[id]:
                continue
            if out.lives[id] != request.life:
                continue  # its tokens are computed again
            request.flying -= new
            computed = out.before[id] + new
            if computed >= request.num_tokens and id in self.running:
                assert out.right[id], f"{id} sampled from wrong bytes"
                request.all_token_ids.append(request.whole[request.num_tokens])
                request.placeholders = max(0, request.placeholders - 1)
                if request.over:
                    self.running.remove(id)
                    self.outputs[id] = list(request.all_token_ids)
                    self._free(request)
        output = SimpleNamespace(invalid_block_ids=out.failed)
        manager = SimpleNamespace(evict_blocks=lambda ids: [self.pool.forget(id) for id in ids])
        self.scheduler.output(output, manager)
        self.scheduler.ended()

    def _invalid(self, out):
        """Rewind requests whose blocks could not be loaded (policy recompute).

        vLLM lets the first of several requests that share a block compute it and trusts the others to read it
        in the same step, and it takes the output of steps that were under way; here neither is assumed.
        """
        for id in [*self.running, *self.waiting]:
            request = self.requests[id]
            if request.state not in ("running", "loading"):
                continue
            base = request.num_computed_tokens - request.flying
            bad = [at for at in range(-(-base // BLOCK)) if request.table[at] in out.failed]
            if bad:
                request.num_computed_tokens = bad[0] * BLOCK
                request.life += 1
                request.flying = request.placeholders = 0
                self.recomputed += 1
