"""Looking through folders that no process serves: which values are whole, what is damaged, what is not ours."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from lmcache_backend_disk import opening
from lmcache_backend_disk.client import Root
from lmcache_backend_disk.config import Sync
from lmcache_backend_disk.folder import O_DIRECT, Folder, reason, shown
from lmcache_core import frame
from lmcache_core.spi import ConfigError, Corrupt, Files, FileStatus, Key, Unavailable


@dataclass(slots=True, kw_only=True)
class Report:
    """What a check found.

    Attributes:
        good, nbytes: whole values and their bytes.
        damaged: path and what is wrong with it.
        orphaned: temporary files of writers that are gone.
        foreign: what is not ours; never touched.
        removed: files deleted.
    """

    good: int = 0
    nbytes: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    orphaned: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    removed: int = 0

    @property
    def clean(self) -> bool:
        """Nothing damaged and nothing left behind."""
        return not self.damaged and not self.orphaned


def check(
    path: str,
    *,
    files: Files,
    repair: bool,
    watch: Callable[[list[str]], Iterable[str]] = lambda shards: shards,
) -> Report:
    """Verify every frame under one path.

    Args:
        repair: delete what is damaged or orphaned. Without it nothing is changed.
        watch: is handed the shards and gives them back one by one, to show progress.

    Raises:
        ConfigError: not a folder that ``disk`` or ``fs`` made.
        Unavailable: a process is using it.
    """
    folder = Folder(path, files=files, identity="0-0", note=lambda kind, message: None)
    fan_out = opening.find_layout(folder)
    if fan_out is None:
        raise ConfigError(f"{path} is no folder of a disk or fs tier; nothing was changed")
    lock = _take(folder)
    try:
        root = Root(folder, exclusive=lock is not None, sync=Sync.NONE, verify=False)
        root.fan_out = fan_out
        root.direct = bool(O_DIRECT)  # what memory holds of a file says nothing about the file
        report = Report(foreign=root.foreign())
        checker = _Checker(root, report, repair=repair)
        for shard in watch(root.shards()):
            for name in root.names(shard):
                checker.look(name, shard)
        with suppress(FileNotFoundError):  # no tmp: it is made when it is needed
            # A shared folder is not written to for the time of its server: its last change is early enough.
            now = None if lock is not None else files.status(f"{path}/tmp/.").modified
            checker.orphans(opening.abandoned(folder, now=now))
        return report
    finally:
        if lock is not None:
            files.close(lock)


class _Checker:
    def __init__(self, root: Root, report: Report, *, repair: bool) -> None:
        self._root = root
        self._report = report
        self._repair = repair
        self._buffer = memoryview(mmap.mmap(-1, 1 << 20))

    def look(self, name: str, shard: str) -> None:
        """File one entry under what it is."""
        root, report = self._root, self._report
        status = root.status(name, shard)
        if status is None:
            return  # gone meanwhile
        path = f"{root.path}/{shard}/{name}"
        try:
            key = Key.parse(name)
        except ValueError:
            key = None
        if key is None or not status.is_file or root.shard_of(name) != shard:
            report.foreign.append(shown(path))
            return
        try:
            if self._verified(name, key):
                report.good += 1
                report.nbytes += status.nbytes
        except Corrupt as error:
            self._damaged(name, path, str(error), status)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self._damaged(name, path, f"cannot be read: {reason(error)}", status)

    def orphans(self, paths: Iterable[str]) -> None:
        """File, and with ``repair`` remove, temporary files."""
        for path in paths:
            self._report.orphaned.append(path)
            if self._repair:
                self._report.removed += self._root.discard(path)

    def _verified(self, name: str, key: Key) -> bool:
        """Read and verify; False when the file is gone."""
        length = 0

        def first(nbytes: int) -> list[memoryview]:
            nonlocal length
            length = nbytes
            return [self._buffer[:nbytes]]

        got = self._root.read(name, first, offset=0)
        if got is None:
            return False
        header = frame.open_header(self._buffer[:got], key)
        claimed = header.nbytes + header.stored_nbytes
        if length != claimed:  # before there is memory for it: a length alone proves nothing
            raise Corrupt(f"has {length} bytes, its header says {claimed}")
        if length > len(self._buffer):
            larger = memoryview(mmap.mmap(-1, length))
            larger[:got] = self._buffer[:got]
            self._buffer = larger
        rest = self._buffer[got:length]
        if rest and self._root.read(name, lambda nbytes: [rest], offset=got) is None:
            return False
        frame.verify(header, self._buffer[header.nbytes : length])
        return True

    def _damaged(self, name: str, path: str, what: str, status: FileStatus) -> None:
        self._report.damaged[path] = what
        if self._repair:
            # Only the very file that was looked at: in a shared folder another may have taken its place.
            try:
                self._report.removed += self._root.remove(name, only=lambda found: found == status)
            except OSError as error:
                self._report.damaged[path] = f"{what}; cannot be removed: {reason(error)}"


def _take(folder: Folder) -> int | None:
    """Own an exclusive folder while it is looked through; None for a shared one, or where nothing can be written."""
    path = f"{folder.path}/lock"
    try:
        if not folder.files.status(path).is_file:
            return None
        descriptor = folder.files.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    if folder.files.lock(descriptor):
        return descriptor
    owner = folder.text(descriptor).decode(errors="replace").split()
    folder.files.close(descriptor)
    raise Unavailable(
        f"{folder.path} is in use by process {owner[0] if owner else '?'}; stop it first"
    )
