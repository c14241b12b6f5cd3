"""Which blocks each request of an engine without a model has, as vLLM's managers of KV cache groups give them out."""

from __future__ import annotations


class Tables:
    """What an engine does with the blocks of its requests: one table per KV cache group, 0 where no block is needed."""

    def _cut(self, request, known, new):
        """As many of ``new`` tokens that a recurrent state is whole at the end of a block."""
        block = next((group.block for group in self.groups if group.kind == "state"), 0)
        prompt, end = max(request.prompt, request.num_tokens - 1), known + new
        if not block or known >= prompt:
            return new
        aligned = end // block * block
        if end < prompt and (aligned > known or block <= self.budget):
            end = aligned
        stops = [
            (request.num_tokens - 1) // block * block
        ]  # the last state that a hit can end with
        stops += [(known // block + 1) * block] if known % block else []
        return min([end, *(stop for stop in stops if known < stop)]) - known

    def _label(self, request, group, end):
        return str((group.number, self.salt, request.cache_salt, request.whole[:end]))

    def _local(self, request):
        """Tokens that the engine has by itself, and their blocks by group; 0 where none is needed."""
        for known in range((request.num_tokens - 1) // self.page * self.page, 0, -self.page):
            tables = [[0] * -(-known // group.block) for group in self.groups]
            if all(
                self._find(request, *pair, known) for pair in zip(self.groups, tables, strict=True)
            ):
                return known, tables
        return 0, [[] for _ in self.groups]

    def _find(self, request, group, table, known):
        for at in group.places(known, known):
            label = self._label(request, group, (at + 1) * group.block)
            if not (block := self.pool.by_name.get(label)):
                return False
            table[at] = block
        return True

    def _take(self, request, tables, known):
        """Hold the blocks of a hit, as far as they are needed on top of ``known`` tokens."""
        request.tables = []
        for group, table in zip(self.groups, tables, strict=True):
            first = group.first(known)
            table = [0] * min(first, -(-known // group.block)) + table[first:]
            self.pool.touch([block for block in table if block])
            request.tables.append(table)

    def _name(self, request, known, upto):
        """Let others find what is whole after this step; returns the states that are, as vLLM hands them over."""
        offers = []
        for group, table in zip(self.groups, request.tables, strict=True):
            ends = range(group.block, min(upto, request.num_tokens) + 1, group.block)
            if group.kind == "state":
                ends = [end for end in {known, upto} if end in ends]
                if upto in ends:
                    offers.append((group.number, table[upto // group.block - 1], upto))
            for end in ends:
                if block := table[end // group.block - 1]:
                    self.pool.name(block, self._label(request, group, end))
        return offers

    def _fits(self, request):
        """Whether all of a request has room beside those whose blocks are bound to a load."""
        bound = [each for each in self.requests.values() if each.state != "running" and each.tables]
        need = sum(
            group.most(len(each.whole), self.budget)
            for each in (*bound, request)
            for group in self.groups
        )
        held = sum(bool(block) for each in bound for table in each.tables for block in table)
        return need - held <= len(self.pool.free)

    def _grow(self, request, known, upto):
        """Blocks for tokens [known, upto) beside what they read; what they read no more is free."""
        lacking = []
        for group, table in zip(self.groups, request.tables, strict=True):
            first = group.first(known)
            self.pool.give(table[:first])
            table[:first] = [0] * len(table[:first])
            for at in group.places(known, upto):
                table += [0] * (at + 1 - len(table))
                if not table[at]:
                    lacking.append((table, at))
        found = self.pool.take(len(lacking))
        if found is None:
            return False
        self.memory.spoil(found)
        for (table, at), block in zip(lacking, found, strict=True):
            table[at] = block
        return True

    def _drop(self, request):
        for table in request.tables:
            self.pool.give(table)
        request.tables = []
