"""Length, error and speed of a chain of serdes on real key/value memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_core.spi import Interior, Key, KVSpec, SegmentSpec, ValueInfo
from lmcache_core.wrappers import Serde, recode

LAPS = 3
"""Of everything timed; the fastest counts."""


@dataclass(frozen=True, slots=True)
class Coded:
    """What became of one memory.

    Attributes:
        kv: as decoded.
        raw, stored: bytes.
        encode, decode, copy: seconds of CPU time of one thread, all segments.
        declined: segments that the serde would not take; they count as stored raw.
    """

    kv: Any
    raw: int
    stored: int
    encode: float
    decode: float
    copy: float
    declined: int


def code(kv: Any, chain: Sequence[Serde], chunk: int, /) -> Coded:
    """Encode and decode each layer of each chunk, as a tier would.

    Args:
        kv: ``[layer][plane][token][head][dim]``, bfloat16, on the CPU.
    """
    import torch

    layers, planes, tokens, heads, dim = kv.shape
    pieces = [
        kv[layer, :, first : first + chunk].contiguous()
        for first in range(0, tokens, chunk)
        for layer in range(layers)
    ]
    source = torch.cat([piece.reshape(-1) for piece in pieces]).view(torch.uint8)
    target = torch.zeros_like(source)
    raw, back = (memoryview(each.numpy()) for each in (source, target))  # type: ignore[arg-type]
    infos = []
    for number, piece in enumerate(pieces):
        first, nbytes = number // layers * chunk, piece.nbytes
        segment = SegmentSpec(number % layers, 0, heads, nbytes)
        spec = KVSpec("bfloat16", piece.shape[1], planes, heads, dim, Interior.ROWS, (segment,))
        infos.append(ValueInfo(Key(bytes(32), first.to_bytes(32), 0), spec, first))
    lengths_raw = [piece.nbytes for piece in pieces]
    ins, outs = recode.cut(raw, lengths_raw), recode.cut(back, lengths_raw)

    rooms = _rooms(infos[0].spec, chain)
    coded: list[bytes | None] = []
    for info, data in zip(infos, ins, strict=True):
        try:
            coded.append(bytes(_encode(chain, info, data, rooms)[0]))
        except ValueError:
            coded.append(None)
    taken = [i for i, each in enumerate(coded) if each is not None]
    lengths = [_encode(chain, infos[i], ins[i], rooms)[1] for i in taken]

    def encode() -> None:
        for i in taken:
            _encode(chain, infos[i], ins[i], rooms)

    def decode() -> None:
        for i, sizes in zip(taken, lengths, strict=True):
            _decode(chain, infos[i], memoryview(coded[i] or b""), sizes, outs[i], rooms)

    def copy() -> None:
        for data, into in zip(ins, outs, strict=True):
            into[:] = data

    spent = [_fastest(work) for work in (encode, copy, decode)]
    found = target.view(torch.bfloat16)
    restored, at = torch.empty_like(kv), 0
    for number, piece in enumerate(pieces):
        first, count = number // layers * chunk, piece.numel()
        restored[number % layers, :, first : first + chunk] = found[at : at + count].view(
            piece.shape
        )
        at += count
    stored = sum(
        len(c) if c is not None else i.spec.nbytes for c, i in zip(coded, infos, strict=True)
    )
    return Coded(
        restored, raw.nbytes, stored, spent[0], spent[2], spent[1], len(infos) - len(taken)
    )


def errors(kv: Any, found: Any, /) -> list[float]:
    """Relative root mean square error of keys and of values."""
    exact, got = kv.float(), found.float()
    return [
        float(
            (
                (got[:, plane] - exact[:, plane]).square().sum() / exact[:, plane].square().sum()
            ).sqrt()
        )
        for plane in range(kv.shape[1])
    ]


def _rooms(spec: KVSpec, chain: Sequence[Serde]) -> list[memoryview]:
    rooms, most = [], spec.nbytes
    for serde in chain:
        most = max(most, recode.bound(serde, spec, most))
        rooms.append(memoryview(bytearray(most)))
    return rooms


def _encode(
    chain: Sequence[Serde], info: ValueInfo, data: memoryview, rooms: Sequence[memoryview]
) -> tuple[memoryview, list[int]]:
    """The encoded segment, and the lengths before each serde."""
    lengths = []
    for serde, room in zip(chain, rooms, strict=True):
        lengths.append(data.nbytes)
        data = room[: recode.encode(serde, info, data, room)]
    return data, lengths


def _decode(
    chain: Sequence[Serde], info: ValueInfo, data: memoryview, lengths: Sequence[int],
    into: memoryview, rooms: Sequence[memoryview],
) -> None:  # fmt: skip
    for at in reversed(range(len(chain))):
        step = rooms[at - 1][: lengths[at]] if at else into
        recode.decode(chain[at], info, data, step)
        data = step


def _fastest(work: Callable[[], None]) -> float:
    """CPU time of this thread: other processes do not count, threads of a codec's own do not help."""
    best = float("inf")
    for _ in range(LAPS):
        began = time.thread_time()
        work()
        best = min(best, time.thread_time() - began)
    return best
