"""The bytes of a pool: segments of anonymous shared memory that other processes can map safely.

A segment is a memfd: allocated by its owner before a byte of it is named to anybody (no client ever
instantiates a page, so none pays for it or dies of it), sealed against shrinking and growing, and, unless its
one trusted engine shares it, against every writable map made later. Behind the data lie the *generation
words*, one per 4 KiB: a word changes whenever the extent that begins there is given to another value, so that a
reader in another process can tell after a copy whether it read what it was promised.
Elsewhere than on Linux a segment is private memory without a descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from lmcache_core import ops
from lmcache_core.memory import limits
from lmcache_core.memory.touching import Toucher
from lmcache_core.spi.buffers import Extent, MemoryOptions
from lmcache_core.spi.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Buffer

PAGE = 4096
"""Granularity of extents, and distance of generation words in the data."""
_HUGE_PAGE = 2 << 20
_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; `fcntl` has no name for it
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_SMALLEST_LARGE_SEGMENT = 2 << 30
_MOST_SEGMENTS = 64


class Access(Enum):
    """Who may write into a segment besides its owner."""

    OWNER = "owner"
    """Nobody: sealed at once, all others map it read-only."""
    ENGINE = "engine"
    """Who maps it before the owner calls ``Segment.seal``."""
    SHARED = "shared-rw"
    """Everybody who holds the descriptor: for one trusted engine."""
    PRIVATE = "private"
    """No other process sees it: no descriptor."""


class Segment:
    """One mapped piece of an arena.

    Attributes:
        number: its name in ``Extent.segment``.
        nbytes: bytes of data; the file is longer by the generation words.
        descriptor: the memfd, or -1.
        data: all data bytes; writable for the owner.
        backed: data bytes from the start that are known to have real memory and to be mapped.
        generations: a word for each page of the data; that of an extent is the one where it begins.
        used: data bytes from the start that extents were ever cut from.
        moved: set when ``used`` grows.
    """

    __slots__ = (
        "_address", "_lock", "_map", "backed", "closed", "data", "descriptor", "generations", "moved",
        "nbytes", "number", "used",
    )  # fmt: skip

    def __init__(self, number: int, nbytes: int, descriptor: int, mapped: mmap.mmap) -> None:
        self.number = number
        self.nbytes = nbytes
        self.descriptor = descriptor
        self.backed = self.used = 0
        self.moved = threading.Event()
        self.closed = False
        self._map = mapped
        self._address = 0
        self._lock = threading.Lock()  # nobody allocates through a descriptor being closed
        self.data = memoryview(mapped)[:nbytes]
        self.generations = memoryview(mapped)[nbytes : nbytes + _words_nbytes(nbytes)].cast("Q")

    @property
    def address(self) -> int:
        """Where the data starts in this process."""
        if not self._address:
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        return self._address

    def generation(self, base: int) -> int:
        """The generation word of the extent that begins at ``base``."""
        return self.generations[base >> 12]

    def advance(self, base: int) -> int:
        """Give the place to somebody else: change its generation word and return it."""
        if self.closed:
            return 0
        generation = self.generations[base >> 12] + 1
        self.generations[base >> 12] = generation
        return generation

    def back(self, base: int, nbytes: int) -> None:
        """Put real memory behind a range; OSError when there is none."""
        with self._lock:
            if self.descriptor >= 0:
                os.posix_fallocate(self.descriptor, base, nbytes)
                if base <= self.backed:
                    self.backed = base + nbytes

    def seal(self) -> None:
        """Allow no further writable map, no write and no hole; maps made before keep their rights."""
        if self.descriptor >= 0:
            seals = _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)

    def close(self) -> None:
        """Unmap; while somebody still holds a view the mapping stays until that view is gone."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self.generations.release()
            self.data.release()
            with contextlib.suppress(BufferError):
                self._map.close()
            del self._map  # else the last view unmaps it
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1


