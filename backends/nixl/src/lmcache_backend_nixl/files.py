"""Parts as files: POSIX, GDS, GDS_MT, HF3FS.

    PATH/0a/NAME   a part, in the folder that its name ends with
    PATH/tmp/      parts being written
    PATH/lock      locked while the owner lives, unless the folder is shared

NIXL moves whole pages past the page cache; what is not aligned, and the odd end of a part, goes through it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

from lmcache_backend_nixl.agent import Agent, Piece, Place
from lmcache_backend_nixl.config import NixlConfig, RailConfig
from lmcache_backend_nixl.driver import Call, Operation, Together
from lmcache_backend_nixl.memory import pieces
from lmcache_backend_nixl.rail import Rail, Transfer, all_stored, wanted
from lmcache_core.spi import (
    MISSED,
    PRESENT,
    STORED,
    BackendError,
    ConfigError,
    Context,
    Load,
    Loaded,
    Region,
    Stored,
    Unavailable,
    section,
)

PAGE = 4096
O_DIRECT: int = getattr(os, "O_DIRECT", 0)
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO in place of a file must not block
CREATE = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW
GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)
REFUSING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
SPARE = 1 << 20
"""With less room than that beside a value, a write that failed has found the disk full."""
SHARDS = tuple(f"{number:02x}" for number in range(256))


class FileRail(Rail):
    """A folder."""

    listing = True
    register = True

    def __init__(self, rail: RailConfig, config: NixlConfig, context: Context, /) -> None:
        self.path = rail.path.rstrip("/")
        self._rail, self._config, self._files = rail, config, context.files
        self._identity = f"{context.pid:x}-{context.random.getrandbits(64):016x}"
        self._counter = 0
        self._direct = config.direct and O_DIRECT != 0
        self._lock: int | None = None
        self._agent: Agent | None = None
        self._log = context.log

    @property
    def agent(self) -> Agent:
        assert self._agent is not None, "open"
        return self._agent

    def open(self) -> None:
        files = self._files
        self.close()
        try:
            for folder in (self.path, f"{self.path}/tmp", *(f"{self.path}/{s}" for s in SHARDS)):
                with suppress(FileExistsError):
                    files.mkdir(folder)
            if not self._config.shared:
                self._own()
                for name in files.list(f"{self.path}/tmp"):
                    files.unlink(f"{self.path}/tmp/{name}")
        except OSError as error:
            self.close()
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, *GONE):
                raise ConfigError(f"cannot use {self.path}: {reason(error)}") from error
            raise
        except BackendError:
            self.close()
            raise
        self._agent = Agent(f"files-{self._identity}", self._rail.backend, self._rail.parameters)

    def _own(self) -> None:
        self._lock = self._files.open(f"{self.path}/lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        if not self._files.lock(self._lock):
            raise Unavailable(f"{self.path} belongs to another process; shared: true if it may")

    def close(self) -> None:
        if self._agent is not None:
            agent, self._agent = self._agent, None
            agent.close()
        if self._lock is not None:
            lock, self._lock = self._lock, None
            self._files.close(lock)

    def add(self, region: Region, /) -> bool:
        self.agent.add(region)
        return True

    def remove(self, region: Region, /) -> None:
        self.agent.remove(region)

    # -- names ---------------------------------------------------------------------------------------------

    def place(self, name: str) -> str:
        return f"{self.path}/{name.partition('.')[0][-2:]}/{name}"

    def lengths(self, names: Sequence[str], /) -> list[int | None]:
        found: list[int | None] = []
        errors: list[OSError] = []
        for name in names:
            nbytes = None
            try:
                status = self._files.status(self.place(name))
                nbytes = status.nbytes if status.is_file else None
            except OSError as error:
                if error.errno not in GONE:
                    errors.append(error)
            found.append(nbytes)
        if errors and len(errors) == len(names):
            raise Unavailable(f"{self.path}: lookup failed: {reason(errors[0])}")
        return found

    def delete(self, names: Sequence[str], /) -> list[bool]:
        return [self._unlink(self.place(name)) for name in names]

    def _unlink(self, path: str) -> bool:
        try:
            self._files.unlink(path)
        except OSError as error:
            if error.errno in (*GONE, errno.EISDIR, errno.EPERM):
                return False
            raise
        return True

    def names(self, after: str) -> Iterator[tuple[str, int, int]]:
        """Name, length and real bytes of everything in the folders, in order, from SHARD/NAME on."""
        start, _, last = after.partition("/")
        for shard in SHARDS:
            if shard < start:
                continue
            for name in sorted(self._files.list(f"{self.path}/{shard}")):
                if shard > start or name > last:
                    try:
                        status = self._files.status(f"{self.path}/{shard}/{name}")
                    except OSError:
                        continue  # deleted meanwhile
                    yield f"{shard}/{name}", status.nbytes, status.allocated

    # -- bytes ---------------------------------------------------------------------------------------------

    def load(self, name: str, load: Load, /) -> Operation:
        direct = self._aligned(load.into, load.room // PAGE * PAGE) and load.offset % PAGE == 0
        try:
            fd, direct = self._open(self.place(name), READ, direct)
        except OSError as error:
            if error.errno in GONE:
                return MISSED
            raise
        try:
            status = self._files.status_of(fd)
            if not status.is_file:
                return MISSED
            length = wanted(load, status.nbytes)
            path = self.place(name)
            yield from self._move("READ", path, fd, load.into, load.offset, length, direct=direct)
        finally:
            self._files.close(fd)
        return Loaded.filled(length)

    def store(
        self, name: str, views: Sequence[memoryview], /, *, first: bool, others: Together | None
    ) -> Operation:
        files, target = self._files, self.place(name)
        nbytes = sum(view.nbytes for view in views)
        if first and self.lengths([name])[0] is not None:
            return PRESENT
        direct = nbytes > 0 and self._aligned(views, nbytes // PAGE * PAGE)
        temporary = ""
        try:
            temporary, fd, direct = self._create(direct)
            try:
                laid = self._lay(fd, nbytes)
                yield from self._move("WRITE", temporary, fd, views, 0, nbytes, direct=direct)
                if not laid and files.status_of(fd).nbytes != nbytes:
                    raise Unavailable(f"{temporary} has another length than was written")
                if self._config.sync:
                    yield Call(files.sync, fd)
            finally:
                files.close(fd)
            if others is not None and (problem := all_stored((yield others))) is not None:
                return problem
            stored = self._publish(temporary, target, first)
        except Unavailable as error:
            # NIXL does not say why a write failed.
            if files.free(self.path) < nbytes + SPARE:
                return Stored.refused(f"{self.path}: no space left on device")
            raise error.with_traceback(None) from None
        except OSError as error:
            if error.errno in REFUSING:
                return Stored.refused(f"{self.path}: {reason(error)}")
            raise
        finally:
            if temporary:
                self._unlink(temporary)
        if self._config.sync:
            yield Call(self._sync_folder, target.rpartition("/")[0])
        return STORED if stored else PRESENT

    def _aligned(self, views: Sequence[memoryview], body: int) -> bool:
        """Whether the first ``body`` bytes, whole pages, can go past the page cache."""
        if not self._direct or not body:
            return False
        local = pieces(views, body)
        return not any(at % PAGE or nbytes % PAGE for at, nbytes in local)

    def _open(self, path: str, flags: int, direct: bool) -> tuple[int, bool]:
        """A descriptor, and whether it is for direct transfers."""
        if direct:
            try:
                return self._files.open(path, flags | O_DIRECT), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = False
                self._log.warning("%s takes no direct transfers; using the page cache", self.path)
                if flags & os.O_CREAT:
                    self._unlink(path)
        return self._files.open(path, flags), False

    def _create(self, direct: bool) -> tuple[str, int, bool]:
        while True:
            self._counter += 1
            path = f"{self.path}/tmp/{self._identity}-{self._counter:x}"
            try:
                return path, *self._open(path, CREATE, direct)
            except FileExistsError:
                continue  # of another process that drew the same identity

    def _lay(self, fd: int, nbytes: int) -> bool:
        """Give a new file its blocks and its length; False where the file system gives no blocks in advance.

        A disk that is full says so here. And a direct write behind the end of a file waits in the call that begins it,
        one within does not.
        """
        self._files.allocate(fd, nbytes)
        if self._files.status_of(fd).allocated < nbytes:
            return False
        self._files.truncate(fd, nbytes)
        return True

    def _publish(self, temporary: str, target: str, first: bool) -> bool:
        """Give a file its name; False when the name is taken."""
        if first and self._config.shared:
            try:
                self._files.link(temporary, target)
                return True
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
        # Of a folder that is not shared this thread alone gives names.
        if first and self.lengths([target.rpartition("/")[2]])[0] is not None:
            return False
        self._files.rename(temporary, target)
        return True

    def _sync_folder(self, path: str) -> None:
        folder = self._files.open(path, os.O_RDONLY)
        try:
            self._files.sync(folder)
        finally:
            self._files.close(folder)

    def _move(
        self,
        verb: str,
        path: str,
        fd: int,
        views: Sequence[memoryview],
        offset: int,
        nbytes: int,
        *,
        direct: bool,
    ) -> Operation:
        """Bytes ``[offset, offset + nbytes)`` of a file, from or to the begin of the views."""
        body = nbytes // PAGE * PAGE if direct else nbytes
        yield from self._through(verb, fd, pieces(views, body), offset)
        if rest := section(views, body, nbytes - body):
            # The odd end goes through the page cache.
            plain = self._files.open(path, os.O_RDWR if verb == "WRITE" else READ)
            try:
                move = self._files.preadv if verb == "READ" else self._files.pwritev
                if move(plain, rest, offset + body) != nbytes - body:
                    raise Unavailable(f"{path}: {verb.lower()} of its end fell short")
            finally:
                self._files.close(plain)

    def _through(self, verb: str, fd: int, local: Sequence[Piece], offset: int) -> Operation:
        if not local:
            return
        places: list[Place] = []
        at = offset
        for _, nbytes in local:
            places.append((at, nbytes, fd))
            at += nbytes
        span = [(offset, at - offset, fd)]
        self.agent.register("FILE", span)
        try:
            yield Transfer(self.agent, verb, local, "FILE", places)
        finally:
            self.agent.deregister("FILE", span)


def reason(error: OSError, /) -> str:
    """What the system says, in lower case."""
    return (error.strerror or str(error)).lower()
