"""Taking a folder into use: make it, own it, learn its layout, clear it of dead writers' remains, try it out."""

from __future__ import annotations

import errno
import os
import re

from lmcache_backend_disk.config import Direct
from lmcache_backend_disk.folder import FULL, GONE, O_DIRECT, READ, Folder, expiry, shown
from lmcache_backend_disk.transfer import BLOCK
from lmcache_core.spi import ConfigError, Unavailable

TEMPORARY = re.compile(r"[0-9a-f]+-[0-9a-f]{16}-[0-9a-f]+")
LAYOUT = re.compile(rb"lmcache disk 1\nfan_out (16|256|4096)\n")
ABANDONED_S = 3600.0
"""Age after which a temporary file in a shared folder belongs to nobody."""


def make(folder: Folder) -> None:
    """Create the folder and its parents where they are missing.

    Raises:
        ConfigError: something else has its name.
    """
    missing, path = [], folder.path
    while True:
        try:
            found = folder.files.status(f"{path}/.")  # the dot follows a link
            break
        except FileNotFoundError:
            missing.append(path)
            path = os.path.dirname(path)
        except NotADirectoryError:
            raise ConfigError(f"{path} is not a folder; give the path of a folder") from None
    if not found.is_folder:
        raise ConfigError(f"{path} is not a folder; give the path of a folder")
    for each in reversed(missing):
        folder.mkdir(each)


def own(folder: Folder, pid: int) -> int:
    """Lock the folder for the life of the returned descriptor.

    The lock is the kernel's and ends with its holder, so no lock is ever stale; the text in the file is for
    people and error messages.

    Raises:
        Unavailable: another process holds it; named by its pid.
    """
    files = folder.files
    lock = files.open(f"{folder.path}/lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        _regular(folder, lock, "lock")
        if not files.lock(lock):
            owner = folder.text(lock).decode(errors="replace").split()
            who = f"process {owner[0]}" if owner else "another process"
            raise Unavailable(f"{folder.path} is in use by {who}; give each process its own folder")
        stamp = b"%d %s\n" % (pid, _boot(folder))
        files.truncate(lock, 0)
        files.pwritev(lock, [memoryview(stamp)], 0)
    except BaseException as error:  # whatever it is, the lock may not stay behind
        if not isinstance(error, OSError) or error.errno not in FULL:
            files.close(lock)
            raise
    return lock


def find_layout(folder: Folder) -> int | None:
    """Return how many shards the folder has, None when it is not (yet) one of ours.

    Raises:
        ConfigError: written by a version that this one cannot read.
    """
    path = f"{folder.path}/layout"
    try:
        descriptor = folder.files.open(path, READ)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        _regular(folder, descriptor, "layout")
        found = folder.text(descriptor)
    finally:
        folder.files.close(descriptor)
    match = LAYOUT.fullmatch(found)
    if match is None:
        raise ConfigError(
            f"{path} says {found[:60]!r}, which this version cannot read; use an empty folder"
        )
    return int(match[1])


def settle_layout(folder: Folder, fan_out: int) -> int:
    """Return how many shards the folder has: ``fan_out`` for a new one, else what it was made with."""
    found = find_layout(folder)
    if found is None:
        _write_layout(folder, fan_out)
        return fan_out
    if found != fan_out:
        folder.note("fan_out", f"{folder.path} was made with fan_out {found}, which stays")
    return found


def abandoned(folder: Folder, *, now: float | None) -> list[str]:
    """Paths of temporary files whose writers are gone.

    Args:
        now: None when nobody else writes here; otherwise the time by the clock of the file server, and only
            files that are old by it count, whatever the clocks of the nodes say.
    """
    found = []
    for name in folder.files.list(f"{folder.path}/tmp"):
        path = f"{folder.path}/tmp/{name}"
        try:
            status = folder.files.status(path)
        except OSError as error:
            if error.errno in GONE:
                continue
            raise
        if not TEMPORARY.fullmatch(name) or not status.is_file:
            folder.note("foreign", f"{shown(path)} is not ours; left alone")
        elif now is None or (expiry(status) or status.modified) <= now - ABANDONED_S:
            found.append(path)
    return found


def server_time(folder: Folder) -> float:
    """The time by the clock that stamps files here, or one long ago where no file can be made."""
    try:
        path, descriptor = folder.create()
    except OSError as error:
        if error.errno in FULL:
            return 0.0
        raise
    folder.files.close(descriptor)
    try:
        return folder.files.status(path).modified
    finally:
        folder.discard(path)


def probe(folder: Folder, direct: Direct) -> bool:
    """Tell whether to transfer directly, by doing it once.

    Raises:
        ConfigError: it is required and does not work.
    """
    if direct is Direct.OFF:
        return False
    files, block = folder.files, folder.scratch.view[:BLOCK]
    works = False
    try:
        path, descriptor = folder.create(O_DIRECT)
    except OSError as error:
        # A full disk: the first transfer will tell. The other one is how a file system declines.
        if error.errno not in (*FULL, errno.EINVAL):
            raise
        works = error.errno in FULL
    else:
        try:
            files.pwritev(descriptor, [block], 0)
            files.truncate(descriptor, 100)
            works = O_DIRECT != 0 and files.preadv(descriptor, [block], 0) == 100
        except OSError as error:
            if error.errno not in (*FULL, errno.EINVAL, errno.EOPNOTSUPP):
                raise
            works = error.errno in FULL
        finally:
            files.close(descriptor)
            folder.discard(path)
    if not works and direct is Direct.ON:
        raise ConfigError(f"{folder.path} cannot do direct transfers; set direct to auto or off")
    if not works:
        folder.note("direct", f"{folder.path} cannot do direct transfers; using the page cache")
    return works


def sync_ancestors(folder: Folder) -> None:
    """Bring the way to the folder to the medium, whoever made it."""
    path = folder.path
    while path:
        try:
            folder.sync(path)
        except PermissionError:
            return  # then it is not ours either
        path = path.rpartition("/")[0]
    folder.sync("/")


def _regular(folder: Folder, descriptor: int, name: str) -> None:
    if not folder.files.status_of(descriptor).is_file:
        path = folder.path
        raise ConfigError(
            f"cannot use {path}: {path}/{name} is no regular file; use another folder"
        )


def _boot(folder: Folder) -> bytes:
    try:
        descriptor = folder.files.open("/proc/sys/kernel/random/boot_id", os.O_RDONLY)
    except OSError:
        return b"-"
    try:
        return folder.text(descriptor).strip()
    finally:
        folder.files.close(descriptor)


def _write_layout(folder: Folder, fan_out: int) -> None:
    files = folder.files
    text = b"lmcache disk 1\nfan_out %d\n" % fan_out
    temporary, descriptor = folder.create()
    try:
        try:
            files.pwritev(descriptor, [memoryview(text)], 0)
            files.sync(descriptor)
        finally:
            files.close(descriptor)
        files.rename(temporary, f"{folder.path}/layout")
        folder.sync(folder.path)
    finally:
        folder.discard(temporary)
