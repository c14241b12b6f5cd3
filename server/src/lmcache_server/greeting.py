"""What comes before a session: hello, and the proof that a token is known."""

from __future__ import annotations

import hmac
import os
import secrets
from typing import TYPE_CHECKING

from lmcache_core.memory.leases import OwnerProcess
from lmcache_core.wire import records, replies
from lmcache_server.session import Session, pidfd_of

if TYPE_CHECKING:
    from lmcache_server.connection import Connection


def greet(link: Connection, record: records.Record, /) -> None:
    """Serve the two records that come before a session."""
    if isinstance(record, records.Auth) and link.pending is not None:
        expected = hmac.digest(
            link.daemon.options.token.reveal().encode(),
            link.challenge + link.daemon.boot,
            "sha256",
        )
        link.challenge = b""  # one try
        if not hmac.compare_digest(expected, record.mac):
            link.daemon.refuse(link.peer, "wrong token")
            link.reply(replies.Failed(record.id, "denied", "wrong token"))
            link.close()
            return
        _enter(link, link.pending)
        link.reply(replies.Done(record.id))
        return
    if not isinstance(record, records.Hello):
        id = record.id if isinstance(record, records.Message) else 0
        link.daemon.refuse(link.peer, f"{type(record).__name__.lower()} before hello")
        link.reply(replies.Failed(id, "denied", "say hello first; without the token that is all"))
        link.close()
        return
    welcome = link.daemon.welcome(record.id)
    if record.version != records.VERSION or record.probe != welcome.probe:
        link.reply(welcome)  # it says itself what differs
        link.close()
        return
    if link.local:
        session = _local_session(link, record, welcome)
        if session is None:
            link.reply(replies.Failed(record.id, "denied", "no pidfd of this process to be had"))
            link.close()
            return
        welcome.granted = link.daemon.sessions.granted
        _enter(link, session)
        welcome.session = session.token
        welcome.segments, descriptors = link.daemon.segments(0)
        link.reply(welcome, descriptors=descriptors)
    else:
        if link.daemon.options.token:
            link.challenge = welcome.challenge = secrets.token_bytes(32)
            known = link.daemon.sessions.by_token.get(record.session)
            if known is None or known.process is not None:
                known = Session(secrets.token_bytes(16), record.name, None, record.pid)
            link.pending = known
            welcome.session = known.token
        link.reply(welcome)


def _local_session(
    link: Connection, hello: records.Hello, welcome: replies.Welcome
) -> Session | None:
    """The session of a process of this node, with the proof of its end; None where no proof is to be had."""
    sessions = link.daemon.sessions
    session = sessions.find(hello.session, link.pid or hello.pid) if hello.session else None
    if session is not None:
        if hello.held is not None:
            for old in list(session.connections):
                old.close()  # it has none left: what it said there last nobody would hear answered
            welcome.over = sessions.reclaim(session, hello.held)
        if session.token not in sessions.by_token:  # it held nothing else and was over
            session = None
    if session is None:
        pidfd = pidfd_of(link.socket, link.pid, link.pidfds)
        if pidfd < 0:
            return None
        try:
            process = OwnerProcess(pidfd, hello.name)
        except ValueError:
            os.close(pidfd)
            raise
        session = sessions.open(hello.name, process, link.pid or hello.pid)
        link.daemon.watch(session)
    for descriptor in link.pidfds:
        os.close(descriptor)
    link.pidfds.clear()
    return session


def _enter(link: Connection, session: Session) -> None:
    link.session = session
    link.overdue.cancel()
    link.daemon.sessions.by_token.setdefault(session.token, session)
    session.connections.add(link)
