"""Values that follow a reply over the connection."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core import frame
from lmcache_core.spi.keys import Key
from lmcache_core.wire.codec import to_extents
from lmcache_core.wire.grants import IDENTITY, Spare
from lmcache_core.wire.greeting import nonsense
from lmcache_core.wire.link import Link
from lmcache_core.wire.records import MOST_VALUE
from lmcache_core.wire.replies import Granted


def take(
    link: Link, reply: Granted, keys: Sequence[Key], spare: Spare, until: float, /, *, verify: bool
) -> list[memoryview]:
    """Read all values of a reply and return the good leading ones.

    Args:
        verify: compare digests: what TCP adds up lets too much pass.

    Raises:
        Unavailable, DeadlineExceeded: they did not come; the connection has failed.
    """
    extents = to_extents(reply.extents)
    if sum(extent.nbytes for extent in extents) > MOST_VALUE:
        raise nonsense(link, "values of more bytes than there may be")
    values = [spare.take(extent.nbytes) for extent in extents]
    for value in values:
        link.read_into(value, until)
    if verify:
        for at, (value, key) in enumerate(zip(values, keys, strict=False)):
            identity = reply.identities[IDENTITY * at : IDENTITY * (at + 1)]
            if not frame.intact(value, key, identity):
                return values[:at]
    return values
