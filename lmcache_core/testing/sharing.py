"""What caches over one store promise each other: tests for a tier on a server.

An author writes a subclass with a fixture that starts a server for one test::

    class TestTogether(SharedStoreTests):
        plugin = "mine"

        @pytest.fixture
        def store(self, tmp_path):
            with MyServer(tmp_path) as server:
                yield server
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, Protocol

import pytest

from lmcache_core.config import load
from lmcache_core.spi import Key, Refusal
from lmcache_core.storage.build import build
from lmcache_core.storage.manager import StorageManager
from lmcache_core.storage.results import Reason
from lmcache_core.testing.harness import run_real
from lmcache_core.testing.rig import eventually
from lmcache_core.testing.services import Daemon
from lmcache_core.testing.worlds import (
    closed,
    fill,
    frame_nbytes,
    key_of,
    plain_frame,
    put,
    served,
    verify_lease,
)
from lmcache_core.wire.client import DaemonClient

NBYTES = 50_001
CHUNKS = [key_of(number) for number in range(12)]
DAMAGE: Mapping[str, Callable[[Key], bytes]] = {
    "another key's value": lambda key: plain_frame(key_of(99), NBYTES),
    "garbage": lambda key: b"garbage" * 5000,
    "a byte short": lambda key: plain_frame(key, NBYTES)[:-1],
    "flipped": lambda key: plain_frame(key, NBYTES)[:-9] + b"flipped!?",
    "nothing": lambda key: b"",
}


class SharedStore(Protocol):
    """A server with nothing on it.

    Attributes:
        options: of a tier there, as a configuration file says them.
    """

    options: Mapping[str, object]

    def spoil(self, key: Key, content: bytes) -> None:
        """Put this in the place of a value; where nothing empty can be kept, something that is no value for b""."""

    def suspend(self) -> None: ...
    def resume(self) -> None: ...


class SharedStoreTests:
    """Hits are shared, damage is a miss that heals, and a server that hangs costs no more than the deadline.

    Attributes:
        plugin: name of the backend.
    """

    plugin: ClassVar[str]

    def settings(self, store: SharedStore, deadline: str, *above: object) -> dict[str, object]:
        """A configuration: this tier below others."""
        tiers = [*above, {self.plugin: {**store.options, "deadline": deadline}}]
        return {"tiers": tiers, "manager": {"cost_gate": False}}

    async def cache(self, store: SharedStore, deadline: str = "5s") -> StorageManager:
        """One more cache over the store."""
        found = load(env={}, flags=self.settings(store, deadline))
        return await build(found.config, found.registry)

    def test_what_one_cache_stores_another_serves(self, store: SharedStore) -> None:
        async def main() -> None:
            first, second = [await self.cache(store) for _ in range(2)]
            assert all(put(first, CHUNKS, NBYTES))
            await first.flush()
            assert (await second.lookup(CHUNKS)).leading == len(CHUNKS)
            assert await served(second, CHUNKS) == (len(CHUNKS), Reason.COMPLETE)
            await closed(first, second)

        run_real(main(), 30.0)

    def test_damage_is_a_miss_and_is_stored_anew(self, store: SharedStore) -> None:
        spoiled = dict(zip(CHUNKS, DAMAGE, strict=False))

        async def main() -> None:
            first = await self.cache(store)
            assert all(put(first, CHUNKS, NBYTES))
            await first.flush()
            await closed(first)
            for key, how in spoiled.items():
                store.spoil(key, DAMAGE[how](key))
            second = await self.cache(store)
            for key, how in spoiled.items():
                assert (await served(second, [key]))[0] == 0, how

            async def removed() -> bool:
                return not second.tiers[0].bad

            await eventually(removed)
            assert all(put(second, list(spoiled), NBYTES))
            await second.flush()
            await closed(second)
            third = await self.cache(store)
            assert await served(third, CHUNKS) == (len(CHUNKS), Reason.COMPLETE)
            await closed(third)

        run_real(main(), 30.0)

    @pytest.mark.slow
    def test_hanging_server_costs_no_more_than_the_deadline(self, store: SharedStore) -> None:
        """Seen in LMCache#1964."""

        async def main() -> None:
            first = await self.cache(store)
            assert all(put(first, CHUNKS, NBYTES))
            await first.flush()
            second = await self.cache(store, "0.3s")
            store.suspend()
            loop = asyncio.get_running_loop()
            for _ in range(3):
                began = loop.time()
                assert (await served(second, CHUNKS))[0] == 0
                assert loop.time() - began < 1.0

            async def returned() -> bool:
                return second.tiers[0].quarantine.nbytes == 0

            await eventually(returned)  # while it still hangs
            store.resume()

            async def back() -> bool:
                return (await served(second, CHUNKS))[0] == len(CHUNKS)

            await eventually(back)
            await closed(first, second)

        run_real(main(), 30.0)

    @pytest.mark.slow
    def test_two_daemons_share_hits(self, store: SharedStore, tmp_path: Path) -> None:
        """Seen in LMCache#3387."""
        settings = self.settings(store, "10s", {"cpu": {"size": "64MiB"}})
        with Daemon(tmp_path / "a", settings) as one, Daemon(tmp_path / "b", settings) as two:
            first, second = (DaemonClient(each.path, timeout=10) for each in (one, two))
            reserved = first.reserve([(key, frame_nbytes(NBYTES)) for key in CHUNKS], None)
            held = [each for each in reserved if not isinstance(each, Refusal)]
            assert len(held) == len(CHUNKS)
            assert all(first.commit_batch(held, [fill(each) for each in held]))
            first.flush()
            loaded = second.load(CHUNKS, None)
            assert len(loaded.leases) == len(CHUNKS)
            for lease in loaded.leases:
                verify_lease(lease)
            second.release(loaded.leases)
            first.close()
            second.close()
