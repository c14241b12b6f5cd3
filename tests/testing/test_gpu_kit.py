"""``GPUConnectorTests`` against a plain connector on bytes, and against one mutant per law."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from lmcache_core import ops
from lmcache_core.spi import Copied, Fence, GPUConnector, PageSpec
from lmcache_core.testing.gpu import GPU_LAWS, GPUConnectorTests
from lmcache_core.testing.laws import broken_laws, run_laws


class Over(Fence):
    def __init__(self, copied: Copied) -> None:
        self.copied = copied

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None, /) -> Copied | None:
        return self.copied


class Plain(GPUConnector):
    """The reference operations in the calling thread."""

    tensors: Mapping[str, Any]
    specs: tuple[PageSpec, ...]

    def bind(self, tensors: Mapping[str, Any], specs: Sequence[PageSpec], /) -> None:
        self.tensors, self.specs = dict(tensors), tuple(specs)

    def table(self, group: int, layers: Sequence[int] | None) -> ops.PlaneTable:
        found = [
            spec
            for spec in self.specs
            if spec.group == group and (layers is None or spec.layer in layers)
        ]
        if not found:
            raise ValueError(f"nothing is bound for group {group}")
        return ops.PlaneTable(found)

    def pack(
        self,
        group: int,
        blocks: Sequence[int],
        first: int,
        count: int,
        into: memoryview,
        /,
        *,
        seed: int | None = None,
        layers: Sequence[int] | None = None,
        stream: Any = None,
    ) -> Fence:
        table = self.table(group, layers)
        return Over(
            Copied(ops.Reference.gather(table, array("q", blocks), first, count, into, seed=seed))
        )

    def unpack(
        self,
        group: int,
        blocks: Sequence[int],
        first: int,
        count: int,
        source: memoryview,
        /,
        *,
        seed: int | None = None,
        digests: bytes | None = None,
        layers: Sequence[int] | None = None,
        stream: Any = None,
    ) -> Fence:
        table = self.table(group, layers)
        bad = ops.Reference.scatter(
            table, array("q", blocks), first, count, source, seed=seed, digests=digests
        )
        return Over(Copied(None, bad))

    def close(self) -> None:
        self.tensors, self.specs = {}, ()


class TestPlain(GPUConnectorTests):
    def make_connector(self) -> GPUConnector:
        return Plain()


class SwapsTheEnds(Plain):
    def pack(
        self, group: Any, blocks: Any, first: Any, count: Any, into: Any, /, **o: Any
    ) -> Fence:
        fence = super().pack(group, blocks, first, count, into, **o)
        if not o and into.nbytes:
            into[0], into[-1] = into[-1], into[0]
        return fence


class WritesTheNextBlock(Plain):
    def unpack(
        self, group: Any, blocks: Any, first: Any, count: Any, src: Any, /, **o: Any
    ) -> Fence:
        fence = super().unpack(group, blocks, first, count, src, **o)
        if first:
            self.tensors["kv"][-1] ^= 1
        return fence


class WrapsBlocksAround(Plain):
    def pack(
        self, group: Any, blocks: Any, first: Any, count: Any, into: Any, /, **o: Any
    ) -> Fence:
        wrapped = [block % self.specs[0].blocks for block in blocks]
        return super().pack(group, wrapped, first, count, into, **o)


class NeverFindsDamage(Plain):
    def unpack(
        self, group: Any, blocks: Any, first: Any, count: Any, src: Any, /, **o: Any
    ) -> Fence:
        super().unpack(group, blocks, first, count, src, **o)
        return Over(Copied())


class TakesAllLayers(Plain):
    def table(self, group: int, layers: Sequence[int] | None) -> ops.PlaneTable:
        return super().table(group, None)


class KeepsThePayload(Plain):
    def pack(
        self, group: Any, blocks: Any, first: Any, count: Any, into: Any, /, **o: Any
    ) -> Fence:
        self.kept = into
        return super().pack(group, blocks, first, count, into, **o)


class HoldsTheTensors(Plain):
    def close(self) -> None:
        """Forgets nothing."""


MUTANTS: list[tuple[str, type[Plain]]] = [
    ("G1", SwapsTheEnds),
    ("G2", WritesTheNextBlock),
    ("G3", WrapsBlocksAround),
    ("G4", NeverFindsDamage),
    ("G5", TakesAllLayers),
    ("G6", KeepsThePayload),
    ("G7", HoldsTheTensors),
]


@pytest.mark.parametrize(("number", "mutant"), MUTANTS)
def test_mutant_is_killed_by_its_law_alone(number: str, mutant: type[Plain]) -> None:
    class Tests(GPUConnectorTests):
        def make_connector(self) -> GPUConnector:
            return mutant()

    verdicts = run_laws(Tests)
    assert broken_laws(verdicts) == {number}, verdicts


def test_every_law_has_a_mutant() -> None:
    assert {number for number, _ in MUTANTS} == set(GPU_LAWS)
