"""What a plugin is given instead of globals: clock, randomness, threads, files, memory, events.

Everything that a simulation must control comes from here.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from lmcache_core.spi.buffers import MemoryOptions, ResidentPool
from lmcache_core.spi.hooks import Event

T = TypeVar("T")


class Clock(Protocol):
    """Source of time."""

    def now(self) -> float:
        """Monotonic seconds."""

    def wall(self) -> float:
        """Seconds since 1970, for stamps that outlive the process; may jump."""

    async def sleep(self, seconds: float, /) -> None: ...


class Executor(Protocol):
    """A bounded pool of daemonic threads belonging to one tier; a hung call can starve no other tier."""

    @property
    def threads(self) -> int: ...

    def submit(self, function: Callable[..., T], /, *args: Any) -> Future[T]: ...


@dataclass(frozen=True, slots=True)
class FileStatus:
    """What ``Files.status`` tells: length, allocated bytes (real blocks), modification time, kind, identity."""

    nbytes: int
    allocated: int
    modified: float
    is_file: bool
    is_folder: bool
    inode: int = 0


class Files(Protocol):
    """The system calls a store on a file system needs; every one may raise ``OSError``.

    ``OsFiles`` in core passes them on; a simulated disk delays, tears, fills up and loses power.
    Paths are absolute.
    """

    def open(self, path: str, flags: int, mode: int = 0o600, /) -> int: ...
    def close(self, descriptor: int, /) -> None: ...
    def preadv(self, descriptor: int, views: Sequence[memoryview], offset: int, /) -> int: ...
    def pwritev(self, descriptor: int, views: Sequence[memoryview], offset: int, /) -> int: ...
    def allocate(self, descriptor: int, nbytes: int, /) -> None:
        """Reserve real blocks; ENOSPC is raised here, before anything is written."""

    def truncate(self, descriptor: int, nbytes: int, /) -> None:
        """Set the length of an open file."""

    def stamp(self, descriptor: int, modified: float, /) -> None:
        """Set the modification time of an open file; the next ``sync`` brings it to the medium too."""

    def sync(self, descriptor: int, /) -> None:
        """Data and length of this file (or the entries of this folder) survive power loss afterwards."""

    def rename(self, source: str, target: str, /) -> None: ...
    def link(self, source: str, target: str, /) -> None:
        """Give a file a second name; ``FileExistsError`` when the name is taken."""

    def unlink(self, path: str, /) -> None: ...
    def mkdir(self, path: str, mode: int = 0o700, /) -> None: ...
    def list(self, path: str, /) -> Sequence[str]:
        """Names in a folder, in no particular order."""

    def status(self, path: str, /) -> FileStatus:
        """Describe what the name denotes; a symbolic link is neither file nor folder."""

    def status_of(self, descriptor: int, /) -> FileStatus: ...
    def free(self, path: str, /) -> int:
        """Bytes an unprivileged writer may still write to the file system holding ``path``."""

    def lock(self, descriptor: int, /) -> bool:
        """Take an exclusive lock that ends with the descriptor or the process; False when held elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The world of one plugin instance.

    Attributes:
        tier: configured name of the tier (or of the plugin where there is no tier).
        clock: source of time.
        random: source of randomness; never the global one.
        log: logger named after the tier.
        executor: threads for blocking calls.
        files: file system calls.
        emit: hand an event to observers; cheap, never raises.
        create_pool: make the memory of a resident tier; its size and policy are the tier's settings.
        pid: identity of this process, for lock files.
    """

    tier: str
    clock: Clock
    random: random.Random
    log: logging.Logger
    executor: Executor
    files: Files
    emit: Callable[[Event], None]
    create_pool: Callable[[MemoryOptions], ResidentPool]
    pid: int = field(default_factory=os.getpid)
