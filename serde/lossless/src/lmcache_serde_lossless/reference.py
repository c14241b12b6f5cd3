"""The two encodings in plain Python: their specification, and what runs where the native part is missing.

All numbers are little-endian. A segment is a number of equal planes, encoded one after the other.

``x12``, a plane of *n* bfloat16: mode u8; 15 exponents u8; escapes u32; 12 zeros; *n* bytes
``sign << 7 | mantissa``; ``(n + 1) // 2`` bytes of codes; room for ``(n + 255) // 256`` exponents. Code *c* of an
element stands for exponent *c* of the 15; 15 is an escape: its exponent is the next in the room. Codes come
in blocks of 128 elements, the first 64 in the lower halves of 64 bytes, the others in the upper; the last
block, of *r* elements, has ``(r + 1) // 2`` bytes. Mode 0 instead: the plane as it is. Zeros fill up the segment to
a multiple of 512.

``xr``, a plane of *n* elements: mode u8; bits u8; classes u8; zero; length u32 of what follows. An element
rotated left by one bit has the exponent in its top byte, the symbol; the other bytes are kept. Mode 1: with
several classes, u8 for each channel; for each class the first symbol u8, the number of symbols less one u8,
a frequency u16 each; the kept bytes; the symbols by ``lmcache_core.codecs``. Mode 0: the plane as it is.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence

from lmcache_core import codecs

BLOCK = 128
ALIGNED = 512
CLASSES = 8
BITS = 11
_X12 = struct.Struct("<B15sI12x")
_XR = struct.Struct("<BBBxI")


def x12_bound(nbytes: int, planes: int) -> int:
    """Most bytes of a segment."""
    n = nbytes // planes // 2
    return _up(planes * max(1 + 2 * n, _x12_nbytes(n)))


def x12_encode(source: memoryview, into: memoryview, planes: int) -> int:
    """Write the encoded form and return its length."""
    at, step = 0, source.nbytes // planes
    for plane in range(planes):
        data = _x12_plane(source[plane * step : plane * step + step])
        into[at : at + len(data)] = data
        at += len(data)
    into[at : _up(at)] = bytes(_up(at) - at)
    return _up(at)


def x12_decode(source: memoryview, into: memoryview, planes: int) -> bool:
    """Rebuild ``into``; False when ``source`` is no such segment."""
    at, n = 0, into.nbytes // planes // 2
    for plane in range(planes):
        target = into[2 * n * plane : 2 * n * (plane + 1)]
        left = source[at:]
        if left.nbytes > 2 * n and left[0] == 0:
            target[:] = left[1 : 1 + 2 * n]
            at += 1 + 2 * n
        elif left.nbytes >= _x12_nbytes(n) and left[0] == 1:
            if not _x12_join(left[: _x12_nbytes(n)], target):
                return False
            at += _x12_nbytes(n)
        else:
            return False
    return _up(at) == source.nbytes


def xr_bound(nbytes: int, planes: int) -> int:
    """Most bytes of a segment."""
    return planes * _XR.size + nbytes


def xr_encode(source: memoryview, into: memoryview, planes: int, item: int, channels: int) -> int:
    """Write the encoded form and return its length."""
    at, step = 0, source.nbytes // planes
    for plane in range(planes):
        data = _xr_plane(source[plane * step : plane * step + step], item, channels)
        into[at : at + len(data)] = data
        at += len(data)
    return at


def xr_decode(source: memoryview, into: memoryview, planes: int, item: int, channels: int) -> bool:
    """Rebuild ``into``; False when ``source`` is no such segment."""
    at, step = 0, into.nbytes // planes
    for plane in range(planes):
        if source.nbytes - at < _XR.size:
            return False
        mode, bits, classes, length = _XR.unpack_from(source, at)
        at += _XR.size
        body, target = source[at : at + length], into[plane * step : plane * step + step]
        if body.nbytes != length:
            return False
        if mode == 0 and length == step:
            target[:] = body
        elif mode != 1 or not _xr_join(body, target, item, channels, bits, classes):
            return False
        at += length
    return at == source.nbytes


def _up(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


def _x12_nbytes(n: int) -> int:
    return _X12.size + n + (n + 1) // 2 + (n + 255) // 256


def _halves(n: int) -> Iterator[tuple[int, int, int]]:
    """For each element: its byte among the codes, and by how many bits its code is shifted there."""
    for begin in range(0, n, BLOCK):
        half = (min(BLOCK, n - begin) + 1) // 2
        for i in range(min(BLOCK, n - begin)):
            yield begin + i, begin // 2 + i % half, 4 * (i >= half)


def _commonest(words: Sequence[int]) -> list[int]:
    """The 15 commonest exponents of a sample: 64 elements in 704, all of a short plane."""
    n, counts = len(words), [0] * 256
    for begin in range(0, n, 64 if n < 8192 else 704):
        for word in words[begin : begin + 64]:
            counts[word >> 7 & 255] += 1
    found = []
    for _ in range(15):
        found.append(counts.index(max(counts)))
        counts[found[-1]] = 0
    return found


def _x12_plane(source: memoryview) -> bytes:
    words = array("H", source.tobytes())
    n, common = len(words), _commonest(words)
    code_of = {exponent: code for code, exponent in reversed(list(enumerate(common)))}
    low, codes, escapes = bytearray(n), bytearray((n + 1) // 2), bytearray()
    for i, byte, shift in _halves(n):
        word = words[i]
        low[i] = (word >> 8 & 0x80) | (word & 0x7F)
        code = code_of.get(word >> 7 & 255, 15)
        codes[byte] |= code << shift
        if code == 15:
            escapes.append(word >> 7 & 255)
    room = (n + 255) // 256
    if len(escapes) > room:
        return b"\0" + source.tobytes()
    return b"".join(
        (_X12.pack(1, bytes(common), len(escapes)), low, codes, escapes.ljust(room, b"\0"))
    )


def _x12_join(plane: memoryview, into: memoryview) -> bool:
    n = into.nbytes // 2
    _, common, count = _X12.unpack_from(plane)
    low, codes = plane[_X12.size :], plane[_X12.size + n :]
    escapes = list(plane[_X12.size + n + (n + 1) // 2 :][:count])
    if count > (n + 255) // 256:
        return False
    words, used = array("H", bytes(2 * n)), 0
    for i, byte, shift in _halves(n):
        code = codes[byte] >> shift & 15
        if code == 15:
            if used == count:
                return False
            exponent, used = escapes[used], used + 1
        else:
            exponent = common[code]
        words[i] = (low[i] & 0x80) << 8 | exponent << 7 | (low[i] & 0x7F)
    into[:] = words.tobytes()
    return used == int(count)


def _turned(data: bytes, item: int, by: int) -> bytes:
    """All elements rotated left by so many bits."""
    width = 8 * item
    mask, out = (1 << width) - 1, bytearray()
    for at in range(0, len(data), item):
        word = int.from_bytes(data[at : at + item], "little")
        out += (((word << by) | (word >> width - by)) & mask).to_bytes(item, "little")
    return bytes(out)


def _classes(symbols: bytes, channels: int, classes: int) -> bytes:
    """Channels of similar mean symbol in one class, about equally many in each."""
    rows = len(symbols) // channels
    looked = range(0, rows, max(1, rows // 64))
    means = [
        min(4095, 16 * sum(symbols[row * channels + c] for row in looked) // len(looked))
        for c in range(channels)
    ]
    order = sorted(means)
    first = {mean: order.index(mean) for mean in set(means)}
    return bytes(first[mean] * classes // channels for mean in means)


def normalised(counts: Sequence[int], bits: int) -> list[int]:
    """Frequencies that sum to ``1 << bits``; what occurs keeps at least 1."""
    total, goal = sum(counts), 1 << bits
    if not total:
        return [goal, *counts[1:]]
    found = [max(1, count * goal // total) if count else 0 for count in counts]
    while (surplus := sum(found) - goal) != 0:
        largest = found.index(max(found))
        found[largest] -= surplus if surplus < 0 else min(surplus, found[largest] // 2)
    return found


def _xr_plane(source: memoryview, item: int, channels: int) -> bytes:
    n = source.nbytes // item
    classes = 1 if not n or n % channels else min(max(n // 6144, 1), CLASSES)
    data = source.tobytes() if item == 1 else _turned(source.tobytes(), item, 1)
    symbols = data[item - 1 :: item]
    groups = _classes(symbols, channels, classes) if classes > 1 else b"\0"
    counts = [[0] * 256 for _ in range(classes)]
    for i, symbol in enumerate(symbols):
        counts[groups[i % len(groups)]][symbol] += 1
    side, freqs = bytearray(groups if classes > 1 else b""), array("H")
    for each in counts:
        table = normalised(each, BITS)
        freqs.extend(table)
        used = [symbol for symbol, freq in enumerate(table) if freq]
        side += bytes((used[0], used[-1] - used[0]))
        side += array("H", table[used[0] : used[-1] + 1]).tobytes()
    kept = b"".join(data[at : at + item - 1] for at in range(0, len(data), item))
    room = bytearray(codecs.rans_bound(n, BITS))
    nbytes = codecs.rans_encode(codecs.RansTables(freqs, BITS), groups, symbols, room)
    body = b"".join((side, kept if item > 1 else b"", room[:nbytes]))
    plain = len(body) >= source.nbytes
    body = source.tobytes() if plain else body
    return _XR.pack(0 if plain else 1, BITS, classes, len(body)) + body


def _xr_join(
    body: memoryview, into: memoryview, item: int, channels: int, bits: int, classes: int
) -> bool:
    n, at, freqs = into.nbytes // item, 0, array("H")
    if not 1 <= classes <= CLASSES or bits not in codecs.BITS:
        return False
    groups = b"\0"
    if classes > 1:
        groups, at = body[:channels].tobytes(), channels
        if len(groups) < channels or max(groups) >= classes:
            return False
    for _ in range(classes):
        if body.nbytes - at < 2:
            return False
        first, count = body[at], body[at + 1] + 1
        table = body[at + 2 : at + 2 + 2 * count].tobytes()
        at += 2 + 2 * count
        if first + count > 256 or len(table) != 2 * count:
            return False
        freqs.extend([0] * first + list(array("H", table)) + [0] * (256 - first - count))
    kept = body[at : at + n * (item - 1)].tobytes()
    if len(kept) != n * (item - 1):
        return False
    symbols = bytearray(n)
    try:
        tables = codecs.RansTables(freqs, bits)
    except ValueError:
        return False
    if not codecs.rans_decode(tables, groups, body[at + len(kept) :], symbols):
        return False
    if item == 1:
        into[:] = symbols
        return True
    data = bytearray(into.nbytes)
    data[item - 1 :: item] = symbols
    for byte in range(item - 1):
        data[byte::item] = kept[byte :: item - 1]
    into[:] = _turned(bytes(data), item, 8 * item - 1)
    return True
