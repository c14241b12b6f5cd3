"""The store against a dictionary, with ends of the process and of the power between any two system calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from lmcache_backend_disk.config import Sync

from backends.disk.tests.conftest import Rig
from lmcache_core.spi import LoadStatus, StoreStatus
from lmcache_core.testing.files import SimCrash, SimDisk

NUMBERS = st.integers(0, 5)
LENGTHS = (0, 1, 511, 4096, 5000, 12_289)


class Machine(RuleBasedStateMachine):
    """``told``: what was acknowledged, and so must be there; ``maybe``: what may be, for no answer came."""

    @initialize(seed=st.integers(0, 1 << 16), links=st.booleans())
    def start(self, seed, links):
        self.seed = seed
        self.disk = SimDisk(seed, links=links)
        self.told, self.maybe = set(), set()
        self.rig = Rig(self.disk, seed=seed, sync=Sync.DURABLE).open()

    def doing(self, number, verb, *, changes=True):
        """Do something that the end of the process may cut short; None: it did."""
        if changes:
            self.maybe.add(number)
        try:
            result = verb()
        except SimCrash:
            self.again(power=self.power)
            return None
        if changes:
            self.maybe.discard(number)
        return result

    def again(self, *, power):
        if power:
            self.disk.lose_power()
        else:
            self.rig.files.kill()
        self.seed += 1
        self.rig = Rig(self.disk, seed=self.seed, sync=Sync.DURABLE).open()
        assert [path for path in self.disk.walk() if "/tmp/" in path] == []

    @rule(calls=st.integers(0, 25), power=st.booleans())
    def arm(self, calls, power):
        """The end comes so many system calls from now."""
        self.power = power
        self.rig.files.crash_at = self.rig.files.calls + calls

    @rule(number=NUMBERS)
    def store(self, number):
        stored = self.doing(number, lambda: self.rig.store(number, LENGTHS[number]))
        if stored is not None:
            assert stored.status in (StoreStatus.STORED, StoreStatus.PRESENT)
            self.told.add(number)

    @rule(number=NUMBERS)
    def delete(self, number):
        self.told.discard(number)
        if self.doing(number, lambda: self.rig.delete(number)) is not None:
            self.maybe.add(number)  # a power loss may bring it back: nothing waits for the folder

    @rule(number=NUMBERS)
    def load(self, number):
        def verb():
            return self.rig.load(number, LENGTHS[number])

        found = self.doing(number, verb, changes=False)
        if found is not None:
            loaded, buffer = found
            good = buffer == self.rig.value(number, LENGTHS[number])
            assert good if loaded.status is LoadStatus.FILLED else number not in self.told

    @rule(power=st.booleans())
    def end(self, power):
        self.again(power=power)

    @invariant()
    def nothing_is_open(self):
        if hasattr(self, "rig") and self.rig.files.crash_at is None:
            everything = {n for n in range(6) if self.rig.get(n) is not None}
            assert self.told <= everything
            assert everything <= self.told | self.maybe
            for number in everything:
                assert self.rig.get(number) == self.rig.value(number, LENGTHS[number])


TestStore = pytest.mark.slow(Machine.TestCase)
TestStore.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
