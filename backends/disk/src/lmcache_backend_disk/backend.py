"""The tier: keys to file names, folders to stripes, system errors to results."""

from __future__ import annotations

import atexit
import errno
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import ClassVar, TypeVar

from lmcache_backend_disk.client import Root
from lmcache_backend_disk.config import Direct, DiskConfig, Sync
from lmcache_backend_disk.folder import FULL, Folder, expiry, reason, shown
from lmcache_backend_disk.transfer import BLOCK
from lmcache_core.spi import (
    MISSED,
    PRESENT,
    STORED,
    BackendError,
    BlockingBackend,
    BufferTooSmall,
    Capabilities,
    ConfigError,
    Context,
    Corrupt,
    Durability,
    FileStatus,
    Found,
    Key,
    Load,
    Loaded,
    ScanPage,
    Store,
    Stored,
    Unavailable,
    Usage,
)

T = TypeVar("T")
REFUSING = (*FULL, errno.EROFS, errno.EFBIG, errno.EEXIST)
"""No fault of the disk, and no better another time; the last: something that is not ours has the name."""
STUBBORN = 3
ENTRY_NBYTES = 512
"""What a folder entry of such a name takes, with the slack of half-full folder blocks."""


class DiskBackend(BlockingBackend):
    """Values as files in folders that this process alone uses.

    Keeps no index: a lookup asks the file system, so a restarted process serves at once. Every value has a
    home folder by its digest and is found in all of them, so folders may be added, and reordered.
    """

    config_type: ClassVar[type] = DiskConfig
    exclusive: ClassVar[bool] = True
    config: DiskConfig

    def __init__(self, config: DiskConfig, context: Context, /) -> None:
        super().__init__(config, context)
        self._roots: list[Root] = []
        self._noted: set[str] = set()
        self._block = BLOCK
        self._listing: tuple[str, list[str]] = ("", [])
        self.capabilities = Capabilities(
            ranges=True,
            scan=True,
            usage=True,
            ttl=True,
            persistent=True,
            conditional_delete=True,
            shared=not self.exclusive,
            hints=not self.exclusive,
            durability=Durability.POWER if config.sync is Sync.DURABLE else Durability.PROCESS,
            alignment=1 if config.direct is Direct.OFF else BLOCK,
            iov_max=64,
        )

    @classmethod
    def testing_config(cls) -> DiskConfig:
        """A folder of its own, removed when the process ends."""
        path = tempfile.mkdtemp(prefix="lmcache-verify-")
        atexit.register(shutil.rmtree, path, ignore_errors=True)
        return DiskConfig(path=path, fan_out=16)

    def open_blocking(self) -> None:
        config, context = self.config, self.context
        paths = [path.rstrip("/") for path in config.paths]
        if not paths or len(set(paths)) < len(paths):
            raise ConfigError(
                f"path of {context.tier} names no folder, or one twice: {config.path}"
            )
        for path in paths:
            if not path.startswith("/"):
                raise ConfigError(f"path of {context.tier} is not absolute: {path!r}")
        if config.fan_out not in (16, 256, 4096):
            raise ConfigError(f"fan_out is {config.fan_out}; use 16, 256 or 4096")
        identity = f"{context.pid:x}-{context.random.getrandbits(64):016x}"
        try:
            for path in paths:
                folder = Folder(path, files=context.files, identity=identity, note=self._note)
                root = Root(
                    folder,
                    exclusive=self.exclusive,
                    sync=config.sync,
                    verify=config.verify_writes,
                    wall=context.clock.wall,
                )
                self._roots.append(root)
                root.open(
                    direct=config.direct,
                    fan_out=config.fan_out,
                    pid=context.pid,
                )
                self._block = max(self._block, root.block)
        except BaseException:  # whatever it is, no lock may stay behind
            self.close_blocking()
            raise

    def close_blocking(self) -> None:
        while self._roots:
            self._roots.pop().close()

    def lookup_blocking(self, keys: Sequence[Key], /) -> Sequence[Found | None]:
        found: list[Found | None] = []
        errors: list[OSError] = []
        for key in keys:
            try:
                status = self._first(key, lambda root, key=key: root.live(key.text))  # type: ignore[misc]
                found.append(None if status is None else self._found(status))
            except OSError as error:
                errors.append(error)
                found.append(None)
        if errors:
            if len(errors) == len(keys):
                raise _unavailable("lookup", errors[0])
            self._note("lookup", f"lookup failed, treated as a miss: {reason(errors[0])}")
        return found

    def load_blocking(self, load: Load, /) -> Loaded:
        def views(nbytes: int) -> Sequence[memoryview]:
            wanted = nbytes - load.offset if load.length is None else load.length
            if not 0 <= wanted <= nbytes - load.offset:
                raise Corrupt(
                    f"{load.key!r} has {nbytes} bytes, asked for {wanted} at {load.offset}",
                    operation="load",
                )
            if wanted > load.room:
                raise BufferTooSmall(
                    f"{load.key!r} needs {wanted} bytes, the buffers have {load.room}",
                    operation="load",
                )
            return _first(load.into, wanted)

        try:
            got = self._first(
                load.key, lambda root: root.read(load.key.text, views, offset=load.offset)
            )
            return MISSED if got is None else Loaded.filled(got)
        except BackendError as error:
            return Loaded.failed(error.with_traceback(None))  # its frames hold the caller's views
        except OSError as error:
            return Loaded.failed(_unavailable("load", error))

    def store_blocking(self, store: Store, /) -> Stored:
        name = store.key.text
        expires = None if store.ttl is None else self.context.clock.wall() + store.ttl
        refused = Stored.refused("no folder")
        home, *others = self._roots_of(store.key)
        try:
            if self._first(store.key, lambda root: (root is not home and root.kept(name)) or None):
                return PRESENT
            for root in (home, *others):
                try:
                    return STORED if root.write(name, store.parts, expires=expires) else PRESENT
                except OSError as error:
                    if error.errno not in REFUSING:
                        raise
                    refused = Stored.refused(f"{root.path}: {reason(error)}")
        except OSError as error:
            return Stored.failed(_unavailable("store", error))
        return refused

    def delete_blocking(self, keys: Sequence[Key], /) -> int:
        there, failed = 0, None
        for key in keys:
            gone = False
            for root in self._roots_of(key):
                try:
                    gone |= root.remove(key.text)
                except OSError as error:
                    failed = _unavailable("delete", error)
            there += gone
        if failed is not None:
            raise failed
        return there

    def footprint(self, nbytes: int, /) -> int:
        return -(-nbytes // self._block) * self._block + ENTRY_NBYTES

    async def scan(self, after: str | None = None, /, *, limit: int = 1000) -> ScanPage:
        return await self.call("scan", self._scan, after, limit)

    async def usage(self) -> Usage:
        return await self.call("usage", self._usage)

    async def delete_exact(self, key: Key, etag: str, /) -> bool:
        return await self.call("delete_exact", self._delete_exact, key, etag)

    def _delete_exact(self, key: Key, etag: str) -> bool:
        return any(root.remove(key.text, only=lambda s: _etag(s) == etag) for root in self._roots)

    def _usage(self) -> Usage:
        nbytes = values = 0
        for root in self._roots:
            for shard in root.shards():
                for name in root.names(shard):
                    if root.shard_of(name) == shard and (found := root.find(name)) is not None:
                        nbytes += found.allocated + ENTRY_NBYTES
                        values += 1
        return Usage(nbytes, values)

    def _scan(self, after: str | None, limit: int) -> ScanPage:
        values: list[tuple[Key, Found]] = []
        foreign = [path for root in self._roots for path in root.foreign()] if after is None else []
        for token, root, shard, name in self._entries(after):
            try:
                status = _status(root, name, shard)
            except OSError as error:
                self._note("scan", f"scan skips what it cannot see: {reason(error)}")
                foreign.append(shown(f"{root.path}/{shard}/{name}"))
                status = None
            if status is not None:
                key = _parse(name) if status.is_file and root.shard_of(name) == shard else None
                if key is None:
                    foreign.append(shown(f"{root.path}/{shard}/{name}"))
                else:
                    values.append((key, self._found(status)))
            if len(values) + len(foreign) >= limit:
                return ScanPage(values, token, foreign)
        return ScanPage(values, None, foreign)

    def _entries(self, after: str | None) -> Iterator[tuple[str, Root, str, str]]:
        """Every name in every shard behind a place in the listing, with its own place."""
        number, shard, name = (after or "0//").split("/", 2)
        start = int(number), shard
        for position, root in enumerate(self._roots):
            for folder in root.shards():
                if (position, folder) < start:
                    continue
                place = f"{position}/{folder}"
                goes_on = name and (position, folder) == start
                last = self._listing  # once: other threads list, too
                if not goes_on or last[0] != place:  # pages of one folder share one listing
                    last = self._listing = place, root.names(folder)
                names = last[1]
                first = bisect_right(names, name) if goes_on else 0
                for index in range(first, len(names)):
                    yield f"{place}/{names[index]}", root, folder, names[index]

    def _roots_of(self, key: Key) -> list[Root]:
        """All folders, the home of this key first."""
        home = int.from_bytes(key.digest[:4]) % len(self._roots)
        return self._roots[home:] + self._roots[:home]

    def _first(self, key: Key, ask: Callable[[Root], T | None]) -> T | None:
        """The first answer, of the home or of another folder, or None; only the home's error counts then."""
        failure = None
        for position, root in enumerate(self._roots_of(key)):
            try:
                if (answer := ask(root)) is not None:
                    return answer
            except OSError as error:
                if not position:
                    failure = error
                else:
                    self._note("folder", f"{root.path} cannot be asked: {reason(error)}")
        if failure is not None:
            raise failure
        return None

    def _found(self, status: FileStatus) -> Found:
        expires, clock = expiry(status), self.context.clock
        if expires is not None:
            expires += clock.now() - clock.wall()
        return Found(status.nbytes, _etag(status), expires, promise=self.exclusive)

    def _note(self, kind: str, message: str) -> None:
        """Say something once per kind; a sick disk must not flood the log."""
        if kind not in self._noted:
            self._noted.add(kind)
            self.context.log.warning("%s: %s", self.context.tier, message)


class FsBackend(DiskBackend):
    """Values as files in folders that several nodes use at once: NFS, Lustre, Weka, BeeGFS.

    The same files as ``disk``; what differs is that nothing is locked, that answers of ``lookup`` are hints
    because others delete, and that temporary files of others are removed only when they are old. The limit is
    what the file system sets: there is none of ours that nodes could share.
    """

    exclusive: ClassVar[bool] = False


def _status(root: Root, name: str, shard: str) -> FileStatus | None:
    """``Root.status``, asked again after an error: what a scan skips is charged to nobody and found by nobody."""
    for _ in range(STUBBORN - 1):
        with suppress(OSError):
            return root.status(name, shard)
    return root.status(name, shard)


def _unavailable(operation: str, error: OSError) -> Unavailable:
    return Unavailable(f"{operation} failed: {reason(error)}", operation=operation)


def _etag(status: FileStatus) -> str:
    return f"{status.inode:x}-{status.modified!r}-{status.nbytes:x}"


def _parse(name: str) -> Key | None:
    try:
        return Key.parse(name)
    except ValueError:
        return None


def _first(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first ``nbytes`` bytes of some views."""
    first = []
    for view in views:
        first.append(view[:nbytes])
        nbytes -= len(first[-1])
    return first
