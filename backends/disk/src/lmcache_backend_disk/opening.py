"""Taking a folder into use: make it, own it, learn its layout, clear it of dead writers' remains, try it out."""

from __future__ import annotations

import errno
import os
import re

from lmcache_backend_disk.config import Direct
from lmcache_backend_disk.folder import FULL, GONE, O_DIRECT, READ, Folder
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


def read_layout(folder: Folder, fan_out: int) -> int:
    """Return how many shards the folder has: ``fan_out`` for a new one.

    Raises:
        ConfigError: written by a version that this one cannot read.
    """
    path = f"{folder.path}/layout"
    try:
        descriptor = folder.files.open(path, READ)
    except FileNotFoundError:
        _write_layout(folder, path, fan_out)
        return fan_out
    try:
        found = folder.text(descriptor)
    finally:
        folder.files.close(descriptor)
    match = LAYOUT.fullmatch(found)
    if match is None:
        raise ConfigError(
            f"{path} says {found[:60]!r}, which this version cannot read; use an empty folder"
        )
    if int(match[1]) != fan_out:
        folder.note("fan_out", f"{folder.path} was made with fan_out {int(match[1])}, which stays")
    return int(match[1])


def sweep(folder: Folder, *, everything: bool) -> None:
    """Remove temporary files of dead writers.

    Args:
        everything: nobody else writes here; otherwise only files go that are old by the clock of the file
            server, whatever the clocks of the nodes say.
    """
    files = folder.files
    names = files.list(f"{folder.path}/tmp")
    now = None
    for name in names:
        path = f"{folder.path}/tmp/{name}"
        try:
            found = files.status(path)
            if not TEMPORARY.fullmatch(name) or not found.is_file:
                folder.note("foreign", f"{path} is not ours; left alone")
                continue
            if not everything:
                now = _server_time(folder) if now is None else now
                if found.modified > now - ABANDONED_S:
                    continue
            files.unlink(path)
        except OSError as error:
            if error.errno not in (*GONE, *FULL):
                raise


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


def _boot(folder: Folder) -> bytes:
    try:
        descriptor = folder.files.open("/proc/sys/kernel/random/boot_id", os.O_RDONLY)
    except OSError:
        return b"-"
    try:
        return folder.text(descriptor).strip()
    finally:
        folder.files.close(descriptor)


def _write_layout(folder: Folder, path: str, fan_out: int) -> None:
    files = folder.files
    text = b"lmcache disk 1\nfan_out %d\n" % fan_out
    temporary, descriptor = folder.create()
    try:
        try:
            files.pwritev(descriptor, [memoryview(text)], 0)
            files.sync(descriptor)
        finally:
            files.close(descriptor)
        files.rename(temporary, path)
        folder.sync(folder.path)
    finally:
        folder.discard(temporary)


def _server_time(folder: Folder) -> float:
    path, descriptor = folder.create()
    folder.files.close(descriptor)
    try:
        return folder.files.status(path).modified
    finally:
        folder.discard(path)
