"""Histories that end in the middle: by the end of the process or of the power, between any two system calls.

Two promises are checked on what the next process finds: no value is ever a part of itself, and what was
acknowledged is there, as far as ``sync`` says.
"""

import random

import pytest
from lmcache_backend_disk import FsBackend
from lmcache_backend_disk.config import Direct, Sync

from lmcache_core.spi import StoreStatus
from lmcache_core.testing.files import SimCrash, SimDisk

pytestmark = pytest.mark.slow
LENGTHS = (0, 1, 511, 4096, 5000, 12_289)
KEYS = range(12)


class History:
    """What a program was told, over any number of boots."""

    def __init__(self, rig, seed):
        self.rig = rig
        self.random = random.Random(seed)
        self.acknowledged = set()
        self.deleted = set()
        self.lengths = {number: self.random.choice(LENGTHS) for number in KEYS}

    def live(self):
        """Random verbs until the process ends."""
        self.rig.files.crash_at = self.random.randrange(200)
        try:
            self.rig.open()
            self.check()
            while True:
                self.step(self.random.choice(KEYS))
        except SimCrash:
            pass

    def step(self, number):
        verb = self.random.choice(["store", "store", "store", "load", "delete"])
        if verb == "store":
            status = self.rig.store(number, self.lengths[number]).status
            assert status in (StoreStatus.STORED, StoreStatus.PRESENT)
            self.acknowledged.add(number)
        elif verb == "load":
            assert self.rig.get(number) in (None, self.value(number))
        else:
            self.acknowledged.discard(number)
            self.rig.delete(number)

    def value(self, number):
        return self.rig.value(number, self.lengths[number])

    def check(self, *, kept=True):
        found = {number: self.rig.get(number) for number in KEYS}
        for number, value in found.items():
            assert value in (None, self.value(number)), f"value {number} is torn"
        if kept:
            lost = {number for number in self.acknowledged if found[number] is None}
            assert not lost, f"acknowledged and lost: {lost}"
        assert [path for path in self.rig.disk.walk() if "/tmp/" in path] == []

    def reboot(self, *, power):
        disk, options = self.rig.disk, {}
        if power:
            disk.lose_power()
        else:
            self.rig.files.kill()
        for name in ("sync", "direct", "path", "fan_out", "verify_writes"):
            options[name] = getattr(self.rig.backend.config, name)
        self.rig = type(self.rig)(
            disk, backend=type(self.rig.backend), seed=self.random.random(), **options
        )


def histories(new_rig, seeds, *, power, boots=2, kept=True, **options):
    """Check one history for each seed; return how many values survived a crash in all.

    ``power`` None: some boots end with the process alone, some with the power.
    """
    survived = 0
    for seed in seeds:
        rig = new_rig(SimDisk(seed, links=seed % 3 != 0), seed=seed, **options)
        history = History(rig, seed)
        try:
            for _ in range(boots):
                history.live()
                history.reboot(power=history.random.random() < 0.5 if power is None else power)
                if not kept:
                    history.acknowledged.clear()
            history.rig.open()
            history.check(kept=kept)
            survived += len(history.acknowledged)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return survived


def test_acknowledged_durable_values_survive_every_power_loss(new_rig):
    assert histories(new_rig, range(1000), power=True, sync=Sync.DURABLE) > 1000


def test_what_a_killed_process_left_is_made_durable_before_it_is_acknowledged(new_rig):
    assert histories(new_rig, range(500), power=None, boots=4, sync=Sync.DURABLE) > 500


@pytest.mark.parametrize("sync", list(Sync))
def test_acknowledged_values_survive_the_end_of_the_process(new_rig, sync):
    assert histories(new_rig, range(100), power=False, sync=sync) > 100


def test_ordered_values_are_whole_after_a_power_loss(new_rig):
    histories(new_rig, range(300), power=True, kept=False, sync=Sync.ORDERED)


@pytest.mark.parametrize("options", [{"direct": Direct.OFF}, {"path": ("/a", "/b")}])
def test_durable_holds_with_other_options(new_rig, options):
    assert histories(new_rig, range(100), power=True, sync=Sync.DURABLE, **options) > 100


def test_the_check_sees_torn_values_where_nothing_is_synced(new_rig):
    with pytest.raises(AssertionError, match="torn"):
        histories(new_rig, range(100), power=True, kept=False, sync=Sync.NONE)


def test_the_check_sees_lost_values_where_names_are_not_synced(new_rig):
    with pytest.raises(AssertionError, match="lost"):
        histories(new_rig, range(100), power=True, sync=Sync.ORDERED)


@pytest.mark.parametrize("paths", [("/a", "/b"), ("/b", "/a")])
@pytest.mark.parametrize("sync", [Sync.NONE, Sync.ORDERED])
def test_what_is_there_already_is_durable_before_that_is_acknowledged(new_rig, paths, sync):
    """Whoever stored it: a process with another ``sync``, or one that was killed before it had answered."""
    for seed in range(20):
        rig = new_rig(SimDisk(seed), sync=sync, path=("/a", "/b")).open()
        rig.keep(0, 1)
        rig.close()
        durable = rig.again(sync=Sync.DURABLE, path=paths)
        assert [durable.store(number).status for number in (0, 1)] == [StoreStatus.PRESENT] * 2
        durable.disk.lose_power()
        after = durable.again()
        for number in (0, 1):
            assert after.get(number) == after.value(number), f"seed {seed}"


def scenario(rig, told):
    """A fixed program over every verb; ``told`` fills up as it is answered."""
    rig.open()
    for number, nbytes in ((0, 5000), (1, 4096), (0, 5000), (2, 1)):
        rig.store(number, nbytes)
        told[number] = nbytes
    told.pop(1)
    rig.delete(1)
    rig.store(1, 4096)
    told[1] = 4096
    rig.close()


@pytest.mark.parametrize("power", [False, True])
def test_every_point_between_two_system_calls_is_safe(new_rig, power):
    full = new_rig(sync=Sync.DURABLE)
    scenario(full, {})
    for crash_at in range(full.files.calls):
        for seed in range(4 if power else 1):
            disk, told = SimDisk(seed), {}
            rig = new_rig(disk, sync=Sync.DURABLE)
            rig.files.crash_at = crash_at
            with pytest.raises(SimCrash):
                scenario(rig, told)
            if power:
                disk.lose_power()
            else:
                rig.files.kill()
            after = new_rig(disk, sync=Sync.DURABLE, seed=1).open()
            for number, nbytes in ((0, 5000), (1, 4096), (2, 1)):
                expected = after.value(number, nbytes)
                found = after.get(number)
                assert found == expected or (found is None and number not in told), (
                    f"value {number} after a crash before call {crash_at}, seed {seed}"
                )
            assert [path for path in disk.walk() if "/tmp/" in path] == []
            scenario_again = after.store(0, 5000).status
            assert scenario_again in (StoreStatus.STORED, StoreStatus.PRESENT)


def test_a_writer_that_dies_leaves_a_shared_folder_whole_for_the_others(new_rig):
    full = new_rig(new_rig(backend=FsBackend).open().disk, backend=FsBackend, seed=2)
    scenario(full, {})
    for crash_at in range(full.files.calls):
        disk, told = SimDisk(), {}
        other = new_rig(disk, backend=FsBackend, seed=1).open()
        rig = new_rig(disk, backend=FsBackend, seed=2)
        rig.files.crash_at = crash_at
        with pytest.raises(SimCrash):
            scenario(rig, told)
        for number, nbytes in ((0, 5000), (1, 4096), (2, 1)):
            found = other.get(number)
            assert found == other.value(number, nbytes) or (found is None and number not in told)
