"""Values that expire: at their time, and not a restart or a power loss later."""

import os
import stat

import pytest
from lmcache_backend_disk import FsBackend
from lmcache_backend_disk.config import Sync

from lmcache_core.spi import PRESENT, STORED, LoadStatus
from lmcache_core.testing.files import SimCrash, SimDisk

MINUTE, YEAR = 60.0, 365.25 * 86400


def test_a_value_is_there_until_its_time_and_not_after(rig):
    assert rig.store(0, ttl=MINUTE) == STORED
    rig.keep(1)
    rig.clock.at += MINUTE - 1
    assert [found is not None for found in rig.lookup(0, 1)] == [True, True]
    assert rig.lookup(0)[0].expires == pytest.approx(rig.clock.now() + 1)
    assert rig.get(0) == rig.value(0)
    rig.clock.at += 1
    assert [found is not None for found in rig.lookup(0, 1)] == [False, True]
    assert rig.load(0)[0].status is LoadStatus.MISSED


def test_a_restart_does_not_revive_an_expired_value(rig):
    rig.store(0, ttl=MINUTE)
    rig.store(1, ttl=YEAR)
    rig.keep(2)
    rig.close()
    rig.clock.at += 2 * MINUTE
    again = rig.again()
    assert [found is not None for found in again.lookup(0, 1, 2)] == [False, True, True]
    assert again.load(0)[0].status is LoadStatus.MISSED
    assert again.get(1) == rig.value(1)


def test_the_books_learn_of_expired_values_so_that_they_are_removed(rig):
    rig.store(0, ttl=MINUTE)
    rig.clock.at += 2 * MINUTE
    ((key, found),) = rig.backend._scan(None, 10).values
    assert key == rig.key(0)
    assert found.expires == pytest.approx(rig.clock.now() - MINUTE)
    assert rig.backend._usage().values == 1
    rig.delete(0)
    assert rig.backend._usage().values == 0


@pytest.mark.parametrize("path", ["/kv", ("/a", "/b")])
def test_an_expired_value_gives_way_to_a_new_one(new_rig, path):
    rig = new_rig(path=path).open()
    for number in range(8):
        rig.store(number, ttl=MINUTE)
    wider = rig
    if path != "/kv":  # found in the other folder, too
        rig.close()
        wider = rig.again(path=("/b", "/a"))
    assert wider.store(0) == PRESENT
    rig.clock.at += MINUTE
    for number in range(8):
        assert wider.store(number) == STORED
        assert wider.get(number) == rig.value(number)
    assert wider.backend._usage().values == 8


def test_a_longer_life_does_not_replace_a_value_that_is_there(rig):
    rig.store(0, ttl=MINUTE)
    assert rig.store(0, ttl=YEAR) == PRESENT
    rig.clock.at += MINUTE
    assert rig.lookup(0) == [None]


@pytest.mark.parametrize("ttl", [60 * YEAR, float("inf")])
def test_what_lives_longer_than_can_be_told_does_not_expire(rig, ttl):
    assert rig.store(0, ttl=ttl) == STORED
    rig.clock.at += 20 * YEAR
    assert rig.lookup(0)[0].expires is None


def test_a_clock_that_was_never_set_costs_values_and_serves_no_old_ones(rig):
    rig.clock.at = 0.0
    rig.keep(0)
    assert rig.get(0) == rig.value(0)
    rig.clock.at = 2e9
    assert rig.lookup(0) == [None]
    assert rig.store(0) == STORED


def test_a_clock_that_jumps_takes_only_what_has_a_time(rig):
    rig.store(0, ttl=MINUTE)
    for number, jump in enumerate((0.0, YEAR, -YEAR, -20 * YEAR, 20 * YEAR), 1):
        rig.clock.at += jump
        rig.clock.booted += jump  # nothing passes meanwhile
        rig.keep(number)
        assert all(rig.get(each) == rig.value(each) for each in range(1, number + 1))
        (found,) = rig.lookup(0)
        late = rig.clock.at - 1_700_000_000.0
        assert (found is None) == (late >= MINUTE)
        if found is not None:
            assert found.expires == pytest.approx(rig.clock.now() + MINUTE - late)
    rig.close()
    again = rig.again()
    assert all(again.get(each) == again.value(each) for each in range(1, 6))


@pytest.mark.parametrize("sync", [Sync.DURABLE, Sync.ORDERED])
@pytest.mark.parametrize("nbytes", [0, 4096, 5000])
def test_a_power_loss_does_not_take_the_time_of_a_value(new_rig, sync, nbytes):
    whole = new_rig(sync=sync)
    whole.open().store(0, nbytes, ttl=MINUTE)
    survived = 0
    for crash_at in range(whole.files.calls + 1):
        for seed in range(3):
            rig = new_rig(SimDisk(seed, links=seed > 0), sync=sync)
            rig.files.crash_at = crash_at
            try:
                rig.open().store(0, nbytes, ttl=MINUTE)
                rig.files.kill()
            except SimCrash:
                pass
            rig.disk.lose_power()
            again = rig.again()
            found = again.get(0)
            assert found in (None, rig.value(0, nbytes))
            survived += found is not None
            rig.clock.at += MINUTE
            assert again.lookup(0) == [None], f"crash before call {crash_at}, seed {seed}"
    assert survived


def test_the_file_of_an_unfinished_value_is_young_while_its_writer_may_live(new_rig):
    writer = new_rig(backend=FsBackend).open()
    descriptor = writer.files.open("/kv/tmp/1-0000000000000000-1", os.O_CREAT | os.O_RDWR)
    writer.files.stamp(descriptor, writer.clock.at + MINUTE - 1.5e9)
    for later, there in ((30.0, True), (3600.0, True), (3600.0, False)):
        writer.clock.at += later
        new_rig(writer.disk, backend=FsBackend, clock=writer.clock, seed=2).open().close()
        assert any("/tmp/1-" in path for path in writer.disk.walk()) is there, later


def test_a_file_tells_its_time_to_people(tmp_path):
    """What the README says: the time of expiry, 1.5e9 seconds earlier, and an ordinary file otherwise."""
    from lmcache_backend_disk import DiskBackend
    from lmcache_backend_disk.config import DiskConfig

    from lmcache_core.spi import Key, Store
    from lmcache_core.testing.contexts import test_context as real_context

    context = real_context()
    backend = DiskBackend(DiskConfig(path=str(tmp_path / "kv"), fan_out=16), context)
    backend.open_blocking()
    key = Key(bytes(32), bytes(32), 0)
    backend.store_blocking(Store(key, (memoryview(b"value"),), 3600.0))
    found = os.stat(tmp_path / "kv" / "0" / key.text)
    assert found.st_mtime + 1.5e9 == pytest.approx(context.clock.wall() + 3600.0, abs=5)
    assert stat.S_IMODE(found.st_mode) == 0o600
    backend.close_blocking()
