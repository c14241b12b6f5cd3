"""What an engine without a model remembers: the blocks of each KV cache group, and the only bytes that are right in them.

A position of attention is a digest of all tokens up to it, and so is a recurrent state: of the tokens it has seen.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy
import torch

from engines.vllm.tests.stand_ins import CELL, LAYERS


@dataclass(frozen=True)
class Group:
    """Layers that remember alike.

    Attributes:
        number: at the engine.
        kind: ``full``, ``window`` or ``state``.
        block: tokens of one block.
        window: tokens that a token sees, itself among them.
    """

    number: int
    kind: str
    block: int
    window: int
    names: tuple

    def first(self, known):
        """The first block that is still needed when ``known`` tokens are there."""
        seen = {"full": 0, "window": known - self.window + 1, "state": known - 1}[self.kind]
        return max(0, seen) // self.block

    def places(self, known, upto):
        """Entries of a table that are blocks while tokens [known, upto) are computed; the rest are empty."""
        end = -(-upto // self.block)
        if self.kind != "state":
            return range(self.first(known), end)
        return sorted({*([self.first(known)] if known else ()), end - 1})

    def most(self, tokens, budget):
        """Blocks that a request of so many tokens ever has at once."""
        whole = -(-tokens // self.block)
        seen = {
            "full": tokens,
            "window": self.window + budget + 2 * self.block,
            "state": 3 * self.block,
        }
        return min(whole, -(-seen[self.kind] // self.block))


def groups_of(cache, kinds):
    return [
        Group(
            number, kind, group.kv_cache_spec.block_size, getattr(group.kv_cache_spec, "sliding_window", 0),
            tuple(group.layer_names),
        )
        for number, (kind, group) in enumerate(zip(kinds, cache.kv_cache_groups, strict=True))
    ]  # fmt: skip


class Memory:
    """Args:
    tensor, replicas, stages: how layers and heads are spread over ranks.
    """

    def __init__(self, blocks, groups, tensor=1, replicas=1, stages=1):
        self.groups, self.cells, self.tensors = groups, [], []
        self.order = [name for at in range(LAYERS) for name in (g.names[at] for g in groups)]
        """Names of all layers, as a pass goes through them."""
        self.mask = []
        for rank in range(tensor * stages):
            per = LAYERS // stages
            begin = rank // tensor * per
            mine = {n: group for group in groups for n in group.names[begin : begin + per]}
            self.tensors.append(
                {
                    name: torch.full(
                        (blocks, 1, 1 if group.kind == "state" else group.block, CELL), 0xA5, dtype=torch.uint8
                    )
                    for name, group in mine.items()
                }
            )  # fmt: skip
            self.cells.append({name: each.numpy() for name, each in self.tensors[-1].items()})
            self.mask.append(
                {name: self.order.index(name) * 16 + rank % tensor // replicas for name in mine}
            )

    def spoil(self, blocks):
        """Whatever was in blocks that somebody gets is not for him."""
        for held in self.cells:
            for cells in held.values():
                cells[blocks] = 0xA5

    def clean(self):
        """Whether nobody wrote where no request has anything: an empty entry of a table is no place for a load."""
        return all((cells[0] == 0xA5).all() for held in self.cells for cells in held.values())

    def right(self, kv, tables, known):
        """Whether all that a pass from token ``known`` on reads holds the truth."""
        seen = {"full": known, "state": 1}
        return not known or all(
            numpy.array_equal(cells[where], value)
            for group, table in zip(self.groups, tables, strict=True)
            for _, cells, where, value in self._cells(
                kv, group, table, max(0, known - seen.get(group.kind, group.window - 1)), known
            )
        )

    def write(self, kv, tables, known, upto):
        """What a pass over tokens [known, upto) leaves: name, cells, place and value of each layer of each rank."""
        return [
            (name, cells, where, value)
            for group, table in zip(self.groups, tables, strict=True)
            for name, cells, where, value in self._cells(
                kv, group, table, upto - 1 if group.kind == "state" else known, upto
            )
        ]

    def _cells(self, kv, group, table, begin, end):
        at = numpy.arange(begin, end)
        blocks = numpy.array(table)[at // group.block]
        assert blocks.all(), f"group {group.number} has no block for tokens {begin} to {end}"
        where = (blocks, 0, at * 0 if group.kind == "state" else at % group.block)
        for held, masks in zip(self.cells, self.mask, strict=True):
            for name in group.names:
                if name in held:
                    yield name, held[name], where, kv[begin:end] ^ masks[name]


def truths(tokens, salt=""):
    """The only right KV: one row per position, before each layer and rank has its own mark on it."""
    found, state = [], salt.encode()
    for token in tokens:
        state = hashlib.blake2b(state + b"%d" % token, digest_size=CELL).digest()
        found.append(numpy.frombuffer(state, numpy.uint8))
    return numpy.array(found)
