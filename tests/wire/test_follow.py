"""Who follows the changes knows the contents of memory and of local tiers at any time."""

import random
from functools import partial

import pytest

from lmcache_core.storage.feed import Feed
from lmcache_core.wire import records, replies
from lmcache_core.wire.codec import to_keys
from tests.wire.daemons import Daemon, key, store, wait_for

TIERS = ["cpu", "disk"]


class Follower:
    """Contents built from changes alone, as a router builds them."""

    def __init__(self, client):
        self.client = client
        self.tiers = {}
        self.anew()

    def anew(self):
        """The number first: what changes while the tiers are listed is told again."""
        self.next = self.client.ask(replies.Changed, records.Follow).next
        self.tiers = {tier: set(listed(self.client, tier)) for tier in TIERS}

    def follow(self, limit=1000):
        while True:
            asked = self.next
            found = self.client.ask(
                replies.Changed, partial(records.Follow, since=asked, limit=limit)
            )
            if found.lost:
                return False
            for change in found.changes:
                held = self.tiers.setdefault(change.tier, set())
                keys = {each.text for each in to_keys(change.runs)}
                held.update(keys) if change.there else held.difference_update(keys or set(held))
            self.next = found.next
            if found.next == asked:
                return True


def listed(client, tier):
    after = None
    while True:
        page = client.ask(replies.Values, partial(records.List, tier=tier, after=after))
        yield from page.keys
        if (after := page.after) is None:
            return


def agrees(follower):
    assert follower.follow()
    return follower.tiers == {tier: set(listed(follower.client, tier)) for tier in TIERS}


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def daemon(folder, *flags):
    disk = ("--l2-disk-path", str(folder / "kv"), "--l2-disk-size-gb", "0.004")
    return Daemon(folder, "--arena-mode", "shared-rw", *disk, *flags, size="0.002")


def test_contents_follow_from_the_changes_whatever_happens(folder):
    """Seen in LMCache#5076, llm-d/llm-d-kv-cache#372, where removals were not told or parents were unknown."""
    draw = random.Random(7)
    with daemon(folder) as served:
        client = served.client(timeout=5)
        follower = Follower(client)
        for number in range(60):
            what = draw.random()
            numbers = draw.sample(range(80), 4)
            if what < 0.7:
                store(client, *numbers, nbytes=draw.choice([4096, 65536]))
            elif what < 0.9:
                client.delete([key(each) for each in numbers])
            else:
                client.ask(
                    replies.Count, lambda id: records.Clear(id, 5.0, tier=draw.choice(TIERS))
                )
            assert follower.follow()
            if number % 10 == 0:
                client.flush()
                wait_for(lambda: agrees(follower), what="equal contents")
        client.flush()
        wait_for(lambda: agrees(follower), what="equal contents")
        assert follower.tiers["disk"]
        client.ask(replies.Done, lambda id: records.Tier(id, "disk", "remove"))
        assert follower.follow()
        assert follower.tiers["disk"] == set()
        client.close()
    with daemon(folder) as served:
        client = served.client(timeout=5)
        fresh = Follower(client)
        wait_for(lambda: agrees(fresh), what="what a restart finds is told")
        assert fresh.tiers["disk"]
        client.close()


def test_who_is_too_far_behind_is_told_and_starts_anew(folder):
    with daemon(folder, "--kv-event-log-size", "16") as served:
        client = served.client(timeout=5)
        follower = Follower(client)
        store(client, *range(20), nbytes=4096)
        client.flush()
        assert not follower.follow()
        follower.anew()
        assert follower.follow(limit=3)
        wait_for(lambda: agrees(follower), what="equal contents")
        ahead = client.ask(replies.Changed, lambda id: records.Follow(id, follower.next + 1))
        assert ahead.lost  # a number of another boot
        client.close()


def test_changes_are_kept_up_to_the_size():
    feed = Feed(3)
    watch = feed.watch("cpu")
    for number in range(5):
        watch(key(number), True)
    assert feed.next == 5
    assert feed.since(1, 10) is None
    assert feed.since(6, 10) is None
    assert [each.key for each in feed.since(2, 2)] == [key(2), key(3)]
    assert feed.since(5, 10) == []
