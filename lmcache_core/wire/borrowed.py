"""A connection for one exchange, as what stands behind ``with``: a generator there would cost every call 5 us."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_core.wire.grants import Home
from lmcache_core.wire.link import Link

if TYPE_CHECKING:
    from lmcache_core.wire.connection import Connections


class Borrowed:
    """A connection and the life of the daemon it belongs to; given back at the end, with what went wrong.

    Raises:
        Unavailable: there is no daemon just now; costs nothing.
    """

    __slots__ = ("_begun", "_client", "_home", "_link", "_until")

    def __init__(self, client: Connections, until: float) -> None:
        self._client = client
        self._until = until

    def __enter__(self) -> tuple[Link, Home]:
        client, self._begun = self._client, self._client.now()
        link, self._home = client.borrow(self._begun)
        try:
            self._link = client.join(self._home, self._until) if link is None else link
        except BaseException as error:
            client.give_back(None, self._home, self._begun, error)
            raise
        return self._link, self._home

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._client.give_back(self._link, self._home, self._begun, error)
