"""What a cache of one model may serve, and what it has to: by the published rules alone, without a byte of the cache.

A chunk is known by what precedes it: weights, salt and every token up to its end. Of each KV cache group it is there
once a request that may keep it has computed to its end while all of its blocks were the request's own; a recurrent state
only if a step has ended there. A hit needs all chunks of full attention, of a sliding window those that its last tokens
lie in, of a state the one that ends with the hit.
"""

from __future__ import annotations

from engines.vllm.tests.stand_ins import CHUNK


class Reference:
    """Args:
    groups: KV cache groups of the engine.
    exact: nothing is lost on the way: whatever may be served is served.
    """

    def __init__(self, groups, *, exact, skip_last=0, save_decode=False):
        self.groups, self.exact = groups, exact
        self.page = max(group.block for group in groups)
        self.whole = any(group.kind != "full" for group in groups)
        self.skip_last, self.save_decode = skip_last, save_decode
        self.there = set()
        self.offers = {}
        self.served = 0

    def asked(self, request, weights, local, answer):
        """The cache offers ``answer`` tokens beyond the ``local`` ones."""
        request.fill = request.num_tokens
        if answer:
            assert answer > 0 and (local + answer) % self.page == 0
            assert self._legal(request, weights, local + answer), (
                f"{answer} of {request} came from nowhere"
            )
            self.served += 1
        if not self.exact:
            return
        id = request.request_id
        if not self.offers.get(id):  # what is on offer is not asked about again
            self.offers[id] = self._reach(request, weights)
        reach = min(self.offers[id], request.num_tokens - 1)
        if self.whole and reach < self.offers[id]:
            reach = 0
        wanted = max(0, reach - reach % self.page - local)
        assert answer == wanted, (
            f"{answer} tokens are offered beyond {local}, not {wanted}: {request}"
        )

    def allocated(self, request):
        """Its offer is taken, or is not wanted."""
        self.offers.pop(request.request_id, None)

    def computed(self, request, weights, known, upto, tables):
        """A step computes tokens [known, upto) of a request."""
        wishes = request.kv_transfer_params or {}
        end = min(upto, request.fill - self.skip_last)
        if self.save_decode and known >= request.fill:
            end = max(end, min(known, request.num_tokens - 1))
        end = min(end, wishes.get("lmcache.max_offload_tokens", end))
        for chunk in range(0 if wishes.get("lmcache.skip_save") else end // CHUNK):
            begin, stop = chunk * CHUNK, (chunk + 1) * CHUNK
            for group, table in zip(self.groups, tables, strict=True):
                if group.kind == "state":
                    good = stop == upto
                else:
                    good = all(table[begin // group.block : stop // group.block])
                if good:
                    self.there.add(self._name(request, weights, stop, group))

    def _reach(self, request, weights):
        chunks = (request.num_tokens - self.whole) // CHUNK
        ends = (chunk * CHUNK for chunk in range(chunks, 0, -1))
        return next((end for end in ends if self._legal(request, weights, end)), 0)

    def _legal(self, request, weights, end):
        """Whether all that a hit over so many tokens needs is there."""
        for group in self.groups:
            last = -(-end // CHUNK)
            seen = {"full": 0, "window": max(0, end - group.window), "state": end - 1}
            if group.kind == "state" and end % CHUNK:
                return False
            if any(
                self._name(request, weights, (chunk + 1) * CHUNK, group) not in self.there
                for chunk in range(seen[group.kind] // CHUNK, last)
            ):
                return False
        return True

    def _name(self, request, weights, end, group):
        return weights, request.cache_salt, tuple(request.whole[:end]), group.number
