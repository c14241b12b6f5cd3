"""What every part of a store folder needs: temporary names, small reads, folder syncs."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable

from lmcache_core.spi import Files, FileStatus

O_DIRECT: int = getattr(os, "O_DIRECT", 0)
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO in place of a file must not block
CREATE = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW
GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)
FULL = (errno.ENOSPC, errno.EDQUOT)
_SCRATCH_NBYTES = 1 << 20
_EARLIER_S, _OLDEST = 1.5e9, 1e9
"""A value that expires has that time, so much earlier, as its modification time: before 2001, as nothing else here."""


class Scratch(threading.local):
    """One page-aligned buffer per thread, for the life of the thread."""

    def __init__(self) -> None:
        self.view = memoryview(mmap.mmap(-1, _SCRATCH_NBYTES))


class Folder:
    """The folder of a store and the calls into it.

    Args:
        identity: prefix of temporary names, different from that of other writers as far as chance allows.
        note: says something in the tier's log, once per kind.
    """

    def __init__(
        self, path: str, *, files: Files, identity: str, note: Callable[[str, str], None]
    ) -> None:
        self.path = path
        self.files = files
        self.note = note
        self.mutex = threading.Lock()
        self.scratch = Scratch()
        self._identity = identity
        self._counter = 0

    def create(self, flags: int = 0) -> tuple[str, int]:
        """Make a temporary file; return its path and a descriptor for reading and writing."""
        remade = False
        while True:
            with self.mutex:
                self._counter += 1
                path = f"{self.path}/tmp/{self._identity}-{self._counter:x}"
            try:
                return path, self.files.open(path, CREATE | flags, 0o600)
            except FileExistsError:
                continue  # of an earlier process that drew the same identity
            except FileNotFoundError:
                if remade:
                    raise
                remade = True
                self.mkdir(f"{self.path}/tmp")

    def discard(self, path: str) -> bool:
        """Remove a file if it is there; tell whether it was, and no longer is."""
        try:
            self.files.unlink(path)
        except OSError as error:
            if error.errno not in GONE:
                self.note("leftover", f"cannot remove {path}: {reason(error)}")
            return False
        return True

    def mkdir(self, path: str) -> None:
        """Make a folder unless it is there; a full disk is only noted."""
        try:
            self.files.mkdir(path, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in FULL:
                raise
            self.note("full", f"cannot make folder {path}: {reason(error)}")

    def text(self, descriptor: int) -> bytes:
        """The first bytes of a small file."""
        into = bytearray(200)
        return bytes(into[: self.files.preadv(descriptor, [memoryview(into)], 0)])

    def sync(self, path: str) -> None:
        """Bring the entries of one folder to the medium."""
        descriptor = self.files.open(path, os.O_RDONLY)
        try:
            self.files.sync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise  # those two: folders cannot be synced here, their changes are synchronous
        finally:
            self.files.close(descriptor)


def expiry(found: FileStatus) -> float | None:
    """Time since 1970 when a value expires, None for never."""
    return found.modified + _EARLIER_S if found.modified < _OLDEST else None


def stamp_for(expires: float) -> float | None:
    """Modification time that ``expiry`` reads; None for a time so far off that it cannot be told."""
    stamp = max(0.0, expires - _EARLIER_S)
    return stamp if stamp < _OLDEST else None


def shown(path: str) -> str:
    """A path that others have named, for people: on one line, and nothing that a terminal would obey."""
    return path if path.isprintable() else repr(path)[1:-1]


def reason(error: OSError) -> str:
    """What the system says, in lower case."""
    return (error.strerror or str(error)).lower()
