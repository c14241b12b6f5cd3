"""Pools and keys for the tests of memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from lmcache_core.memory.arena import Access, Arena
from lmcache_core.memory.leases import Held
from lmcache_core.memory.pool import Pool
from lmcache_core.policies.lru import LRU, LRUConfig
from lmcache_core.spi import Key, MemoryOptions, Refusal

PAGE = 4096
IDENTITY = bytes(range(16))
LAZY = MemoryOptions(populate=False)
SPACE = hashlib.sha256(b"space").digest()


def key(number: int, space: bytes = SPACE) -> Key:
    return Key(space, hashlib.sha256(b"%d" % number).digest(), 0)


def keys(start: int, stop: int) -> list[Key]:
    return [key(number) for number in range(start, stop)]


def make_arena(capacity: int, **arena_options: Any) -> Arena:
    arena_options = {"access": Access.PRIVATE, **arena_options}
    return Arena(capacity, arena_options.pop("options", LAZY), **arena_options)


def make_pool(capacity: int, *, segment_nbytes: int | None = None, **pool_options: Any) -> Pool:
    """A pool without threads in private memory, with the default policy."""
    policy = LRU(LRUConfig(), capacity)
    return Pool(make_arena(capacity, segment_nbytes=segment_nbytes), policy, **pool_options)


def put(
    pool: Pool, wanted: Sequence[Key], nbytes: int = PAGE, owner: object = "writer", **how: Any
) -> list[bool]:
    """Reserve, fill with a byte drawn from the key, commit; False for what was refused."""
    dirty, tags, expires = how.pop("dirty", False), how.pop("tags", ()), how.pop("expires", None)
    answers = pool.reserve([(each, nbytes) for each in wanted], owner, **how)
    granted = [answer for answer in answers if isinstance(answer, Held)]
    for held in granted:
        held.view[:] = content(held.key, nbytes)
    done = pool.commit_batch(
        granted, [IDENTITY] * len(granted), dirty=dirty, tags=tags, expires=expires
    )
    assert all(done)
    return [isinstance(answer, Held) for answer in answers]


def content(wanted: Key, nbytes: int) -> bytes:
    """The only right bytes of a key."""
    return wanted.digest[:1] * nbytes


def held(answer: Held | Refusal) -> Held:
    """An answer that must be a grant."""
    assert isinstance(answer, Held), answer
    return answer


def here(pool: Pool, wanted: Sequence[Key]) -> list[bool]:
    """Which values are visible."""
    return [length is not None for length in pool.lengths(wanted)]
