"""A daemon's client for people and programs that look after it: no value is mapped, every answer is told."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lmcache_core import frame
from lmcache_core.observers import Sample, Snapshot
from lmcache_core.spi import ConfigError, Key
from lmcache_core.spi.errors import Unavailable
from lmcache_core.wire import records, replies
from lmcache_core.wire.client import DaemonClient
from lmcache_core.wire.codec import Notice, to_extents, to_runs
from lmcache_core.wire.grants import Home
from lmcache_core.wire.greeting import nonsense
from lmcache_core.wire.link import Link

T = TypeVar("T", bound=records.Message)
SECONDS = 10.0
"""How long a request may take when nothing else is said."""
_MARGIN = 2.0
"""How much longer than the daemon's own deadline its answer is awaited."""
_MOST_JOBS = 1000
_PART = 128
"""Values of a listing in one request: well below a millisecond of the daemon's time."""
_MOST_PARTS = 100


@dataclass(frozen=True, slots=True)
class Job:
    """A prefetch: ``state`` is running, done or lost (its daemon or connection is gone)."""

    number: int
    state: str
    count: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Checksum:
    """SHA-256 of a value's bytes behind their header; empty where there is no value."""

    key: str
    nbytes: int = 0
    sha256: str = ""


class Operator(DaemonClient):
    """See the module. Calls raise what went wrong: ``ConfigError`` or ``BackendError``.

    Attributes:
        why: the last thing there was to say about the connection.
    """

    why = ""

    def __init__(self, address: str, /, *, token: str = "", timeout: float = SECONDS) -> None:
        self._finished: OrderedDict[int, Job] = OrderedDict()
        self._running: OrderedDict[int, float] = OrderedDict()
        self._ready = threading.Condition()
        super().__init__(address, token=token, timeout=timeout, name=f"operator {os.getpid()}")

    def do(
        self,
        kind: type[T],
        make: Callable[[int], records.Message],
        /,
        *,
        seconds: float | None = None,
    ) -> T:
        """One exchange; ``seconds`` is what the request itself tells the daemon."""
        if self.home is None:
            self.connect()
        if self.home is None:
            raise Unavailable(self.why or f"no daemon at {self.address}")
        until = None if seconds is None else time.monotonic() + seconds + _MARGIN
        return self.ask(kind, make, until)

    def describe(self) -> dict[str, Any]:
        """The daemon's document about itself."""
        found = json.loads(self.do(replies.Document, records.Describe).json)
        assert isinstance(found, dict)
        return found

    def snapshot(self) -> Snapshot:
        """All metrics at one moment."""
        metered = self.do(replies.Metered, records.Stats)
        return Snapshot(
            Sample(s.name, tuple((name, value) for name, value in s.labels), s.value, (*s.buckets,))
            for s in metered.samples
        )

    def list(
        self, tier: str = "", space: bytes = b"", *, after: str | None = None, limit: int = 1000
    ) -> replies.Values:
        """One page of a tier; ``after`` of the answer begins the next, None ends the list.

        Asked for in small parts: a long one would keep the daemon from everybody else. A page may hold fewer
        values than ``limit``, or none, and not be the last.
        """
        found = replies.Values(0, [], [], after)
        for _ in range(_MOST_PARTS):
            most = min(_PART, limit - len(found.keys))
            part = self.do(
                replies.Values,
                lambda id, most=most: records.List(id, tier, space, found.after, most),  # type: ignore[misc]
            )
            found.pinned += [len(found.keys) + at for at in part.pinned]
            found.keys += part.keys
            found.nbytes += part.nbytes
            found.after = part.after
            if part.after is None or len(found.keys) >= limit:
                break
        return found

    def find(self, keys: Sequence[Key], /) -> replies.Found:
        """Where values are."""
        return self.do(replies.Found, lambda id: records.Find(id, to_runs(keys), self.timeout))

    def move(
        self, keys: Sequence[Key], source: str, target: str, /, *, forget: bool, seconds: float
    ) -> int:
        """Copy values between tiers, and with ``forget`` delete them in the first.

        Raises:
            ConfigError: there is no such tier.
        """
        known = self.tiers()
        for name in (source, target):
            if name not in known:
                raise ConfigError(f"there is no tier {name!r}; there are: {', '.join(known)}")
        if source == target:
            raise ConfigError(f"{source!r} is both where values come from and where they go")

        def make(id: int) -> records.Message:
            return records.Move(id, to_runs(keys), source, target, seconds, forget)

        return self.do(replies.Count, make, seconds=seconds).count

    def tiers(self) -> Sequence[str]:
        """Names of the tiers in lookup order."""
        document = self.describe()
        lower = [each["name"] for each in document["tiers"] if each["enabled"]]
        return [document["memory"]["tier"], *lower]

    def pin(self, keys: Sequence[Key], lasts: float, /, *, seconds: float) -> replies.Count:
        """Keep values in memory for so long, 0 for no longer; see ``records.Pin``."""
        return self.do(
            replies.Count,
            lambda id: records.Pin(id, to_runs(keys), seconds, lasts),
            seconds=seconds,
        )

    def checksum(self, key: Key, /) -> Checksum:
        """Read one value over the connection and digest it; verified as any load is."""
        until = time.monotonic() + self.timeout
        with self.link(until) as (link, home):
            granted = self.exchange(
                link, home, replies.Granted,
                lambda id: records.Load(id, to_runs([key]), self.timeout, stream=True), until,
            )  # fmt: skip
            extents = to_extents(granted.extents)
            if len(extents) > 1:
                raise nonsense(link, "more values than were asked for")
            if not extents:
                return Checksum(key.text)
            value = memoryview(bytearray(extents[0].nbytes))
            link.read_into(value, until)
        header = frame.open_header(value, key)
        payload = value[header.nbytes : header.nbytes + header.stored_nbytes]
        frame.verify(header, payload)
        return Checksum(key.text, payload.nbytes, hashlib.sha256(payload).hexdigest())

    # -- prefetches ----------------------------------------------------------------------------------------

    def bring_up(self, keys: Sequence[Key], /, *, seconds: float) -> int:
        """Begin to bring values up; the number of the job."""
        begun = time.monotonic()
        number = self.do(
            replies.Count, lambda id: records.Prefetch(id, to_runs(keys), seconds)
        ).count
        with self._ready:
            self._running[number] = begun + seconds + _MARGIN
            while len(self._running) > _MOST_JOBS:
                self._running.popitem(last=False)
        return number

    def job(self, number: int, /, *, wait: float = 0.0) -> Job | None:
        """How a prefetch stands, at most ``wait`` seconds from now; None when it is not known."""
        with self._ready:
            self._ready.wait_for(lambda: number in self._finished, wait)
            if number in self._finished:
                return self._finished[number]
            until = self._running.get(number)
        if until is None:
            return None
        return Job(number, "running" if time.monotonic() < until else "lost")

    def _notice(self, notice: Notice) -> None:
        if isinstance(notice, replies.Ready):
            with self._ready:
                self._finished[notice.job] = Job(notice.job, "done", notice.count, notice.reason)
                while len(self._finished) > _MOST_JOBS:
                    self._finished.popitem(last=False)
                self._ready.notify_all()
        super()._notice(notice)

    # -- what a client of values does and this one does not ------------------------------------------------

    def _map(
        self,
        link: Link,
        home: Home,
        segments: Sequence[tuple[int, int, int]],
        received: Sequence[int],
    ) -> None:
        """Nothing here reads memory, and mapping all of it would cost page tables."""
        for descriptor in received:
            os.close(descriptor)

    def _say(self, text: str, level: int) -> None:
        self.why = text


def read_token(path: str | None, /) -> str:
    """The token for TCP: from a file, or LMCACHE_SERVER_TOKEN; may be empty.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if path is None:
        return os.environ.get("LMCACHE_SERVER_TOKEN", "")
    try:
        with open(path, encoding="utf-8") as file:
            token = file.read().strip()
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"--token-file {path}: it cannot be read: {problem}") from error
    if not token:
        raise ConfigError(f"--token-file {path}: it is empty")
    return token


def parse_keys(written: Sequence[str], /) -> Sequence[Key]:
    """Keys as ``ls`` prints them.

    Raises:
        ConfigError: one is none.
    """
    try:
        return [Key.parse(text) for text in written]
    except ValueError as error:
        raise ConfigError(str(error)) from error


def parse_space(written: str, /) -> bytes:
    """Digest of a key space, as the first 64 digits of a key; empty for all.

    Raises:
        ConfigError: it is none.
    """
    if not written:
        return b""
    if len(written) != 64 or written.strip("0123456789abcdef"):
        raise ConfigError(f"not a key space: {written[:80]!r} (the first 64 digits of a key)")
    return bytes.fromhex(written)
