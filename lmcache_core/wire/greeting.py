"""The first words of a connection: hello, welcome, and the proof that a token is known."""

from __future__ import annotations

import hmac
import os

from lmcache_core.identity import probe_digest
from lmcache_core.spi.errors import BackendError, ConfigError, Unavailable
from lmcache_core.wire import records, replies
from lmcache_core.wire.link import Link


def greet(
    link: Link, name: str, session: bytes, held: list[int] | None, until: float, /
) -> tuple[replies.Welcome, list[int]]:
    """Say hello; returns the welcome and the descriptors that came with it. Closes the link when it fails.

    Args:
        session, held: to join a session; see ``records.Hello``.

    Raises:
        Unavailable, DeadlineExceeded, BackendError: no welcome that we can go on with.
    """
    received: list[int] = []
    descriptors = [os.pidfd_open(os.getpid())] if link.local else []
    try:
        reply = link.call(
            lambda id: records.Hello(
                id, records.VERSION, probe_digest(), os.getpid(), list(records.CAPABILITIES),
                session, held, name,
            ),
            until, descriptors=descriptors, received=received if link.local else None,
        )  # fmt: skip
    except BaseException:
        link.close()
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    if isinstance(reply, replies.Failed):
        link.close()
        raise refused(reply)
    if not isinstance(reply, replies.Welcome) or reply.version != records.VERSION:
        raise nonsense(link, "no welcome of this version of the protocol")
    if reply.probe != probe_digest():
        raise nonsense(link, "keys made by other rules; both sides need one release")
    return reply, received


def authenticate(link: Link, welcome: replies.Welcome, token: bytes, until: float, /) -> None:
    """Prove that we know the token.

    Raises:
        BackendError: we do not.
    """
    if not welcome.challenge or not token:
        link.close()
        raise Unavailable("the daemon serves only clients with its token")
    mac = hmac.digest(token, welcome.challenge + welcome.boot, "sha256")
    reply = link.call(lambda id: records.Auth(id, mac), until)
    if isinstance(reply, replies.Failed):
        link.close()
        raise refused(reply)


def nonsense(link: Link, what: str, /) -> Unavailable:
    """An answer that breaks the protocol ends the connection."""
    link.close()
    return Unavailable(f"the daemon sent {what}")


def refused(reply: replies.Failed, /) -> Exception:
    """The error that a ``failed`` stands for."""
    if reply.kind == "config":
        return ConfigError(reply.message)
    return Unavailable(reply.message) if reply.kind == "closed" else BackendError(reply.message)
