"""Connections of one client to one daemon: made when needed, kept, and made again after a loss."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from lmcache_core.spi.errors import BackendError, ConfigError, DeadlineExceeded, Unavailable
from lmcache_core.storage.results import Reason
from lmcache_core.wire import records, replies
from lmcache_core.wire.address import Address, parse
from lmcache_core.wire.borrowed import Borrowed
from lmcache_core.wire.codec import Notice, Reply, frames
from lmcache_core.wire.grants import Home, Spare
from lmcache_core.wire.greeting import authenticate, greet, nonsense, refused
from lmcache_core.wire.helper import RETRY, TICK, helper, watch
from lmcache_core.wire.link import Link

NO_ANSWER = BackendError, ConfigError
"""What a call makes a miss of; a daemon that has restarted may not know the engine yet."""
T = TypeVar("T", bound=records.Message)
_IDLE_TICK = 0.5
_KEEP_S = 2.0  # the memory of a daemon that is gone stays mapped: leases may be on their way to us


class Connections:
    """Args:
        address: as users write it: ``HOST:PORT``, ``unix:///PATH``.
        token: for TCP; without one only a daemon on this node is reached, over its unix socket.
        timeout: seconds a call without a deadline may take.
        name: of this client, for people.
        transfer: ``auto``, ``shm`` (never stream) or ``tcp`` (never map).

    Attributes:
        home: the daemon we talk to, None while there is none.
        trouble: why the last call had no answer.

    Raises:
        ConfigError: not an address.
    """

    def __init__(
        self,
        address: str,
        /,
        *,
        token: str = "",
        timeout: float = 1.0,
        name: str = "",
        transfer: str = "auto",
        log: logging.Logger | None = None,
    ) -> None:
        self.address = parse(address)
        self.timeout = timeout
        self.now: Callable[[], float] = time.monotonic
        self.home: Home | None = None
        self.trouble = Reason.CLOSED
        self.welcome: replies.Welcome | None = None
        self.spare = Spare()
        self.revive: Callable[[], None] = lambda: None
        self._token = token.encode()
        self._name = name or f"pid {os.getpid()}"
        self._transfer = transfer
        self._log = log or logging.getLogger("lmcache.daemon")
        self._jobs: dict[int, Callable[[replies.Ready], None]] = {}
        self._early: dict[int, replies.Ready] = {}
        self._said = ""
        self._closed = False
        self._reset()
        watch(self)
        self.connect()
        self._start()

    def _reset(self) -> None:
        """Begin without any connection (first, and in the child of a fork)."""
        self.home = None
        self._previous: Home | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self.wake = threading.Event()
        self._idle: list[Link] = []
        self._busy = 0
        self._posts: list[records.Record] = []
        self._quiet_until = self._keep_until = 0.0
        self._thread: threading.Thread | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing is to be done for this client any more (in this process)."""
        return self._closed or self._pid != os.getpid()

    def abandon(self) -> None:
        """Forget the parent's connections in the child of a fork; its memory is not mapped here."""
        links = self._idle
        self._reset()
        for link in links:
            link.close()

    # -- calls ---------------------------------------------------------------------------------------------

    def link(self, until: float) -> Borrowed:
        """A connection for one exchange; see there."""
        return Borrowed(self, until)

    def borrow(self, begun: float) -> tuple[Link | None, Home]:
        """Take an idle connection, if there is one; ``give_back`` it, or what was made in its place."""
        if self._thread is None:
            self._start()
        with self._lock:
            home = self.home if begun >= self._quiet_until else None
            if home is not None:
                self._busy += 1
                return (self._idle.pop() if self._idle else None), home
        self.trouble = Reason.CLOSED if self.home is None else Reason.DEADLINE
        raise Unavailable(f"no daemon at {self.address}")

    def give_back(
        self, link: Link | None, home: Home, begun: float, error: BaseException | None
    ) -> None:
        """End of an exchange on a connection of this life of the daemon, with what it has raised."""
        if error is None:
            self._quiet_until = 0.0
        elif isinstance(error, DeadlineExceeded):
            # Whoever is slow now would cost the next call its deadline too.
            now = self.now()
            self._quiet_until = now + max(0.0, now - begun) * random.uniform(0.5, 1.0)
            self.trouble = Reason.DEADLINE
        elif isinstance(error, Unavailable):
            self.trouble = Reason.CLOSED
            self._lost(home)
        with self._lock:
            self._busy -= 1
            if link is not None and not link.failed and home is self.home:
                self._idle.append(link)
            elif link is not None:
                link.close()

    def exchange(
        self,
        link: Link,
        home: Home,
        kind: type[T],
        make: Callable[[int], records.Message],
        until: float,
        *,
        after: Sequence[memoryview] = (),
        received: list[int] | None = None,
    ) -> T:
        """Send a request, with what has ended in front of it, and take its reply."""
        said = self._endings(home)
        try:
            reply = link.call(make, until, before=said, after=after, received=received)
            home.note(reply, said)
        except BackendError:
            home.unsaid(said)
            raise
        if isinstance(reply, replies.Failed):
            self._say(f"the daemon refuses: {reply.message}", logging.WARNING)
            raise refused(reply)
        if not isinstance(reply, kind):
            raise nonsense(link, f"{type(reply).__name__} instead of {kind.__name__}")
        return reply

    def fetch(self, link: Link, home: Home, until: float) -> None:
        """Map the segments that have come since."""
        got: list[int] = []
        reply = self.exchange(link, home, replies.Mapped, records.Segments, until, received=got)
        self._map(link, home, reply.segments, got)

    def post(self, record: records.Record, /) -> None:
        """Send a one-way record some time soon."""
        with self._lock:
            if self.home is not None and len(self._posts) < 1000:
                self._posts.append(record)
        self.nudge()

    def nudge(self) -> None:
        """What has ended goes out with the next request, or with the helper thread's next turn."""
        if not self.wake.is_set():
            self.wake.set()

    def on_ready(self, job: int, call: Callable[[replies.Ready], None], /) -> None:
        """Call (once) when the prefetch of this number has ended."""
        with self._lock:
            early = self._early.pop(job, None)
            if early is None:
                self._jobs[job] = call
        if early is not None:  # another thread has read of the end before this one of the number
            call(early)

    def _until(self, deadline: float | None) -> float:
        return self.now() + self.timeout if deadline is None else deadline

    def _endings(self, home: Home) -> list[records.Record]:
        with self._lock:
            said, self._posts = self._posts, []
        return said + home.endings()

    # -- connecting ----------------------------------------------------------------------------------------

    def connect(self) -> bool:
        """Try once to reach the daemon; True when it is there."""
        with self._connecting:
            if self.home is not None or self._closed:
                return self.home is not None
            try:
                self.join(None, self.now() + max(self.timeout, 0.25))
            except (BackendError, ConfigError, OSError, ValueError) as error:
                self._say(str(error), logging.WARNING)
                return False
            return True

    def join(self, home: Home | None, until: float) -> Link:
        """Open a connection: into the session of ``home``, or the first one."""
        joining = home or self._previous
        link, welcome, received = self._greet(self.address, joining, until)
        if not link.local and welcome.path and self._transfer != "tcp":
            try:
                local = Address(path=welcome.path)
                found, second, received = self._greet(local, joining, until)
                if second.boot != welcome.boot:
                    found.close()
                    raise Unavailable(f"another daemon sits at {local}")
                link.close()
                link, welcome = found, second
            except BackendError as error:
                if not self._token or self._transfer == "shm":
                    link.close()
                    what = f"{error}; a client that cannot reach the daemon's own socket needs its token"
                    raise Unavailable(what) from error
        if not link.local:
            authenticate(link, welcome, self._token, until)
        if home is not None and welcome.boot != home.boot:
            link.close()
            self._lost(home)
            raise Unavailable(f"the daemon at {self.address} has restarted")
        if home is None:
            old = self._previous
            if old is not None and (old.boot, old.session) == (welcome.boot, welcome.session):
                home = old  # the connection was lost, the daemon was not
            else:
                home = Home(welcome.boot, welcome.session, writable=welcome.writable)
                home.follow(old, welcome.granted)
            home.rejoined(welcome.over, welcome.granted)
            if link.local:
                self._map(link, home, welcome.segments, received)
            with self._lock:
                self.home, self.welcome = home, welcome
                self._keep_until = self.now() + _KEEP_S
                self._idle.append(link)
            if self._closed:  # meanwhile
                self._lost(home)
            said = f"daemon {welcome.release} at {self.address} (pid {welcome.pid})"
            self._say(said, logging.INFO)
            self.nudge()
        else:
            for descriptor in received:
                os.close(descriptor)
        return link

    def _greet(
        self, address: Address, home: Home | None, until: float
    ) -> tuple[Link, replies.Welcome, list[int]]:
        session, held = b"", None
        if home is not None:
            session = home.session
            with self._lock:
                if self.home is None and not self._busy:  # no reply is under way to anybody
                    held = home.claim()
        timeout = max(0.001, until - self.now())
        link = Link(address, timeout=timeout, notify=self._notice, late=self._drop)
        return link, *greet(link, self._name, session, held, until)

    def _map(
        self, link: Link, home: Home, segments: Sequence[tuple[int, int, int]], received: list[int]
    ) -> None:
        try:
            home.map(segments, received)
        except (ValueError, OSError) as error:
            raise nonsense(link, f"memory that is none: {error}") from error

    def _lost(self, home: Home) -> None:
        with self._lock:
            if self.home is home:
                self.home, self._previous = None, home
                idle, self._idle = self._idle, []
                for link in idle:
                    link.close()
        self.nudge()

    def shut(self, deadline: float | None = None) -> None:
        """Say what has ended and close every connection."""
        home, until = self.home, self._until(deadline)
        if home is not None and not self._closed:
            with suppress(*NO_ANSWER):
                self._flush(home, until)
        self._closed = True
        if home is not None:
            self._lost(home)
        self.nudge()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, min(1.0, until - self.now())))

    # -- beside calls --------------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._connecting:
            if self._thread is None and not self._closed:
                name, reference = "lmcache-daemon-client", (weakref.ref(self),)
                # daemonic: it must not keep the process
                self._thread = threading.Thread(None, helper, name, reference, daemon=True)
                self._thread.start()

    def help(self, pause: float) -> float:
        """One turn of the helper thread; returns how long to pause before the next."""
        home = self.home
        if home is None:
            self.revive()
            if self.connect():
                return TICK
            return min(RETRY[1], pause * 2) * random.uniform(0.7, 1.3)
        with self._lock:
            if self.home is not None and self.now() > self._keep_until:
                self._previous = None
        with suppress(*NO_ANSWER):
            self._flush(home, self._until(None))
            self._populate(home)
        self.poll()
        return _IDLE_TICK

    def poll(self) -> None:
        """Take what has come unasked, without waiting for anything."""
        for _ in range(len(self._idle)):
            with self._lock:
                home, link = self.home, self._idle.pop(0) if self._idle else None
            if link is None or home is None:
                break
            link.poll()
            if link.failed:
                return self._lost(home)
            with self._lock:
                self._idle.append(link) if home is self.home else link.close()

    def _flush(self, home: Home, until: float) -> None:
        if home.dispatched:  # said until an answer proves that it was heard
            with self.link(until) as (link, now):
                self.exchange(link, now, replies.Done, records.Ping, until)
        said = self._endings(home)
        try:
            if said:
                with self.link(until) as (link, _):
                    link.send([frames(said)], until)
        except NO_ANSWER:
            home.unsaid(said)
            raise

    def _populate(self, home: Home) -> None:
        """Fault in what the daemon has backed, so that no call pays for it."""
        home.populate(lambda: self._closed)
        if any(home.populated.get(n, 0) < size for n, size in home.sizes.items()):
            until = self.now() + self.timeout
            with self.link(until) as (link, now):
                if now is home and link.local:
                    self.fetch(link, home, until)

    def _notice(self, notice: Notice) -> None:
        if isinstance(notice, replies.Ready):
            with self._lock:
                call = self._jobs.pop(notice.job, None)
                if call is None and len(self._early) < 1000:
                    self._early[notice.job] = notice
            if call is not None:
                call(notice)
        elif isinstance(notice, replies.Boot):
            self._say(f"the daemon at {self.address} ends: {notice.reason}", logging.INFO)
        self.nudge()  # a revoke wants what has ended to be said now

    def _drop(self, reply: Reply) -> None:
        """A reply came after its deadline: give back what it grants."""
        if self.home is not None:
            self.home.late(reply)
        self.nudge()

    def _say(self, text: str, level: int) -> None:
        """Log what has changed, once."""
        if text != self._said:
            self._log.log(level, "%s", text)
        self._said = text
