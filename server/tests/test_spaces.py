"""What a daemon says of key spaces stays short however many there are."""

import hashlib
import json
import struct
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from lmcache_server import spaces

from lmcache_core.identity import canonical
from lmcache_core.memory.index import Index
from lmcache_core.observers import Metrics
from lmcache_core.spi import Key

ITEMS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=12,
)


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


def item(tag, body):
    return tag + struct.pack("<I", len(body)) + body


@given(ITEMS, st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3))
def test_whatever_an_engine_calls_its_space_says_something_or_nothing(value, changes):
    """The bytes come from a client, and everybody's ``describe`` reads them."""
    fields = (*spaces._ABOUT, "groups", *spaces._LAYOUT, "layers")
    pairs = b"".join(canonical(name) + canonical(value) for name in fields)
    whole = bytearray(item(b"r", pairs))
    for at, byte in changes:
        whole[at % len(whole)] = byte
    json.dumps(spaces.about(bytes(whole)))
    spaces.about(bytes(whole)[: len(whole) // 2])


@given(st.binary(max_size=60))
def test_noise_is_no_space(noise):
    assert spaces.about(noise) == {}


def test_items_in_items_end_somewhere():
    nested = b""
    for _ in range(20_000):
        nested = item(b"t", nested)
    assert spaces.about(nested) == {}
    assert spaces.about(item(b"r", canonical("groups") + nested)) == {}
