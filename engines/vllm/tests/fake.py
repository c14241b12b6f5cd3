"""An engine without a model: vLLM's scheduler as far as a connector sees it, and a forward pass that knows the truth.

A pass that reads anything but the truth writes poison, and every sampled token comes from a context that was looked at
byte by byte: wrong bytes cannot stay unseen. Of a model with several KV cache groups the blocks come out of one pool.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from types import SimpleNamespace

from lmcache_engine_vllm import halves

from engines.vllm.tests.memory import Memory, groups_of, truths
from engines.vllm.tests.stand_ins import NAMES, Pool, Request, cache_config, config
from engines.vllm.tests.tables import Tables


class Engine(Tables):
    """One engine on a daemon.

    Args:
        kinds: of the layers, one KV cache group each.
        ranks, replicas, stages: tensor-parallel ranks, how many of them hold the same, and stages of a pipeline.
        depth: steps scheduled before the output of the first is looked at.
        budget: tokens per step.
        hooked: of each group, layers around which hooks are called; recurrent layers never have them.
        most: tokens of an offer that are taken, as one of several connectors sees it.
        reference: told all that is asked and computed.
    """

    def __init__(
        self,
        daemon,
        *,
        kinds=("full",),
        blocks=24,
        budget=16,
        depth=1,
        salt="",
        ranks=1,
        replicas=1,
        stages=1,
        hooked=2,
        most=None,
        reference=None,
        **how,
    ):
        self.cache = cache_config(blocks, kinds)
        self.cache.kv_tp_replicas = replicas
        self.groups = groups_of(self.cache, kinds)
        self.page = max(group.block for group in self.groups)
        self.memory = Memory(blocks, self.groups, ranks, replicas, stages)
        how = {"engine": f"engine-{next(NAMES)}", "tensor": ranks, "pipeline": stages} | how
        self.workers = []
        for rank, tensors in enumerate(self.memory.tensors):
            given = config(daemon, rank=rank, **how)
            self.workers.append(halves.Halves(given, self.cache, False, shared=False))
            self.workers[-1].register_kv_caches(tensors)
        self.worker, self.given = self.workers[0], config(daemon, **how)
        hooks = [group.names[:hooked] for group in self.groups if group.kind != "state"]
        self.hooks = [name for name in self.memory.order if any(name in names for names in hooks)]
        self.most, self.reference = most, reference
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
        halves = (*self.workers, self.scheduler)
        closing = [threading.Thread(target=half.close) for half in halves]
        for each in closing:
            each.start()
        for each in closing:
            each.join()

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
            self._drop(request)  # loaded and not begun
            request.num_computed_tokens = 0
        self.pool.reset()
        assert self.scheduler.reset() is not False
        if self.reference is not None:
            self.reference.offers.clear()
        self.salt = salt

    # -- scheduler -------------------------------------------------------------------------------------------

    def schedule(self):
        scheduled, left = {}, self.budget
        before = {}
        for id in list(self.running):
            request = self.requests[id]
            if id not in self.running:
                continue
            have, known = request.num_tokens + request.placeholders, request.num_computed_tokens
            new = self._cut(request, known, min(have - known, left))
            if new <= 0 or known + 1 > len(request.whole):
                continue
            while not self._grow(request, known, known + new):
                victim = self.running.pop()
                self._preempt(victim)
                left += scheduled.pop(victim, 0)
                if victim == id:
                    break
            if id not in self.running:
                break
            scheduled[id], before[id] = new, known
            left -= new
        fresh = []
        for id in sorted(self.waiting, key=lambda id: not self.requests[id].num_computed_tokens):
            if left <= 0:
                break
            request = self.requests[id]
            if request.state == "loading":
                continue
            loaded, external, waits = request.num_computed_tokens, 0, False
            local, tables = 0, None
            if not loaded:
                local, tables = self._local(request)
                external, waits = self._offer(request, local)
                if external is None:
                    continue
            known = loaded or local + external
            new = 0 if waits else self._cut(request, known, min(request.num_tokens - known, left))
            if not self._fits(request) if waits else new <= 0:
                break
            if tables is not None:
                self._take(request, tables, known)
            if not self._grow(request, known, known + new):
                if tables is not None:
                    self._drop(request)
                break
            found = SimpleNamespace(get_block_ids=lambda request=request: copy.copy(request.tables))
            self.scheduler.allocated(request, external, found)
            if self.reference is not None:
                self.reference.allocated(request)
            self.external += external
            if request.served is None:
                request.served = known
            if waits:
                request.num_computed_tokens, request.before = known, request.state
                request.state = "loading"
                continue
            self._admit(request, known, new, fresh, scheduled, before)
            left -= new
        offers = {
            id: self._name(self.requests[id], before[id], before[id] + n)
            for id, n in scheduled.items()
        }
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
                get_block_ids=lambda id: self.requests[id].tables if id in scheduled else None,
                boundary_state_offloads={id: offer for id, offer in offers.items() if offer},
            ),
            finished_req_ids=over,
        )
        step = self.scheduler.build(out)
        out.kv_connector_block_state = None
        out.before = before
        out.tables = {id: copy.deepcopy(self.requests[id].tables) for id in scheduled}
        out.asked = {id: self.requests[id] for id in scheduled}
        out.salt = self.salt
        out.lives = {id: self.requests[id].life for id in scheduled}
        self.execute(out, step)
        for id, new in scheduled.items():
            request = self.requests[id]
            if self.reference is not None:
                upto = before[id] + new
                self.reference.computed(request, self.salt, before[id], upto, out.tables[id])
            request.num_computed_tokens += new
            request.flying += new
            if request.num_computed_tokens >= request.num_tokens + request.placeholders:
                request.placeholders += 1
        return out

    def _offer(self, request, local):
        """Tokens that the cache supplies, as many as are wanted, and whether the request waits for them."""
        external, waits = self.scheduler.matched(request, local)
        if external is None:
            return None, False
        again, _ = self.scheduler.matched(request, local)
        assert again == external, "asked again, another answer"
        if self.reference is not None:
            self.reference.asked(request, self.salt, local, external)
        if self.most is not None:
            external = min(external, self.most)
        assert external % self.page == 0
        assert local + external < request.num_tokens
        return external, waits and external > 0

    def _admit(self, request, known, new, fresh, scheduled, before):
        id = request.request_id
        self.waiting.remove(id)
        request.num_computed_tokens = known
        if request.state != "preempted":
            fresh.append(id)
        request.state = "running"
        self.running.append(id)
        scheduled[id], before[id] = new, known

    def _preempt(self, id):
        request = self.requests[id]
        self._drop(request)
        request.num_computed_tokens = 0
        request.life += 1
        request.flying = request.placeholders = 0
        request.state = "preempted"
        self.waiting.appendleft(id)

    def _free(self, request):
        self.requests.pop(request.request_id)
        assert self.scheduler.finished(request) == (False, None)
        self.over.add(request.request_id)
        if request.state == "loading":
            self.zombies[request.request_id] = request  # freed when the load has ended
        else:
            self._drop(request)

    # -- worker ----------------------------------------------------------------------------------------------

    def execute(self, out, step):
        steps = [
            copy.deepcopy(step) for _ in self.workers
        ]  # each rank gets its own through a pickle
        for worker, each in zip(self.workers, steps, strict=True):
            worker.begin(each)
            worker.load()
            for name in self.hooks:
                worker.layer(name)
        out.right, written = {}, []
        order = sorted(out.num_scheduled_tokens, key=lambda id: out.before[id])
        for id in order:
            request, tables, known = out.asked[id], out.tables[id], out.before[id]
            kv = truths(request.whole, out.salt + request.cache_salt)
            good = out.right[id] = self.memory.right(kv, tables, known)
            upto = known + out.num_scheduled_tokens[id]
            for name, cells, where, value in self.memory.write(kv, tables, known, upto):
                cells[where] = value if good else 0xBD
                written.append((name, cells, where, cells[where]))
        for _, cells, where, _ in written:
            cells[where] = 0xA6  # what is copied before its layer is computed is wrong
        for layer in self.memory.order:
            for name, cells, where, value in written:
                if name == layer:
                    cells[where] = value
            for worker in self.workers if layer in self.hooks else ():
                worker.computed(layer)
        out.failed, out.missed, arrived = set(), set(), []
        for worker in self.workers:
            worker.save()
            arrived.append(worker.get_finished(out.finished_req_ids)[1] or set())
            out.missed |= worker.missed()
            out.failed |= worker.failures()
        assert not (out.failed if len(self.groups) > 1 else out.missed)
        assert self.memory.clean()
        out.arrived = set.intersection(*arrived)

    # -- output ----------------------------------------------------------------------------------------------

    def update(self, out):
        if out.failed:
            self._invalid(out)
        for id in out.arrived or ():
            request = self.requests.get(id)
            if request is not None:
                assert request.state == "loading"
                request.state = request.before
                if id in out.missed:
                    request.num_computed_tokens = 0
                    self.recomputed += 1
                if not request.num_computed_tokens:
                    self._drop(request)
            elif id in self.zombies:
                self._drop(self.zombies.pop(id))
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
        output = SimpleNamespace(invalid_block_ids=out.failed, failed_recving=out.missed)
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
            (table,), (group,) = request.tables, self.groups
            bad = [at for at in range(-(-base // group.block)) if table[at] in out.failed]
            if bad:
                request.num_computed_tokens = bad[0] * group.block
                request.life += 1
                request.flying = request.placeholders = 0
                self.recomputed += 1
