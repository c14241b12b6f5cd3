"""Deletions that a tier does not make at once."""

import pytest

from lmcache_core.spi import Unavailable
from lmcache_core.testing.worlds import put
from tests.storage.test_admin import KEYS, Store, run


@pytest.mark.parametrize("verb", ["delete", "clear"])
def test_a_deletion_that_a_tier_did_not_make_is_said_and_made_later(verb):
    async def body(manager, store):
        put(manager, KEYS)
        await manager.flush()
        store.flaky.failures = [Unavailable("down")]
        first = {"delete": KEYS[:2], "clear": {*KEYS[:2]}.__contains__}[verb]
        with pytest.raises(Unavailable, match="tier disk may still have 2 values to be deleted"):
            await getattr(manager, verb)(first)
        assert (await manager.lookup(KEYS[:3])).leading == 0
        assert all(store.holds())
        assert await manager.delete(KEYS[2:3]) == 2
        assert store.holds() == [False] * 3 + [True] * 5

    run(body, Store())
