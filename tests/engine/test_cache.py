"""The public object: opened from a configuration, used from coroutines, with what plugins add to keys."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from lmcache_core.engine import Cache, CacheEngine, Forms, Saved
from lmcache_core.identity import KeyManager
from lmcache_core.spi import PLUGIN_API
from tests.engine.rig import ALL, CHUNK, Memory, space, world

PROMPT = list(range(18))
TIERS = [{"memory": {"size": "1MiB"}}]


@dataclass(frozen=True, slots=True)
class Nothing:
    """No options."""


class ByRegion(KeyManager):
    """A key manager that parts requests by one of their labels."""

    plugin_api = PLUGIN_API
    config_type = Nothing

    def __init__(self, config: Nothing) -> None:
        self.config = config

    def fields(self, tags: Mapping[str, str], /) -> Mapping[str, str]:
        return {"region": tags["region"]} if "region" in tags else {}


def keep(engine: CacheEngine, **how: object) -> Saved:
    memory = Memory(ALL, 18)
    memory.compute(PROMPT, 0, 18)
    request = engine.request("a", PROMPT, **how)  # type: ignore[arg-type]
    try:
        return request.store(memory, 18)
    finally:
        request.end()


def found(engine: CacheEngine, **how: object) -> int:
    request = engine.request("b", PROMPT, **how)  # type: ignore[arg-type]
    try:
        return request.lookup()
    finally:
        request.end()


def test_coroutines_use_the_same_verbs_and_the_loop_goes_on() -> None:
    async def serve() -> list[int]:
        with Cache.from_config(chunk_size=CHUNK, tiers=TIERS) as cache:
            engine = cache.engine(Forms(space()))
            assert (await cache.call(keep, engine)).stored == 16
            return list(await asyncio.gather(*(cache.call(found, engine) for _ in range(8))))

    assert asyncio.run(serve()) == [16] * 8


def test_what_was_written_down_is_there_in_the_next_process() -> None:
    with Cache.from_config(chunk_size=CHUNK, tiers=TIERS) as cache:
        keep(cache.engine(Forms(space())))
        assert cache.flush()
        assert [(name, chunks) for name, _, chunks in cache.usage()] == [
            ("staging", 4),
            ("memory", 4),
        ]


def test_a_key_manager_parts_what_its_fields_part() -> None:
    with world() as made:
        engine = CacheEngine(
            made.sync,
            Forms(space()),
            made.config.engine,
            managers={"by-region": ByRegion(Nothing())},
            metrics=made.metrics,
        )
        keep(engine, tags=["region=north"])
        hits = [found(engine, tags=tags) for tags in (["region=north"], ["region=south"], [])]
        assert hits == [16, 0, 0]
        assert found(made.engine(), tags=["region=north"]) == 0


def test_a_configured_key_manager_reaches_every_engine() -> None:
    name = f"{__name__}:ByRegion"
    settings = {"plugins": {"allow_paths": True}, "key_managers": [name]}
    with Cache.from_config(settings, chunk_size=CHUNK, tiers=TIERS) as cache:
        engine = cache.engine(Forms(space()))
        keep(engine, tags=["region=north"])
        assert (found(engine, tags=["region=north"]), found(engine, tags=["region=south"])) == (
            16,
            0,
        )


def test_a_request_may_say_when_its_chunks_may_be_forgotten() -> None:
    with world(lower=True) as made:
        engine = made.engine()
        keep(engine, ttl=1000.0, tenant="kept")
        keep(engine, ttl=0.0, tenant="gone")
        made.sync.flush()
        assert (found(engine, tenant="kept"), found(engine, tenant="gone")) == (16, 0)
