"""The operating system's files, as ``lmcache_core.spi.Files``: system calls and nothing else."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Sequence

from lmcache_core.spi.context import FileStatus

_C = ctypes.CDLL(None, use_errno=True)


def _describe(found: os.stat_result) -> FileStatus:
    return FileStatus(
        nbytes=found.st_size,
        allocated=found.st_blocks * 512,
        modified=found.st_mtime,
        is_file=stat.S_ISREG(found.st_mode),
        is_folder=stat.S_ISDIR(found.st_mode),
        inode=found.st_ino,
    )


class OsFiles:
    """Implements ``lmcache_core.spi.Files``; holds no state, safe from any thread."""

    def open(self, path: str, flags: int, mode: int = 0o600, /) -> int:
        return os.open(path, flags, mode)

    def close(self, descriptor: int, /) -> None:
        os.close(descriptor)

    def preadv(self, descriptor: int, views: Sequence[memoryview], offset: int, /) -> int:
        return os.preadv(descriptor, views, offset)

    def pwritev(self, descriptor: int, views: Sequence[memoryview], offset: int, /) -> int:
        return os.pwritev(descriptor, views, offset)

    def allocate(self, descriptor: int, nbytes: int, /) -> None:
        """Reserve blocks without changing the length; a file system that cannot is left alone.

        ``os.posix_fallocate`` will not do: where the file system declines, libc writes a byte into every
        block instead, which is slow, and fails on a descriptor opened with ``O_DIRECT``.
        """
        if nbytes == 0:
            return
        keep_size = 1
        failed = _C.fallocate(
            descriptor, keep_size, ctypes.c_longlong(0), ctypes.c_longlong(nbytes)
        )
        if failed and (code := ctypes.get_errno()) not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(code, os.strerror(code))

    def truncate(self, descriptor: int, nbytes: int, /) -> None:
        os.ftruncate(descriptor, nbytes)

    def stamp(self, descriptor: int, modified: float, /) -> None:
        nanoseconds = int(modified * 1e9)
        os.utime(descriptor, ns=(nanoseconds, nanoseconds))

    def sync(self, descriptor: int, /) -> None:
        # `fdatasync` of a folder may leave new entries behind on ext4: they do not change its length. Of a file it
        # leaves behind a time that was set by hand, which then differs from that of the last change.
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode) or found.st_mtime_ns != found.st_ctime_ns:
            os.fsync(descriptor)
        else:
            os.fdatasync(descriptor)

    def rename(self, source: str, target: str, /) -> None:
        os.rename(source, target)

    def link(self, source: str, target: str, /) -> None:
        os.link(source, target)

    def unlink(self, path: str, /) -> None:
        os.unlink(path)

    def mkdir(self, path: str, mode: int = 0o700, /) -> None:
        os.mkdir(path, mode)

    def list(self, path: str, /) -> Sequence[str]:
        return os.listdir(path)

    def status(self, path: str, /) -> FileStatus:
        return _describe(os.lstat(path))

    def status_of(self, descriptor: int, /) -> FileStatus:
        return _describe(os.fstat(descriptor))

    def free(self, path: str, /) -> int:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def lock(self, descriptor: int, /) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
