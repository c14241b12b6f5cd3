"""Who holds what: sessions of client processes, and the proof of their end.

A session belongs to one process and may have several connections. When the last one closes, service ends and
nothing else: what the process reserved goes to quarantine, what it leased stays, until it says so itself on a
new connection, or until its pidfd proves that it is gone. Clients that only stream have no memory to touch.

What comes to an end is the session's no more at once; thousands of values are given back in slices, a turn each.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from lmcache_core.memory.leases import Held, OwnerProcess
from lmcache_core.memory.pool import Pool
from lmcache_core.spi import Lease, Reservation
from lmcache_core.storage.manager import StorageManager
from lmcache_server.slices import MANY, MANY_WRITTEN, Joined, in_parts, in_turns

if TYPE_CHECKING:
    from lmcache_server.connection import Connection

_PEERPIDFD = 77  # SO_PEERPIDFD, Linux 6.5


class Shared(Protocol):
    """A reservation that several processes fill."""

    held: Held

    def abort(self, session: Session, /) -> None: ...
    def leave(self, session: Session, /) -> None: ...


class Session:
    """One client process. Also the owner of what it holds, as the pool sees it.

    Attributes:
        process: proof of its end; None for a client that only streams.
        leases, reservations: what was granted, by number.
        jobs: prefetches under way.
    """

    def __init__(self, token: bytes, name: str, process: OwnerProcess | None, pid: int) -> None:
        self.token = token
        self.name = name
        self.process = process
        self.pid = pid
        self.connections: set[Connection] = set()
        self.leases: dict[int, Sequence[Lease | None]] = {}
        self.reservations: dict[int, Reservation | Shared] = {}
        self.jobs = 0
        self.early: deque[int] = deque(maxlen=1000)
        """Releases of unknown leases: a rank may be done before the dispatch to it was read."""

    @property
    def empty(self) -> bool:
        return not self.leases and not self.reservations

    def __repr__(self) -> str:
        return f"Session({self.name!r})"


class Sessions:
    """All sessions of a daemon.

    Args:
        ended: told when a session is over.

    Attributes:
        granted: number of the last grant.
    """

    def __init__(self, manager: StorageManager, ended: Callable[[Session], None]) -> None:
        self.manager = manager
        self.by_token: dict[bytes, Session] = {}
        self._unread: dict[int, tuple[Session, int]] = {}
        self._ended = ended
        # Random, so that a number of an earlier boot never names something of this one.
        self.granted = secrets.randbits(40) << 20

    @property
    def pool(self) -> Pool:
        return self.manager.pool

    def __len__(self) -> int:
        return len(self.by_token)

    @property
    def connected(self) -> int:
        return sum(bool(session.connections) for session in self.by_token.values())

    def number(self) -> int:
        """A number for a new grant."""
        self.granted += 1
        return self.granted

    def find(self, token: bytes, pid: int) -> Session | None:
        """The session a process may join: its own."""
        session = self.by_token.get(token)
        return session if session is not None and session.pid == pid else None

    def open(
        self, name: str, process: OwnerProcess | None, pid: int, token: bytes = b""
    ) -> Session:
        token = token or secrets.token_bytes(16)
        session = self.by_token[token] = Session(token, name, process, pid)
        return session

    def reclaim(self, session: Session, held: Iterable[int]) -> list[int]:
        """A client that joins alone says what it still uses; the rest is over, but for what ranks have not read yet.

        Returns the leases that are.
        """
        keep = {*held, *(grant for grant, (owner, _) in self._unread.items() if owner is session)}
        over = [grant for grant in session.leases if grant not in keep]
        self.release(session, over)
        self.abort(session, [grant for grant in session.reservations if grant not in keep])
        return over

    def release(
        self, session: Session, grants: Iterable[int], parts: Iterable[tuple[int, list[int]]] = ()
    ) -> None:
        """End leases; unknown numbers are ignored."""
        for grant in grants:
            leases = session.leases.pop(grant, None)
            if leases is not None:
                self.end(leases)
            elif not self._read(grant):
                session.early.append(grant)
        for grant, positions in parts:
            leases = session.leases.get(grant)
            if leases is not None:
                self.manager.release([leases[at] for at in positions if at < len(leases)])
        self._forget_if_over(session)

    def end(self, leases: Sequence[Lease | None]) -> None:
        """End leases; those that were granted in slices end in slices."""
        if isinstance(leases, Joined):
            leases.end(self.manager.release)
        else:
            self.manager.release(leases)

    def share(self, leases: Sequence[Lease | None], owner: Session) -> Sequence[Lease | None]:
        """The same leases for another session."""
        if isinstance(leases, Joined):
            return leases.again(lambda part: self.pool.share(part, owner))
        return self.pool.share(leases, owner)

    def undelivered(self, session: Session, grant: int, ranks: int) -> None:
        """Leases were dispatched while ranks were away: they stay where they are until so many have read."""
        ranks -= sum(grant in each.early for each in self.by_token.values())
        self._unread[grant] = (session, max(1, ranks))
        if ranks < 1:
            self._read(grant)

    def waits(self, grant: int) -> bool:
        """Whether leases wait for ranks to read them."""
        return grant in self._unread

    def _read(self, grant: int) -> bool:
        """A rank has released leases that were not delivered to it."""
        session, left = self._unread.pop(grant, (None, 0))
        if session is None:
            return False
        if left > 1:
            self._unread[grant] = (session, left - 1)
        elif (leases := session.leases.pop(grant, None)) is not None:
            self.end(leases)
        return True

    def abort(self, session: Session, grants: Iterable[int]) -> None:
        """End reservations; unknown numbers are ignored."""
        self._abort(session, [session.reservations.pop(grant, None) for grant in grants])
        self._forget_if_over(session)

    def closed(self, session: Session, connection: Connection) -> None:
        """A connection has closed; with the last one service ends."""
        session.connections.discard(connection)
        if session.connections or session.token not in self.by_token:
            return
        if session.process is None:
            self._end(session)
            return
        in_turns(self.pool.closing(session, proof=False, most=MANY))
        shared = [held for held in session.reservations.values() if not isinstance(held, Held)]
        in_turns(in_parts(lambda held: held.leave(session), shared, MANY_WRITTEN))  # type: ignore[union-attr]
        self._forget_if_over(session)

    def gone(self, session: Session) -> None:
        """The process has ended: everything comes back."""
        assert session.process is not None and session.process.gone()
        for connection in list(session.connections):
            connection.close()
        self._end(session)

    def _end(self, session: Session) -> None:
        if self.by_token.pop(session.token, None) is None:
            return
        held = [*session.reservations.values()]
        session.leases.clear()
        session.reservations.clear()
        self._unread = {g: each for g, each in self._unread.items() if each[0] is not session}
        self._ended(session)
        in_turns(self.pool.closing(session, proof=True, most=MANY))
        self._abort(session, held)

    def _abort(self, session: Session, reservations: Sequence[Reservation | Shared | None]) -> None:
        def abort(held: Reservation | Shared | None) -> None:
            if isinstance(held, Held):
                self.manager.abort(held)
            elif held is not None:
                held.abort(session)  # type: ignore[union-attr]

        in_turns(in_parts(abort, reservations, MANY_WRITTEN))

    def _forget_if_over(self, session: Session) -> None:
        if not session.connections and session.empty:
            self._end(session)


def pidfd_of(connection: socket.socket, pid: int, sent: list[int], /) -> int:
    """A pidfd of the peer, -1 where there is none: from the kernel, or (from another namespace) as ``sent``."""
    with suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _PEERPIDFD)
    with suppress(OSError):
        if pid:
            return os.pidfd_open(pid)
    return sent.pop() if sent else -1
