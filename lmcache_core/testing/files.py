"""System calls on a simulated disk: they delay, hang, fail, fall short, and a process may end between two.

``SimFiles`` implements ``lmcache_core.spi.Files`` on a ``SimDisk``.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lmcache_core.spi.context import FileStatus
from lmcache_core.testing.disk import BLOCK, SECTOR, Node, SimDisk, describe

__all__ = ["SimCrash", "SimDisk", "SimFiles"]


class SimCrash(BaseException):
    """The process is gone; raised by the system call before which it ended and by all later ones."""


@dataclass(slots=True)
class _Descriptor:
    node: Node
    path: str
    flags: int


@dataclass(slots=True)
class _Rule:
    call: str
    path: str
    times: int
    code: int
    short: bool
    gate: threading.Event | None


class SimFiles:
    """One process's view of a ``SimDisk``.

    Attributes:
        calls: system calls made so far.
        crash_at: number of the call before which the process ends (``SimCrash``), or None; a write that is
            cut off by it may have been carried out in part.
        before: called ahead of every call with its name and the bytes it moves, to take virtual time.
    """

    def __init__(
        self, disk: SimDisk | None = None, *, before: Callable[[str, int], None] | None = None
    ) -> None:
        self.disk = disk or SimDisk()
        self.before = before
        self.calls = 0
        self.crash_at: int | None = None
        self._open: dict[int, _Descriptor] = {}
        self._next = 100
        self._rules: list[_Rule] = []

    def fail(self, call: str, code: int, /, *, path: str = "", times: int = 1) -> None:
        """Let the next calls of this name ("" for any), on paths containing ``path``, raise ``OSError(code)``."""
        self._rules.append(_Rule(call, path, times, code, False, None))

    def shorten(self, call: str, /, *, path: str = "", times: int = 1) -> None:
        """Let the next ``preadv`` or ``pwritev`` move fewer bytes than asked."""
        self._rules.append(_Rule(call, path, times, 0, True, None))

    def hang(self, call: str, /, *, path: str = "") -> Callable[[], None]:
        """Let calls of this name block; the returned function lets them go on."""
        rule = _Rule(call, path, 1 << 60, 0, False, threading.Event())
        self._rules.append(rule)

        def release() -> None:
            self._rules.remove(rule)
            assert rule.gate is not None
            rule.gate.set()

        return release

    def kill(self) -> None:
        """End the process between two calls: descriptors and locks are gone, everything written stays.

        Whoever still calls gets EIO, so that a test can tidy up as if nothing had happened.
        """
        with self.disk.mutex:
            for descriptor in list(self._open):
                self._close(descriptor)
            self.fail("", errno.EIO, times=1 << 60)

    @property
    def open_paths(self) -> list[str]:
        """Paths that are open now; empty when nothing leaks."""
        return sorted(found.path for found in self._open.values())

    # System calls.

    def open(self, path: str, flags: int, mode: int = 0o600, /) -> int:
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        with self._call("open", path, writes=writes):
            if flags & os.O_DIRECT and not self.disk.direct:
                raise OSError(errno.EINVAL, "Invalid argument", path)
            try:
                node = self.disk.find(path)
                if flags & os.O_CREAT and flags & os.O_EXCL:
                    raise FileExistsError(errno.EEXIST, "File exists", path)
            except FileNotFoundError:
                if not flags & os.O_CREAT:
                    raise
                folder, name = self.disk.parent(path)
                node = self.disk.node("file")
                folder.bind(name, node)
            if node.kind == "link" and flags & os.O_NOFOLLOW:
                raise OSError(errno.ELOOP, "Too many levels of symbolic links", path)
            if node.kind == "folder" and flags & (os.O_WRONLY | os.O_RDWR):
                raise IsADirectoryError(errno.EISDIR, "Is a directory", path)
            if node.kind == "fifo" and not flags & os.O_NONBLOCK:
                raise AssertionError(f"opening the fifo {path} would block for ever")
            self._next += 1
            self._open[self._next] = _Descriptor(node, path, flags)
            node.opened += 1
            if flags & os.O_TRUNC:
                self._resize(node, 0)
            return self._next

    def close(self, descriptor: int, /) -> None:
        with self._call("close", descriptor):
            self._close(descriptor)

    def preadv(self, descriptor: int, views: Sequence[memoryview], offset: int, /) -> int:
        room = sum(view.nbytes for view in views)
        with self._call("preadv", descriptor, room) as short:
            node = self._transfer(descriptor, views, offset)
            if short and room > SECTOR:
                room = (
                    self.disk.random.randrange(1, room // SECTOR) * SECTOR if room > 1024 else 512
                )
            data = node.content[offset : offset + room]
            done = 0
            for view in views:
                piece = data[done : done + view.nbytes]
                view[: len(piece)] = piece
                done += len(piece)
            return done

    def pwritev(self, descriptor: int, views: Sequence[memoryview], offset: int, /) -> int:
        nbytes = sum(view.nbytes for view in views)
        try:
            with self._call("pwritev", descriptor, nbytes, writes=True) as short:
                self._transfer(descriptor, views, offset)
                data = b"".join(views)
                if short and nbytes > SECTOR:
                    data = data[: self.disk.random.randrange(1, -(-nbytes // SECTOR)) * SECTOR]
                return self._write(descriptor, data, offset)
        except SimCrash:
            if self.crash_at == self.calls - 1 and descriptor in self._open:
                part = self.disk.random.randrange(nbytes // SECTOR + 1) * SECTOR
                self._write(descriptor, b"".join(views)[:part], offset)
            raise

    def allocate(self, descriptor: int, nbytes: int, /) -> None:
        with self._call("allocate", descriptor, writes=True):
            node = self._open[descriptor].node
            if self.disk.grow(node, nbytes) < nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def truncate(self, descriptor: int, nbytes: int, /) -> None:
        with self._call("truncate", descriptor, writes=True):
            self._resize(self._open[descriptor].node, nbytes)

    def stamp(self, descriptor: int, modified: float, /) -> None:
        with self._call("stamp", descriptor, writes=True):
            node = self._open[descriptor].node
            node.times.append(node.modified)
            node.modified = modified

    def sync(self, descriptor: int, /) -> None:
        with self._call("sync", descriptor):
            self._open[descriptor].node.settle()

    def rename(self, source: str, target: str, /) -> None:
        with self._call("rename", target, writes=True):
            node = self.disk.find(source)
            folder, name = self.disk.parent(target)
            replaced = folder.entries.get(name)
            folder.bind(name, node)
            old_folder, old_name = self.disk.parent(source)
            old_folder.bind(old_name, None)
            if replaced is not None:
                self.disk.forget(replaced)

    def link(self, source: str, target: str, /) -> None:
        with self._call("link", target, writes=True):
            if not self.disk.links:
                raise PermissionError(errno.EPERM, "Operation not permitted", target)
            node = self.disk.find(source)
            folder, name = self.disk.parent(target)
            if name in folder.entries:
                raise FileExistsError(errno.EEXIST, "File exists", target)
            folder.bind(name, node)

    def unlink(self, path: str, /) -> None:
        with self._call("unlink", path):
            node = self.disk.find(path)
            if node.kind == "folder":
                raise IsADirectoryError(errno.EISDIR, "Is a directory", path)
            self._writable(path)
            folder, name = self.disk.parent(path)
            folder.bind(name, None)
            self.disk.forget(node)

    def mkdir(self, path: str, mode: int = 0o700, /) -> None:
        with self._call("mkdir", path):
            folder, name = self.disk.parent(path)
            if name in folder.entries:
                raise FileExistsError(errno.EEXIST, "File exists", path)
            self._writable(path)
            folder.bind(name, self.disk.node("folder"))

    def list(self, path: str, /) -> Sequence[str]:
        with self._call("list", path):
            node = self.disk.find(path)
            if node.kind != "folder":
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", path)
            names = list(node.entries)
            self.disk.random.shuffle(names)
            return names

    def status(self, path: str, /) -> FileStatus:
        with self._call("status", path):
            return describe(self.disk.find(path))

    def status_of(self, descriptor: int, /) -> FileStatus:
        with self._call("status_of", descriptor):
            return describe(self._open[descriptor].node)

    def free(self, path: str, /) -> int:
        with self._call("free", path):
            return self.disk.capacity - self.disk.used

    def lock(self, descriptor: int, /) -> bool:
        with self._call("lock", descriptor):
            found = self._open[descriptor]
            return self.disk.locks.setdefault(found.node.number, found) is found

    # What they share.

    @contextmanager
    def _call(
        self, call: str, where: str | int, nbytes: int = 0, *, writes: bool = False
    ) -> Iterator[bool]:
        """Announce a call on a path or descriptor, then hold the mutex; gives whether to fall short."""
        found = self._open.get(where) if isinstance(where, int) else None
        path = where if isinstance(where, str) else found.path if found else ""
        short = self._enter(call, path, nbytes)
        with self.disk.mutex:
            if writes:
                self._writable(path)
            yield short

    def _enter(self, call: str, path: str, nbytes: int) -> bool:
        """Count, crash, delay, hang or fail; tell whether the transfer is to be short."""
        with self.disk.mutex:
            self.calls += 1
            if self.crash_at is not None and self.calls > self.crash_at:
                raise SimCrash(f"the process ended before call {self.crash_at}")
            rule = next((r for r in self._rules if r.call in ("", call) and r.path in path), None)
            if rule is not None and rule.gate is None:
                rule.times -= 1
                if not rule.times:
                    self._rules.remove(rule)
        if self.before is not None:
            self.before(call, nbytes)
        if rule is None:
            return False
        if rule.gate is not None:
            rule.gate.wait()
        if rule.code:
            raise OSError(rule.code, os.strerror(rule.code), path)
        return rule.short

    def _writable(self, path: str) -> None:
        if self.disk.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def _transfer(self, descriptor: int, views: Sequence[memoryview], offset: int) -> Node:
        found = self._open.get(descriptor)
        if found is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if found.flags & os.O_DIRECT:
            for number in (offset, *(view.nbytes for view in views)):
                if number % self.disk.direct:
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), found.path)
        return found.node

    def _write(self, descriptor: int, data: bytes, offset: int) -> int:
        node = self._open[descriptor].node
        if not data:
            return 0
        data = data[: max(0, self.disk.grow(node, offset + len(data)) - offset)]
        if not data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if len(node.content) < offset:
            node.content.extend(bytes(offset - len(node.content)))
        node.lengths.append(len(node.content))
        node.content[offset : offset + len(data)] = data
        node.modified = self.disk.wall()
        return len(data)

    def _resize(self, node: Node, nbytes: int) -> None:
        node.lengths.append(len(node.content))
        del node.content[nbytes:]
        node.content.extend(bytes(nbytes - len(node.content)))
        kept = -(-nbytes // BLOCK) * BLOCK
        if node.allocated > kept:
            self.disk.used -= node.allocated - kept
            node.allocated = kept
        node.modified = self.disk.wall()

    def _close(self, descriptor: int) -> None:
        found = self._open.pop(descriptor, None)
        if found is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self.disk.locks.get(found.node.number) is found:
            del self.disk.locks[found.node.number]
        found.node.opened -= 1
        self.disk.forget(found.node)
