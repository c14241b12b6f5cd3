"""Small serdes for tests."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from lmcache_core.memory.backend import MemoryBackend
from lmcache_core.spi import BytesSerde, Capabilities, Corrupt, TensorSerde


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Nothing to choose."""


class Here(MemoryBackend):
    """Says that its values are used where they lie."""

    capabilities = Capabilities(resident=True)


class Squeeze(BytesSerde):
    """zlib with its length checked."""

    config_type = NoOptions
    wire_id = "squeeze"
    lossless = True

    def __init__(self, config=None, /):
        pass

    def bound(self, nbytes):
        return nbytes + 64 + nbytes // 100

    def encode(self, info, source, into):
        data = zlib.compress(source)
        into[: len(data)] = data
        return len(data)

    def decode(self, info, source, into):
        try:
            data = zlib.decompress(source)
        except zlib.error as error:
            raise Corrupt(str(error)) from error
        if len(data) != into.nbytes:
            raise Corrupt(f"{len(data)} bytes instead of {into.nbytes}")
        into[:] = data


class Double(TensorSerde):
    """Every byte twice."""

    config_type = NoOptions
    wire_id = "double"
    lossless = True

    def __init__(self, config=None, /):
        pass

    def bound(self, spec):
        return 2 * spec.nbytes

    def encode(self, info, source, into):
        into[: 2 * source.nbytes : 2] = source
        into[1 : 2 * source.nbytes : 2] = source
        return 2 * source.nbytes

    def decode(self, info, source, into):
        if source.nbytes != 2 * into.nbytes or source[::2] != source[1::2]:
            raise Corrupt("halves differ")
        into[:] = bytes(source[::2])


@dataclass(frozen=True, slots=True)
class LossyOptions:
    """Changes nothing but its name."""

    keep: int = 4


class Lossy(Double):
    """Forgets the lower four bits of every second byte."""

    config_type = LossyOptions
    wire_id = "lossy"
    lossless = False
    error_bound = "15"

    def bound(self, spec):
        return spec.nbytes

    def encode(self, info, source, into):
        into[: source.nbytes] = source
        into[: source.nbytes : 2] = bytes(byte & 0xF0 for byte in source[::2])
        return source.nbytes

    def decode(self, info, source, into):
        into[:] = source


class Declines(Double):
    """Never encodes."""

    wire_id = "declines"

    def encode(self, info, source, into):
        raise ValueError("not for me")


class Broken(Double):
    """Gives back something else."""

    wire_id = "broken"

    def decode(self, info, source, into):
        super().decode(info, source, into)
        into[-1] ^= 1


class Sealing(Squeeze):
    """Must never be left out."""

    wire_id = "sealing"
    required = True


class SealingNothing(Declines):
    """Must never be left out, and declines."""

    wire_id = "nothing"
    required = True


class SealingBadly(Broken):
    """Must never be left out, and does not work."""

    wire_id = "badly"
    required = True


class High(TensorSerde):
    """Keeps the upper byte of every element."""

    config_type = NoOptions
    wire_id = "high"
    lossless = False
    error_bound = "a power of two"

    def __init__(self, config=None, /):
        pass

    def bound(self, spec):
        return spec.nbytes // 2

    def encode(self, info, source, into):
        into[: source.nbytes // 2] = bytes(source[1::2])
        return source.nbytes // 2

    def decode(self, info, source, into):
        if 2 * source.nbytes != into.nbytes:
            raise Corrupt(f"{source.nbytes} bytes are no half of {into.nbytes}")
        into[1::2] = bytes(source)
        into[::2] = b"\x40" * source.nbytes
