"""One folder full of write-once files: names in, bytes in and out, nothing about keys or frames.

* ``layout``: what the folder is and how many shards it has;
* ``lock``: pid and boot id of the owner, locked while it lives (exclusive folders);
* ``tmp/``: values being written;
* ``0a/NAME``: a value, in the shard that its name ends with.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

from lmcache_backend_disk import opening
from lmcache_backend_disk.config import Direct, Sync
from lmcache_backend_disk.folder import (
    GONE,
    O_DIRECT,
    READ,
    Folder,
    expiry,
    reason,
    shown,
    stamp_for,
)
from lmcache_backend_disk.transfer import BLOCK, read_into, same_bytes, write_from
from lmcache_core.spi import ConfigError, Corrupt, FileStatus

UNUSABLE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP,
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENXIO,
)  # fmt: skip
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)


class Root:
    """The values in one folder. Every method blocks; all but ``open`` and ``close`` are thread-safe.

    Args:
        exclusive: nobody else changes the folder.
        verify: read every value back before it becomes visible.
        wall: time since 1970; what has expired by it is not there. The default lets nothing expire.
    """

    def __init__(
        self,
        folder: Folder,
        *,
        exclusive: bool,
        sync: Sync,
        verify: bool,
        wall: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.path = folder.path
        self.direct = False
        self._folder = folder
        self._files = folder.files
        self._exclusive = exclusive
        self._sync = sync
        self._verify = verify
        self._wall = wall
        self.fan_out = 256
        self.block = BLOCK
        self._links = True
        self._remade = False
        self._lock: int | None = None

    def open(self, *, direct: Direct, fan_out: int, pid: int) -> None:
        """Create what is missing, take ownership, remove what dead writers left behind.

        Raises:
            ConfigError: not a folder, not writable, or of a format this version does not know.
            Unavailable: another process owns it.
        """
        folder = self._folder
        try:
            opening.make(folder)
            if self._exclusive:
                self._lock = opening.own(folder, pid)
            folder.mkdir(f"{self.path}/tmp")
            self.fan_out = opening.settle_layout(folder, fan_out)
            # What a small file takes is what files are made of here: 4 KiB nearly everywhere, seldom more.
            self.block = max(BLOCK, self._files.status(f"{self.path}/layout").allocated)
            for name in sorted(set(self.shards()) - set(self._files.list(self.path))):
                folder.mkdir(f"{self.path}/{name}")
            if self._sync is Sync.DURABLE:
                opening.sync_ancestors(folder)
            now = None if self._exclusive else opening.server_time(folder)
            for path in opening.abandoned(folder, now=now):
                folder.discard(path)
            self.direct = opening.probe(folder, direct)
        except OSError as error:
            if error.errno in UNUSABLE:
                raise ConfigError(f"cannot use {self.path}: {reason(error)}") from error
            raise

    def close(self) -> None:
        """Give up ownership. Idempotent."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            self._files.close(lock)

    def shards(self) -> list[str]:
        return [f"{number:0{self._digits}x}" for number in range(self.fan_out)]

    @property
    def _digits(self) -> int:
        return (self.fan_out.bit_length() - 1) // 4

    def shard_of(self, name: str) -> str:
        return name[-self._digits :]

    def path_of(self, name: str) -> str:
        return f"{self.path}/{self.shard_of(name)}/{name}"

    def find(self, name: str) -> FileStatus | None:
        """Describe a value, or None; what is in its place without being a file is none."""
        found = self.status(name, self.shard_of(name))
        if found is not None and not found.is_file:
            self._foreign(self.path_of(name))
            return None
        return found

    def live(self, name: str) -> FileStatus | None:
        """Describe a value that has not expired, or None."""
        found = self.find(name)
        return None if found is None or self._expired(found) else found

    def status(self, name: str, shard: str) -> FileStatus | None:
        """Describe whatever has this name in a shard, or None."""
        try:
            return self._files.status(f"{self.path}/{shard}/{name}")
        except OSError as error:
            if error.errno in GONE:
                return None
            raise

    def read(
        self, name: str, views: Callable[[int], Sequence[memoryview]], *, offset: int
    ) -> int | None:
        """Fill the views that ``views(length of the value)`` picks; None when the value is not there.

        Raises:
            Corrupt: the file ended before the views were full.
        """
        for attempt in range(3):  # two things may go wrong first
            try:
                return self._read(name, views, offset=offset)
            except OSError as error:
                if error.errno == errno.ESTALE and attempt < 2:
                    continue  # another node replaced the file; its name leads to the new one
                if error.errno in (*GONE, errno.ELOOP, errno.ENXIO):
                    return None
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                if self.find(name) is None:
                    return None
                self._give_up_direct(error)
        return None

    def write(
        self, name: str, views: Sequence[memoryview], *, expires: float | None = None
    ) -> bool:
        """Make a value visible, whole, at the promised durability; False when there is one already."""
        if self.kept(name):
            return False
        try:
            stored = self._publish(views, name, expires)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            self._give_up_direct(error)
            stored = self._publish(views, name, expires)
        if not stored:
            self.kept(name)
            return False
        try:
            self._settle(name)
        except OSError:
            self._folder.discard(self.path_of(name))
            raise
        return True

    def kept(self, name: str) -> bool:
        """``present``, and by now at the promised durability: whoever stored it may have promised less."""
        if not self.present(name):
            return False
        if self._sync is Sync.DURABLE:
            try:
                descriptor = self._files.open(self.path_of(name), READ)
            except OSError as error:
                if error.errno in GONE:
                    return False
                raise
            try:
                self._files.sync(descriptor)
            finally:
                self._files.close(descriptor)
        self._settle(name)
        return True

    def present(self, name: str) -> bool:
        """Whether there is a value already; one that has expired is removed."""
        found = self._asked(name)
        if found is None or not self._expired(found):
            return found is not None
        with self._folder.mutex:  # another thread may have stored it anew meanwhile
            found = self._asked(name)
            if found is None or not self._expired(found):
                return found is not None
            self._folder.discard(self.path_of(name))
            return False

    def remove(self, name: str, *, only: Callable[[FileStatus], bool] | None = None) -> bool:
        """Delete a value; tell whether it was there."""
        found = self.find(name)
        if found is None or (only is not None and not only(found)):
            return False
        try:
            self._files.unlink(self.path_of(name))
        except OSError as error:
            if error.errno in GONE:
                return False
            raise
        return True

    def discard(self, path: str) -> bool:
        """Remove a temporary file; tell whether it was there, and no longer is."""
        return self._folder.discard(path)

    def names(self, shard: str) -> list[str]:
        """Names in a shard, sorted; empty when it is gone."""
        try:
            return sorted(self._files.list(f"{self.path}/{shard}"))
        except OSError as error:
            if error.errno in GONE:
                return []
            raise

    def foreign(self) -> list[str]:
        """Paths of things directly in the folder that are not ours."""
        own = {"layout", "lock", "tmp", *self.shards()}
        names = sorted(set(self._files.list(self.path)) - own)
        return [shown(f"{self.path}/{name}") for name in names]

    def _read(
        self, name: str, views: Callable[[int], Sequence[memoryview]], *, offset: int
    ) -> int | None:
        path, files, direct = self.path_of(name), self._files, self.direct
        descriptor = files.open(path, READ | (O_DIRECT if direct else 0))
        try:
            found = files.status_of(descriptor)
            if not found.is_file:
                self._foreign(path)
                return None
            if self._expired(found):
                return None
            into = views(found.nbytes)
            wanted = sum(view.nbytes for view in into)
            scratch = self._folder.scratch.view if direct else None
            got = read_into(files, descriptor, into, offset=offset, scratch=scratch)
        finally:
            files.close(descriptor)
        if got != wanted:
            raise Corrupt(f"{path} ended after {offset + got} of {offset + wanted} bytes")
        return got

    def _asked(self, name: str) -> FileStatus | None:
        """``find``, past what this node remembers of a shared folder."""
        if self._exclusive:
            return self.find(name)
        # The attributes a node remembers may outlive a value that another one deleted; opening asks the server.
        try:
            descriptor = self._files.open(self.path_of(name), READ)
        except OSError as error:
            if error.errno in (*GONE, errno.ELOOP):
                return None
            raise
        try:
            found = self._files.status_of(descriptor)
        finally:
            self._files.close(descriptor)
        return found if found.is_file else None

    def _publish(self, views: Sequence[memoryview], name: str, expires: float | None) -> bool:
        """Write a file and give it its name; False when the name is taken."""
        direct = self.direct
        temporary, descriptor = self._folder.create(O_DIRECT if direct else 0)
        try:
            try:
                self._write(descriptor, views, direct=direct, expires=expires)
            finally:
                self._files.close(descriptor)
            return self._name(temporary, name)
        finally:
            self._folder.discard(temporary)

    def _write(
        self,
        descriptor: int,
        views: Sequence[memoryview],
        *,
        direct: bool,
        expires: float | None,
    ) -> None:
        files, scratch = self._files, self._folder.scratch.view
        nbytes = sum(view.nbytes for view in views)
        files.allocate(descriptor, nbytes)
        write_from(files, descriptor, views, scratch=scratch if direct else None)
        if expires is not None and (stamp := stamp_for(expires)) is not None:
            files.stamp(descriptor, stamp)
        if files.status_of(descriptor).nbytes != nbytes:
            raise OSError(errno.EIO, "file has another length than was written")
        if self._sync is not Sync.NONE:
            files.sync(descriptor)
        if self._verify and not same_bytes(
            files, descriptor, views, scratch=scratch, direct=direct
        ):
            raise OSError(errno.EIO, "file does not read back as it was written")

    def _name(self, temporary: str, name: str) -> bool:
        target = self.path_of(name)
        failure = OSError(errno.ENOENT, "shard folder is gone", target)
        for _ in range(8):  # things to put right first, or others' deletions between two calls
            try:
                if self._links:
                    self._files.link(temporary, target)
                else:
                    with self._folder.mutex:  # a rename replaces, whatever it meets
                        if self.status(name, self.shard_of(name)) is not None:
                            raise FileExistsError(errno.EEXIST, "name is taken", target)
                        self._files.rename(temporary, target)
                return True
            except FileExistsError as error:
                if self.find(name) is not None:
                    return False
                failure = error  # deleted meanwhile, or what sits there is not ours
            except FileNotFoundError:
                self._remade = True  # from now on the folder itself is synced with every name
                self._folder.mkdir(f"{self.path}/{self.shard_of(name)}")
            except OSError as error:
                if not self._links or error.errno not in NO_LINKS:
                    raise
                self._links = False
        raise failure

    def _settle(self, name: str) -> None:
        """With ``durable``: return when the name is on the medium.

        Threads that wait here at the same time share one commit of the file system's journal. Collecting them
        here, to sync their folders one after another, was measured at less than half the rate.
        """
        if self._sync is Sync.DURABLE:
            self._folder.sync(f"{self.path}/{self.shard_of(name)}")
            if self._remade:
                self._folder.sync(self.path)

    def _expired(self, found: FileStatus) -> bool:
        expires = expiry(found)
        return expires is not None and expires <= self._wall()

    def _foreign(self, path: str) -> None:
        self._folder.note("foreign", f"{path} is no regular file; left alone, treated as a miss")

    def _give_up_direct(self, error: OSError) -> None:
        self.direct = False
        self._folder.note(
            "direct",
            f"{self.path} refuses direct transfers ({reason(error)}); using the page cache",
        )
