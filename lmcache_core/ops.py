"""Byte work of the hot path: copies, digests, chunk chains, gather and scatter of paged memory.

``Reference`` is the specification, in pure Python. At the first use of an operation (``ops.copy``,
...) the entry point ``native`` of the group ``lmcache_core.ops`` takes its place, if it is
installed and the environment variable ``LMCACHE_NATIVE`` is not ``0``. Import this module and not
the names, or the look-up runs at your import.

A *buffer* is anything with a C-contiguous buffer protocol. No call keeps a view, allocates more
than the bytes it returns, or moves a byte before all sizes and ids are checked: ``TypeError`` for
what is no buffer, ``ValueError`` for the rest. The native operations release the GIL.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import mmap
import os
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby, product
from typing import TYPE_CHECKING, Any

import xxhash

from lmcache_core.spi.layout import Interior, PageSpec

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK_TAG = b"lmcache.chunk\x00"
"""First bytes of the hashed form of every chunk."""
DIGEST_NBYTES = 16
"""Length of one segment digest (xxh3-128, most significant byte first)."""
CHAIN_NBYTES = 32
"""Length of one chunk digest (SHA-256)."""
NAMES = (
    *("copy", "digest", "copy_and_digest", "chain"),
    *("pack_tokens", "gather", "scatter", "populate"),
)
"""What an implementation must offer, besides ``INSTRUCTIONS: str``."""

_NO_EXTRAS = bytes(4)
_POPULATE_WRITE = 23  # Linux 5.14; `mmap` has no name for it


class PlaneTable:
    """The planes of one layout group in payload order, checked and flattened once.

    Consecutive planes of one layer form a *segment*. All planes count in the same unit: one token
    slot, or one recurrent state where ``Interior.STATE``. The payload of ``count`` units holds,
    plane after plane, ``[token][head][cell]`` for ``ROWS``, else ``[block][head][state][cell]``.

    Attributes:
        specs: the planes.
        states: units per block, equal for all planes.
        blocks: block ids below this are valid in every plane.
        segments: number of segments.
        unit_nbytes: payload bytes of one unit over all planes.
        packed: the same as int64: planes, segments, states, blocks; then for each plane pointer,
            heads, cell bytes, strides of block, state and head, 1 if rows else 0, payload bytes of
            one unit before it; then the first plane of each segment, and the number of planes.

    The table holds addresses, not the memory: its owner keeps the engine's tensors alive.
    """

    __slots__ = ("blocks", "packed", "segments", "specs", "states", "unit_nbytes")

    def __init__(self, specs: Sequence[PageSpec], /) -> None:
        self.specs = tuple(specs)
        self.states = self.specs[0].states if self.specs else 1
        self.blocks = min((spec.blocks for spec in self.specs), default=0)
        self.unit_nbytes = 0
        planes, starts = array("q"), array("q")
        for position, spec in enumerate(self.specs):
            shape = (spec.heads, spec.states, spec.cell_bytes)
            strides = (spec.block_stride, spec.state_stride, spec.head_stride)
            if min(shape) < 1 or min(*strides, spec.blocks, spec.pointer) < 0:
                raise ValueError(f"plane {position} has an impossible shape: {spec}")
            expected = 1 if spec.interior is Interior.STATE else self.states
            if spec.states != self.states or spec.states != expected:
                raise ValueError(f"plane {position} has {spec.states} states, expected {expected}")
            if position == 0 or spec.layer != self.specs[position - 1].layer:
                starts.append(position)
            rows = int(spec.interior is Interior.ROWS)
            planes.extend((spec.pointer, spec.heads, spec.cell_bytes, *strides, rows))
            planes.append(self.unit_nbytes)
            self.unit_nbytes += spec.heads * spec.cell_bytes
        self.segments = len(starts)
        head = (len(self.specs), self.segments, self.states, self.blocks)
        self.packed = array("q", head) + planes + starts + array("q", [len(self.specs)])

    def nbytes(self, count: int, /) -> int:
        """Payload bytes of ``count`` units."""
        return self.unit_nbytes * count


class Reference:
    """The operations in plain Python: what every other implementation is compared with."""

    INSTRUCTIONS = "python"

    @staticmethod
    def copy(dst: Buffer, src: Buffer, *, threads: int = 1) -> None:
        """Copy ``src`` over ``dst`` of equal length; overlap behaves as if ``src`` was read first.

        ``threads`` (here and below) bounds the cores of a large call; 1 is the calling thread.
        """
        _threads(threads)
        target, source = _pair(dst, src)
        target[:] = source

    @staticmethod
    def digest(data: Buffer, seed: int) -> bytes:
        """xxh3-128 of ``data`` under a 64-bit seed, canonical (big-endian) form, 16 bytes."""
        return xxhash.xxh3_128_digest(_view(data), _seed(seed))

    @staticmethod
    def copy_and_digest(dst: Buffer, src: Buffer, seed: int) -> bytes:
        """``copy`` and ``digest`` of the copied bytes, in one pass over memory."""
        target, source = _pair(dst, src)
        result = xxhash.xxh3_128_digest(source, _seed(seed))
        target[:] = source
        return result

    @staticmethod
    def chain(root: Buffer, tokens: Buffer, chunk_tokens: int) -> bytes:
        """SHA-256 digests of all full chunks, 32 bytes each, every one covering its whole prefix.

        ``d[i] = SHA256(CHUNK_TAG, d[i-1], u32(chunk_tokens), ids of chunk i, u32(0))`` and
        ``d[-1] = root``; the closing zero says "no extras". All integers are little-endian.
        """
        view, previous = _view(tokens), bytes(_view(root))
        itemsize = memoryview(tokens).itemsize
        if itemsize not in (1, 4) or view.nbytes % 4:
            raise ValueError(
                f"token ids are packed uint32, got {view.nbytes} bytes in items of {itemsize}"
            )
        if len(previous) != CHAIN_NBYTES or not 1 <= chunk_tokens < 1 << 32:
            raise ValueError(
                f"chain of {chunk_tokens}-token chunks from a root of {len(previous)} bytes"
            )
        head, step, out = struct.pack("<I", chunk_tokens), 4 * chunk_tokens, bytearray()
        for start in range(0, view.nbytes - step + 1, step):
            state = hashlib.sha256(CHUNK_TAG + previous + head)
            state.update(view[start : start + step])
            state.update(_NO_EXTRAS)
            previous = state.digest()
            out += previous
        return bytes(out)

    @staticmethod
    def pack_tokens(ids: Sequence[int]) -> bytes:
        """Token ids as little-endian uint32; an error names the first one outside [0, 2**32)."""
        try:
            packed = array("I", ids if isinstance(ids, list | tuple) else list(ids))
        except OverflowError:
            position = next(i for i, value in enumerate(ids) if not 0 <= value < 1 << 32)
            message = f"token id {ids[position]} at position {position} is outside [0, 2**32)"
            raise ValueError(message) from None
        if sys.byteorder == "big":
            packed.byteswap()
        return packed.tobytes()

    @staticmethod
    def gather(
        table: PlaneTable,
        block_ids: Buffer,
        first: int,
        count: int,
        dst: Buffer,
        *,
        seed: int | None = None,
        threads: int = 1,
    ) -> bytes | None:
        """Collect units [first, first + count) of the sequence made by the listed blocks.

        ``block_ids`` holds int64. ``dst`` has exactly ``table.nbytes(count)`` bytes, is laid out as
        ``PlaneTable`` says, and lies outside the planes. ``PAGE`` planes move whole blocks only:
        both ends must be block boundaries. With ``seed`` the xxh3-128 digests of the segments are
        returned, 16 bytes each.
        """
        target = _view(dst, writable=True)
        ids = _check(table, block_ids, first, count, target, seed, threads)
        for at, piece in _pieces(table, ids, first, count):
            target[at : at + piece.nbytes] = piece
        return None if seed is None else b"".join(_segments(table, count, target, seed))

    @staticmethod
    def scatter(
        table: PlaneTable,
        block_ids: Buffer,
        first: int,
        count: int,
        src: Buffer,
        *,
        seed: int | None = None,
        digests: Buffer | None = None,
        threads: int = 1,
    ) -> int:
        """Inverse of ``gather``: spread ``src`` over the listed blocks, leaving all other bytes.

        With ``seed`` and ``digests`` (as ``gather`` returned them) every segment is verified while
        it is copied. Returns the index of the first damaged segment, or -1. The copy is complete
        either way: on anything but -1 the caller must treat all listed blocks as failed.
        """
        source = _view(src)
        ids = _check(table, block_ids, first, count, source, seed, threads)
        expected = b"" if digests is None else bytes(_view(digests))
        wanted = 0 if seed is None else DIGEST_NBYTES * table.segments
        if len(expected) != wanted or (seed is None) != (digests is None):
            raise ValueError(f"seed {seed} and {len(expected)} digest bytes, expected {wanted}")
        found = b"" if seed is None else b"".join(_segments(table, count, source, seed))
        for at, piece in _pieces(table, ids, first, count):
            piece[:] = source[at : at + piece.nbytes]
        damaged = (
            at for at in range(0, wanted, 16) if found[at : at + 16] != expected[at : at + 16]
        )
        return next(damaged, -16) // DIGEST_NBYTES

    @staticmethod
    def populate(view: Buffer, *, threads: int = 1) -> None:
        """Fault in every page of ``view`` without changing a byte; for writing, unless read-only.

        Raises:
            OSError: the kernel refuses the memory (a limit, a poisoned page).
        """
        import ctypes  # here, and below: only the reference needs it

        _threads(threads)
        memory = _view(view)
        if sys.platform == "linux" and memory.nbytes and not memory.readonly:
            start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            base = start & -mmap.PAGESIZE
            libc = ctypes.CDLL(None, use_errno=True)
            length = ctypes.c_size_t(start + memory.nbytes - base)
            while libc.madvise(ctypes.c_void_p(base), length, _POPULATE_WRITE):
                if (code := ctypes.get_errno()) == errno.EINVAL:  # a kernel without it
                    break
                if code not in (errno.EINTR, errno.EAGAIN):
                    what = f"cannot populate {memory.nbytes} bytes: {os.strerror(code)}"
                    raise OSError(code, what)
            else:
                return
        memory[:: mmap.PAGESIZE].tobytes()
        memory[-1:].tobytes()


def _view(data: Buffer, *, writable: bool = False) -> memoryview:
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError(f"buffer of {view.nbytes} bytes is not contiguous")
    if writable and view.readonly:
        raise ValueError(f"target buffer of {view.nbytes} bytes is read-only")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _pair(dst: Buffer, src: Buffer) -> tuple[memoryview, memoryview]:
    target, source = _view(dst, writable=True), _view(src)
    if target.nbytes != source.nbytes:
        raise ValueError(f"cannot copy {source.nbytes} bytes over {target.nbytes}")
    return target, source


def _seed(seed: int) -> int:
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed {seed} is outside [0, 2**64)")
    return seed


def _threads(threads: int) -> None:
    if threads < 1:
        raise ValueError(f"threads is at least 1, got {threads}")


def _check(
    table: PlaneTable,
    block_ids: Buffer,
    first: int,
    count: int,
    payload: memoryview,
    seed: int | None,
    threads: int,
) -> memoryview:
    """The block ids as int64, after everything was checked."""
    _seed(seed or 0)
    _threads(threads)
    listed = memoryview(block_ids)
    ids = _view(block_ids).cast("q") if listed.nbytes else memoryview(array("q"))
    if listed.itemsize != 8 or listed.format.strip("@=<") not in ("q", "l", "n"):
        raise ValueError(f"block ids are int64, got items of format {listed.format!r}")
    have = len(ids) * table.states
    if first < 0 or count < 0 or first + count > have:
        raise ValueError(f"units [{first}, {first + count}) are not within the {have} listed")
    pages = any(spec.interior is Interior.PAGE for spec in table.specs)
    if pages and (first % table.states or count % table.states):
        raise ValueError(f"units [{first}, {first + count}) cut a block of {table.states}")
    used = ids[first // table.states : -(-(first + count) // table.states) if count else 0]
    for block in used:
        if not 0 <= block < table.blocks:
            raise ValueError(f"block {block} is outside [0, {table.blocks})")
    if payload.nbytes != (nbytes := table.nbytes(count)):
        raise ValueError(f"payload of {count} units has {nbytes} bytes, not {payload.nbytes}")
    return ids


def _pieces(
    table: PlaneTable, ids: memoryview, first: int, count: int
) -> Iterator[tuple[int, memoryview]]:
    """Offset in the payload, and engine memory, of every contiguous run, in payload order."""
    import ctypes

    at = 0
    for spec in table.specs:
        rows, runs = spec.interior is Interior.ROWS, list[list[int]]()
        for head, state in product(range(spec.heads), range(1 if rows else spec.states)):
            offset = state * spec.state_stride + head * spec.head_stride
            if runs and sum(runs[-1]) == offset:
                runs[-1][1] += spec.cell_bytes
            else:
                runs.append([offset, spec.cell_bytes])
        for position in range(first, first + count, 1 if rows else spec.states):
            block, slot = divmod(position, spec.states)
            base = spec.pointer + ids[block] * spec.block_stride + slot * spec.state_stride
            for offset, nbytes in runs:
                piece = (ctypes.c_ubyte * nbytes).from_address(base + offset)
                yield at, memoryview(piece).cast("B")
                at += nbytes


def _segments(table: PlaneTable, count: int, payload: memoryview, seed: int) -> Iterator[bytes]:
    """Digests of the segments of a payload."""
    at = 0
    for _, planes in groupby(table.specs, key=lambda spec: spec.layer):
        end = at + count * sum(spec.heads * spec.cell_bytes for spec in planes)
        yield xxhash.xxh3_128_digest(payload[at:end], seed)
        at = end


@functools.cache
def _choose() -> tuple[Any, str]:
    if os.environ.get("LMCACHE_NATIVE") == "0":
        return Reference, "python, because LMCACHE_NATIVE=0"
    from importlib.metadata import entry_points  # here: it takes longer than this whole module

    found = [*entry_points(group="lmcache_core.ops", name="native")]
    if not found:
        return Reference, "python, because lmcache-native is not installed"
    try:
        if len(found) > 1:
            raise ImportError("offered by several: " + ", ".join(e.value for e in found))
        native = found[0].load()
        for name in NAMES:
            getattr(native, name)
        return native, f"native: {native.INSTRUCTIONS}"
    except Exception as error:  # noqa: BLE001  plugin load boundary: it may raise anything
        reason = f"lmcache-native does not load: {type(error).__name__}: {error}"
        logging.getLogger(__name__).warning("%s; falling back to slow pure Python", reason)
        return Reference, f"python, because {reason}"


def extra(name: str, /) -> Any:
    """An operation beyond ``NAMES`` (codecs) of the native part; None where that is not installed."""
    return getattr(_choose()[0], name, None)


def implementation() -> str:
    """Which implementation runs, and why not the native one: for logs and ``lmcache doctor``."""
    return _choose()[1]


if TYPE_CHECKING:
    copy, digest, copy_and_digest = Reference.copy, Reference.digest, Reference.copy_and_digest
    chain, pack_tokens, populate = Reference.chain, Reference.pack_tokens, Reference.populate
    gather, scatter = Reference.gather, Reference.scatter
else:

    def __getattr__(name: str) -> Any:
        """Bind all operations at the first use of one (PEP 562)."""
        if name not in NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals().update({each: getattr(_choose()[0], each) for each in NAMES})
        return globals()[name]
