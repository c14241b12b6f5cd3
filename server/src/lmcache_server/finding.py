"""Where values are: from memory at once, from other tiers as a coroutine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_core.spi import Key
from lmcache_core.storage.manager import StorageManager
from lmcache_core.storage.results import Lookup, Place
from lmcache_core.wire import records, replies
from lmcache_core.wire.codec import Reply, to_keys
from lmcache_server.session import Session

if TYPE_CHECKING:
    from lmcache_server.connection import Connection
    from lmcache_server.daemon import Daemon
    from lmcache_server.verbs import Answer


def find(daemon: Daemon, link: Connection, session: Session, ask: records.Find) -> Answer:
    keys, manager = to_keys(ask.keys), daemon.manager
    lookup = in_memory(manager, keys)
    if lookup is not None:
        return found(ask.id, lookup)

    async def work() -> Reply:
        deadline = daemon.now() + ask.seconds
        return found(ask.id, await manager.lookup(keys, deadline=deadline, tokens=ask.tokens))

    return work()


def in_memory(manager: StorageManager, keys: Sequence[Key]) -> Lookup | None:
    """Where values are, as far as memory alone can tell; None where other tiers have to be asked."""
    there, name = manager.lookup_resident(keys), manager.context.tier
    if None in there and manager.tiers:
        return None
    return Lookup(tuple(None if n is None else Place(name, n) for n in there))


def found(id: int, lookup: Lookup) -> replies.Found:
    tiers = list(dict.fromkeys(place.tier for place in lookup.places if place is not None))
    return replies.Found(
        id,
        tiers,
        [-1 if place is None else tiers.index(place.tier) for place in lookup.places],
        [0 if place is None else place.nbytes for place in lookup.places],
        list(lookup.unanswered),
    )
