"""``SerdeTests`` against honest serdes, and against one mutant per law."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from lmcache_core.spi import BytesSerde, Corrupt, KVSpec, TensorSerde, ValueInfo
from lmcache_core.testing.laws import broken_laws, run_laws
from lmcache_core.testing.serde import SERDE_LAWS, SerdeTests


@dataclass(frozen=True, slots=True)
class NoConfig:
    """Nothing to configure."""


class Deflate(BytesSerde):
    """zlib; a little-endian length in front."""

    config_type = NoConfig
    wire_id = "deflate"
    lossless = True

    def __init__(self, config: NoConfig, /) -> None:
        pass

    def bound(self, nbytes: int, /) -> int:
        return 4 + nbytes + nbytes // 1000 + 64

    def encode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> int:
        packed = struct.pack("<I", source.nbytes) + zlib.compress(source, 1)
        into[: len(packed)] = packed
        return len(packed)

    def decode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> None:
        try:
            engine = zlib.decompressobj()
            plain = engine.decompress(source[4:], into.nbytes + 1)
        except zlib.error as error:
            raise Corrupt(f"deflate: {error}") from None
        if len(plain) != into.nbytes:
            raise Corrupt(f"deflate: {len(plain)} bytes, expected {into.nbytes}")
        into[:] = plain


class HalfBytes(TensorSerde):
    """Lossy: keeps the upper byte of each bfloat16, declines what is not finite."""

    config_type = NoConfig
    wire_id = "upper8"
    lossless = False
    error_bound = "relative error at most 1/2 of the value"

    def __init__(self, config: NoConfig, /) -> None:
        pass

    def bound(self, spec: KVSpec, /) -> int:
        return spec.nbytes // 2

    def encode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> int:
        high, low = source[1::2].tobytes(), source[::2].tobytes()
        if any(h & 0x7F == 0x7F and b & 0x80 for h, b in zip(high, low, strict=True)):
            raise ValueError("not finite")
        into[: len(high)] = high
        return len(high)

    def decode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> None:
        if source.nbytes * 2 != into.nbytes:
            raise Corrupt(f"upper8: {source.nbytes} bytes for {into.nbytes}")
        into[:] = b"".join(bytes((0x40, byte)) for byte in source)


class TestDeflate(SerdeTests):
    def make_serde(self) -> BytesSerde:
        return Deflate(NoConfig())


class TestHalfBytes(SerdeTests):
    def make_serde(self) -> TensorSerde:
        return HalfBytes(NoConfig())

    def check_close(self, spec: KVSpec, before: bytes, after: bytes) -> None:
        assert before[1::2] == after[1::2]


class FlipsABit(Deflate):
    def decode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> None:
        super().decode(info, source, into)
        into[-1] ^= 1


class ReturnsMoreThanItsBound(Deflate):
    def encode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> int:
        super().encode(info, source, into)
        return into.nbytes + 1


class RaisesTheLibrarysError(Deflate):
    def decode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> None:
        zlib.decompress(source[4:])
        super().decode(info, source, into)


class KeepsTheSource(Deflate):
    kept: list[memoryview] = []  # noqa: RUF012  # shared state is the mutation

    def encode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> int:
        if not source.readonly:
            self.kept[:] = [source]
        return super().encode(info, source, into)


class CountsItsCalls(Deflate):
    calls = 0

    def encode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> int:
        nbytes = super().encode(info, source, into)
        self.calls += 1
        into[3] = self.calls % 256
        return nbytes


class DeclinesWithTypeError(Deflate):
    def encode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> int:
        if source[:4] == b"\xff" * 4:
            raise TypeError("not a number")
        return super().encode(info, source, into)


class HasALongName(Deflate):
    wire_id = "deflate-with-length"


MUTANTS: list[tuple[str, type[Deflate]]] = [
    ("S1", FlipsABit),
    ("S2", ReturnsMoreThanItsBound),
    ("S3", RaisesTheLibrarysError),
    ("S4", KeepsTheSource),
    ("S5", CountsItsCalls),
    ("S6", DeclinesWithTypeError),
    ("S7", HasALongName),
]


@pytest.mark.parametrize(("number", "mutant"), MUTANTS)
def test_mutant_is_killed_by_its_law_alone(number: str, mutant: Callable[[Any], Deflate]) -> None:
    class Tests(SerdeTests):
        def make_serde(self) -> BytesSerde:
            return mutant(NoConfig())

    verdicts = run_laws(Tests)
    assert broken_laws(verdicts) == {number}, verdicts


def test_every_law_has_a_mutant() -> None:
    assert {number for number, _ in MUTANTS} == set(SERDE_LAWS)


def test_lossy_serde_without_a_check_of_its_bound_fails() -> None:
    class Tests(SerdeTests):
        def make_serde(self) -> TensorSerde:
            return HalfBytes(NoConfig())

    assert broken_laws(run_laws(Tests)) == {"S1"}
