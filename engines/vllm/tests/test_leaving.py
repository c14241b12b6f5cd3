"""What routers are told of chunks that the cache has no more."""

import pytest
from lmcache_engine_vllm.leaving import Leaving

from lmcache_core.wire import records, replies
from tests.wire.daemons import SPACE, Daemon, key, store, wait_for


@pytest.fixture
def client(daemon):
    found = daemon.client(timeout=5)
    yield found
    found.delete([key(number) for number in range(8)])
    found.close()


def test_a_chunk_that_is_nowhere_any_more_is_told_once(client):
    """Seen in LMCache#5076: routers believed what had been stored to be there for ever."""
    leaving = Leaving(client, lambda: SPACE)
    leaving.follow()
    store(client, 1, 2, 3)
    leaving.follow()
    assert leaving.taken() == ([], False)
    client.delete([key(1), key(3)])
    store(client, 3)
    leaving.follow()
    assert leaving.taken() == ([key(1).digest], False)
    leaving.follow()
    assert leaving.taken() == ([], False)
    leaving.close()


def test_other_spaces_and_unknown_ones_are_passed_over(client):
    for space in (b"", bytes(32)):
        leaving = Leaving(client, lambda space=space: space)
        leaving.follow()
        store(client, 4)
        client.delete([key(4)])
        leaving.follow()
        assert leaving.taken() == ([], False)
        leaving.close()


def test_what_a_lower_tier_still_has_is_not_gone(tmp_path):
    disk = ("--l2-disk-path", str(tmp_path / "kv"), "--l2-disk-size-gb", "0.01")
    with Daemon(tmp_path, "--arena-mode", "shared-rw", *disk) as daemon:
        client = daemon.client(timeout=5)
        leaving = Leaving(client, lambda: SPACE)
        leaving.follow()
        store(client, 1)
        client.flush()
        client.ask(replies.Count, lambda id: records.Clear(id, 5.0, tier="cpu"))
        leaving.follow()
        assert leaving.taken() == ([], False)
        client.ask(replies.Count, lambda id: records.Clear(id, 5.0))
        leaving.follow()
        assert leaving.taken() == ([key(1).digest], False)
        leaving.close()
        client.close()


def test_another_boot_of_the_daemon_and_a_gap_are_told(tmp_path):
    with Daemon(tmp_path, "--arena-mode", "shared-rw", "--kv-event-log-size", "4") as daemon:
        client = daemon.client(timeout=5)
        leaving = Leaving(client, lambda: SPACE)
        leaving.follow()
        store(client, *range(8))
        leaving.follow()
        assert leaving.taken() == ([], True)
        boot = client.home.boot
        daemon.kill()
        leaving.follow()  # nobody answers
        daemon.start()
        wait_for(lambda: client.home is not None and client.home.boot != boot)
        leaving.follow()
        assert leaving.taken() == ([], True)
        leaving.close()
        client.close()