class Arena:
    """Owner of the bytes of one pool; grows by whole segments up to ``capacity``.

    Args:
        capacity: bytes of data, rounded down to whole pages.
        options: huge pages, NUMA node, touching in the background.
        access: who else may write.
        segment_nbytes: size of a segment; by default the whole capacity or a 64th of it, at least 2 GiB.
        overcommit: allow more than the machine has.
        available: tells the nearest memory limit.
        pin: called with each piece after it has been touched, to pin or register it.

    Attributes:
        reserved: data bytes of all segments so far.
        toucher: touches memory in the background.

    Raises:
        ConfigError: the capacity exceeds the nearest limit; names the largest size that fits.
    """

    def __init__(
        self,
        capacity: int,
        options: MemoryOptions | None = None,
        *,
        access: Access = Access.OWNER,
        segment_nbytes: int | None = None,
        overcommit: bool = False,
        available: Callable[[], limits.Limit | None] = limits.available,
        pin: Callable[[memoryview], None] | None = None,
        log: logging.Logger | None = None,
    ) -> None:
        self._options = options or MemoryOptions()
        self._log = log or logging.getLogger(__name__)
        self._available = available
        self._overcommit = overcommit
        self.toucher = Toucher(self._back, pin, self._log)
        self._closed = False
        self._exhausted = False
        self.access = access if sys.platform == "linux" else Access.PRIVATE
        self.capacity = capacity - capacity % PAGE
        self.segments: list[Segment] = []
        self.reserved = 0
        default = max(_SMALLEST_LARGE_SEGMENT, -(-self.capacity // _MOST_SEGMENTS))
        self.segment_nbytes = min(self.capacity, _round(segment_nbytes or default, PAGE))
        limit = None if overcommit else available()
        if limit is not None and (fits := _fitting(limit)) < self.capacity:
            raise ConfigError(
                f"pool of {limits.text(self.capacity)} does not fit: {limits.text(limit.available)} are "
                f"available ({limit.source}); the largest size that fits is {fits >> 20}MiB"
            )

    @property
    def touching(self) -> Sequence[threading.Thread]:
        """Threads that touch memory in the background, those that have ended too."""
        return self.toucher.threads

    @property
    def populated(self) -> int:
        """Data bytes known to be backed by real memory."""
        return sum(segment.backed for segment in self.segments)

    def grow(self) -> Segment | None:
        """Add a segment, or None at the capacity or at a limit of the machine."""
        if self.reserved >= self.capacity or self._exhausted or self._closed:
            return None
        nbytes = min(self.segment_nbytes, self.capacity - self.reserved)
        if not self._fits(nbytes, self.reserved):
            return None
        try:
            segment = self._create(nbytes)
        except OSError as error:
            self._exhaust(self.reserved, str(error))
            return None
        self.segments.append(segment)
        self.reserved += nbytes
        if self._options.populate:
            self.toucher.start(segment)
        return segment

    def back(self, number: int, base: int, nbytes: int) -> bool:
        """Make sure that real memory stands behind a range before it is named; False: there is none."""
        segment = self.segments[number]
        if base + nbytes > segment.used:
            segment.used = base + nbytes
            segment.moved.set()
        return self._back(segment, base, nbytes)

    def _back(self, segment: Segment, base: int, nbytes: int) -> bool:
        if segment.descriptor < 0 or base + nbytes <= segment.backed:
            return True
        if not self._fits(nbytes, self.populated):
            return False  # a kernel out of memory kills instead of refusing
        try:
            segment.back(base, nbytes)
        except OSError as error:
            self._exhaust(self.populated, str(error))
            return False
        return True

    def view(self, number: int, base: int, nbytes: int) -> memoryview:
        """Writable bytes of an extent."""
        return self.segments[number].data[base : base + nbytes]

    def close(self) -> None:
        """Give everything back; idempotent. Mappings of others stay theirs."""
        self._closed = True
        self.toucher.stop()
        for segment in self.segments:
            segment.close()

    def _fits(self, nbytes: int, have: int) -> bool:
        limit = None if self._overcommit else self._available()
        if limit is None or nbytes <= _fitting(limit):
            return True
        self._exhaust(have, f"{limits.text(limit.available)} left ({limit.source})")
        return False

    def _exhaust(self, have: int, reason: str) -> None:
        """Stop growing, and say so once."""
        if not self._exhausted:
            self._exhausted = True
            sizes = limits.text(have), limits.text(self.capacity)
            self._log.warning("pool stays at %s of %s: %s", *sizes, reason)

    def _create(self, nbytes: int) -> Segment:
        number, total = len(self.segments), nbytes + _words_nbytes(nbytes)
        if self.access is Access.PRIVATE:  # a forked process gets a copy, not the pages
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            return Segment(number, nbytes, -1, mmap.mmap(-1, total, flags=flags))
        descriptor, total = self._memfd(f"lmcache-{number}", total)
        try:
            mapped = mmap.mmap(descriptor, total)
            mapped.madvise(mmap.MADV_DONTFORK)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            segment = Segment(number, nbytes, descriptor, mapped)
            self._prefer_node(segment)
            os.posix_fallocate(descriptor, nbytes, total - nbytes)
            if self.access is Access.OWNER:
                segment.seal()
            elif self.access is Access.SHARED:
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        except OSError:
            os.close(descriptor)
            raise
        return segment

    def _memfd(self, name: str, total: int) -> tuple[int, int]:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if self._options.huge_pages:
            huge, descriptor = _round(total, _HUGE_PAGE), -1
            try:
                descriptor = os.memfd_create(name, flags | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
                os.ftruncate(descriptor, huge)
                os.posix_fallocate(descriptor, 0, huge)  # a later fault without a page is SIGBUS
                return descriptor, huge
            except OSError as error:
                if descriptor >= 0:
                    os.close(descriptor)
                self._log.warning("no huge pages for %s: %s; using small ones", name, error)
        descriptor = os.memfd_create(name, flags)
        os.ftruncate(descriptor, total)
        return descriptor, total

    def _prefer_node(self, segment: Segment) -> None:
        node = self._options.numa_node
        if node is None:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        mask = (ctypes.c_ulong * 16)()
        bits = 8 * ctypes.sizeof(ctypes.c_ulong)
        mask[node // bits] = 1 << node % bits
        call = _MBIND.get(platform.machine(), -1)
        where, length = ctypes.c_void_p(segment.address), ctypes.c_ulong(segment.nbytes)
        if libc.syscall(call, where, length, _MPOL_PREFERRED, mask, ctypes.c_ulong(16 * bits), 0):
            self._log.warning("no NUMA node %d: %s", node, os.strerror(ctypes.get_errno()))


class ArenaMap:
    """Segments of another process, mapped here.

    Args:
        parts: number, data bytes and descriptor of each segment; the descriptors stay the caller's.
        writable: map for writing too (before the owner has sealed it, or shared).

    Raises:
        ValueError: a descriptor is not sealed against shrinking, or shorter than it claims.
        PermissionError: writable, but sealed.
    """

    def __init__(self, parts: Sequence[tuple[int, int, int]], *, writable: bool = False) -> None:
        self._segments: dict[int, Segment] = {}
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        for number, nbytes, descriptor in parts:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            total, size = nbytes + _words_nbytes(nbytes), os.fstat(descriptor).st_size
            if not seals & fcntl.F_SEAL_SHRINK or size < total:
                raise ValueError(f"segment {number} is not sealed memory of {total} bytes")
            mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED, protection)
            mapped.madvise(mmap.MADV_DONTFORK)
            self._segments[number] = Segment(number, nbytes, -1, mapped)

    def view(self, extent: Extent) -> memoryview:
        """The bytes of an extent, writable where mapped so.

        Raises:
            ValueError: no such place is mapped here (also ``current`` and ``copy_checked``).
        """
        return self._home(extent).data[extent.base : extent.base + extent.nbytes]

    def current(self, extent: Extent) -> bool:
        """Whether the place still belongs to the value it was named for."""
        return self._home(extent).generation(extent.base) == extent.generation

    def copy_checked(self, extent: Extent, into: Buffer) -> bool:
        """Copy an extent out. False: the place was given away before or meanwhile, the bytes mean nothing."""
        if not self.current(extent):
            return False
        ops.copy(into, self.view(extent))
        return self.current(extent)

    def close(self) -> None:
        """Unmap everything; idempotent."""
        while self._segments:
            self._segments.popitem()[1].close()

    def _home(self, extent: Extent) -> Segment:
        segment = self._segments.get(extent.segment)
        pages = range(0, segment.nbytes if segment else 0, PAGE)
        end = extent.base + extent.nbytes
        if segment is None or extent.base not in pages or not extent.base <= end <= segment.nbytes:
            raise ValueError(f"{extent} is not mapped here")
        return segment


def _round(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _words_nbytes(nbytes: int) -> int:
    return _round(nbytes // PAGE * 8, PAGE)


def _fitting(limit: limits.Limit) -> int:
    """Most data bytes under a limit: a 16th is left to others, and the generation words are paid."""
    return (limit.available - limit.available // 16) * 512 // 513
