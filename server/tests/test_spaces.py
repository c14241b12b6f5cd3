"""What a daemon says of key spaces stays short however many there are."""

import hashlib
from types import SimpleNamespace

from lmcache_server import spaces

from lmcache_core.memory.index import Index
from lmcache_core.observers import Metrics
from lmcache_core.spi import Key


def space(number):
    return hashlib.sha256(bytes([number])).digest()


def daemon_with(count):
    """A stand-in for what these functions read: ``count`` spaces, the last ones with the longest values."""
    index, lower = Index(), Index()
    for number in range(count):
        key = Key(space(number), bytes(32))
        index.add(key, 100 + number)
        lower.add(key, 10)
    tier = SimpleNamespace(name="disk", holdings=SimpleNamespace(index=lower))
    shared = SimpleNamespace(name="far", holdings=None)
    manager = SimpleNamespace(
        context=SimpleNamespace(tier="cpu"), pool=SimpleNamespace(index=index),
        tiers=[tier, shared], metrics=Metrics(),
    )  # fmt: skip
    return SimpleNamespace(
        manager=manager, pins=SimpleNamespace(nbytes=4096), engines=SimpleNamespace(by_name={})
    )


def test_few_spaces_are_told_one_by_one():
    found = spaces.held(daemon_with(2))
    assert found[space(1).hex()] == {"cpu": [[0, 1, 101]], "disk": [[0, 1, 10]]}
    assert len(spaces.document(daemon_with(2))) == 2


def test_the_smallest_of_many_spaces_are_told_as_one():
    daemon = daemon_with(spaces.SHOWN + 3)
    found = spaces.held(daemon)
    assert len(found) == spaces.SHOWN + 1
    assert found[spaces.OTHER] == {"cpu": [[0, 3, 100 + 101 + 102]], "disk": [[0, 3, 30]]}
    spaces.gauges(daemon)
    snapshot = daemon.manager.metrics.snapshot()
    names = {sample.name for sample in snapshot}
    assert names == {"lmcache_memory_pinned_bytes", "lmcache_space_bytes", "lmcache_space_chunks"}
    assert snapshot.total("lmcache_space_chunks", tier="cpu") == spaces.SHOWN + 3
    assert snapshot.total("lmcache_space_chunks", tier="disk", space=spaces.OTHER) == 3


def test_gauges_of_a_space_that_is_gone_are_gone():
    daemon = daemon_with(1)
    spaces.gauges(daemon)
    daemon.manager.pool.index.remove(0)
    spaces.gauges(daemon)
    snapshot = daemon.manager.metrics.snapshot()
    assert [sample.labels for sample in snapshot if sample.name == "lmcache_space_bytes"] == [
        (("tier", "disk"), ("space", space(0).hex()[:12]))
    ]
