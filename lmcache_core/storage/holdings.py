"""What a local tier holds, and its one byte limit. Bookkeeping only: no I/O, no clock, one event loop.

Every byte of the tier is in one of three states, and the sum of the *charges* (``footprint``) never exceeds
the limit: *visible* (in the index), *coming* (charged before it is written), *leaving* (invisible already,
its deletion not confirmed). ``check`` recomputes all three from the records.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from lmcache_core.memory.index import NEVER, Index
from lmcache_core.spi import EvictionPolicy, Key

SEARCH = 1 << 16
"""Values an eviction looks past before it gives up, so that one call stays bounded."""


class Holdings:
    """Index, policy and limit of one local tier.

    Args:
        limit: bytes that charges may add up to.
        footprint: charge of a stored length; pure.
        policy: who leaves.
        quota: bytes one tenant may hold here, None for no bound of its own.
    """

    BUSY_LIMIT = 255

    def __init__(
        self,
        limit: int,
        policy: EvictionPolicy,
        footprint: Callable[[int], int],
        /,
        *,
        quota: Callable[[str], int | None] = lambda tenant: None,
    ) -> None:
        self.limit = limit
        self.policy = policy
        self.footprint = footprint
        self.quota = quota
        self.index = Index()
        self.coming: dict[Key, int] = {}
        self.leaving: dict[Key, int] = {}
        self.visible_nbytes = 0
        self.coming_nbytes = 0
        self.leaving_nbytes = 0
        self._lengths = array("Q")
        self._tenants: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.index)

    @property
    def used(self) -> int:
        """Charged bytes in all three states."""
        return self.visible_nbytes + self.coming_nbytes + self.leaving_nbytes

    def find(self, keys: Sequence[Key], now: float, /) -> list[int]:
        """Slot of each visible value that has not expired, -1 elsewhere."""
        slots = self.index.slots_of(keys)
        expires = self.index.expires
        return [slot if slot >= 0 and expires[slot] > now else -1 for slot in slots]

    def expired(self, keys: Sequence[Key], now: float, /) -> list[Key]:
        """Those of the visible values whose time is over and that nobody uses."""
        index = self.index
        slots = zip(keys, index.slots_of(keys), strict=True)
        return [
            key for key, s in slots if s >= 0 and index.expires[s] <= now and not index.flags[s]
        ]

    def length(self, slot: int, /) -> int:
        """Length of the frame before encoding, 0 where unknown (recovered from an encoded store)."""
        return self._lengths[slot]

    def learn(self, slot: int, nbytes: int, /) -> None:
        """Note the length of the frame before encoding."""
        self._lengths[slot] = nbytes

    def touch(self, slots: Iterable[int], /) -> None:
        """Note a use, given root to leaf: leaves are touched first, so that roots are the most recent."""
        self.policy.touch([slot for slot in reversed([*slots]) if slot >= 0])

    def hold(self, keys: Iterable[Key], /) -> list[tuple[Key, int]]:
        """Keep visible values from eviction until ``release`` is given what this returns."""
        held = [(key, slot) for key in keys if (slot := self.index.slot_of(key)) >= 0]
        for _, slot in held:
            self.index.flags[slot] = min(self.index.flags[slot] + 1, self.BUSY_LIMIT)
        return held

    def release(self, held: Iterable[tuple[Key, int]], /) -> None:
        """End a ``hold``; values removed meanwhile are passed over."""
        for key, slot in held:
            if self.index.slot_of(key) == slot and self.index.flags[slot]:
                self.index.flags[slot] -= 1

    def victims(
        self, need: int, tenant: str = "", /, *, promised: Mapping[str, int] = MappingProxyType({})
    ) -> list[Key] | None:
        """Make whole values leave so that a charge of ``need`` bytes fits; None when that is impossible.

        The victims are invisible from now on and stay charged until ``left``; nothing changes on None.
        A tenant over its quota pays with its own values.

        Args:
            promised: charges by tenant that will be made before this one.
        """
        chosen: list[int] = []
        taken: set[int] = set()
        quota = self.quota(tenant)
        if quota is not None:
            over = self._tenants.get(tenant, 0) + promised.get(tenant, 0) + need - quota
            if need > quota or not self._choose(over, chosen, taken, tenant):
                return None
        freed = sum(self._charge(slot) for slot in chosen)
        over = self.visible_nbytes + self.coming_nbytes + sum(promised.values()) + need - self.limit
        if need > self.limit or not self._choose(over - freed, chosen, taken, None):
            return None
        return [self.hide(slot, evicted=True) for slot in chosen]

    def excess(self) -> list[Key]:
        """Victims down to the limit, as far as values are not in use."""
        chosen: list[int] = []
        self._choose(self.visible_nbytes + self.coming_nbytes - self.limit, chosen, set(), None)
        return [self.hide(slot, evicted=True) for slot in chosen]

    def charge(self, key: Key, need: int, /) -> bool:
        """Charge a value that is about to be written; False: it does not fit now or is on its way."""
        if key in self.coming or key in self.leaving or self.used + need > self.limit:
            return False
        self.coming[key] = need
        self.coming_nbytes += need
        return True

    def cancel(self, key: Key, /) -> None:
        """Take a charge back: nothing was written."""
        self.coming_nbytes -= self.coming.pop(key, 0)

    def doubt(self, key: Key, nbytes: int = 0, /) -> None:
        """Nobody knows whether it was written, or deleted: as good as leaving, and charged until that is known."""
        charge = self.coming.pop(key, 0)
        self.coming_nbytes -= charge
        charge = charge or (nbytes and self.footprint(nbytes))
        self.leaving_nbytes += charge - self.leaving.get(key, 0)
        self.leaving[key] = charge

    def arrived(
        self,
        key: Key,
        stored: int,
        length: int,
        /,
        *,
        tenant: str = "",
        cost: float = 1.0,
        expires: float = NEVER,
        tags: Iterable[str] = (),
    ) -> bool:
        """A value is there: visible from now on. False when it was already.

        Args:
            stored: its length in the store; charged instead of what was charged before.
            length: of the frame before encoding, 0 when unknown.
        """
        self.cancel(key)
        if self.index.slot_of(key) >= 0:
            return False
        fingerprint = self.index.fingerprint(key)
        slot = self.index.add(key, stored, tenant=tenant, expires=expires)
        while len(self._lengths) <= slot:
            self._lengths.append(0)
        self._lengths[slot] = length
        charge = self.footprint(stored)
        self.visible_nbytes += charge
        self._tenants[tenant] = self._tenants.get(tenant, 0) + charge
        self.policy.insert(slot, fingerprint, charge, cost)
        if tags:
            self.index.tag(slot, tags)
        return True

    def hide(self, slot: int, /, *, evicted: bool = False) -> Key:
        """Make a value invisible; it stays charged until ``left``."""
        key, charge = self.index.key(slot), self._charge(slot)
        self._forget(slot, charge, evicted)
        self.leaving[key] = charge
        self.leaving_nbytes += charge
        return key

    def left(self, keys: Iterable[Key], /) -> int:
        """Deletion is confirmed; returns the bytes that came free."""
        freed = sum(self.leaving.pop(key, 0) for key in keys)
        self.leaving_nbytes -= freed
        return freed

    def lost(self, slot: int, /) -> int:
        """The store has not got it after all; returns the bytes that came free."""
        charge = self._charge(slot)
        self._forget(slot, charge, False)
        return charge

    def check(self) -> None:
        """Assert that the sums are what the index says and that the limit holds."""
        slots = [*self.index.slots()]
        charges = [self._charge(slot) for slot in slots]
        assert self.visible_nbytes == sum(charges), (self.visible_nbytes, sum(charges))
        assert self.coming_nbytes == sum(self.coming.values()), self.coming
        assert self.leaving_nbytes == sum(self.leaving.values()), self.leaving
        assert self.used <= self.limit, f"{self.used} bytes charged, limit {self.limit}"
        by_tenant: dict[str, int] = {}
        for slot, charge in zip(slots, charges, strict=True):
            name = self.index.tenant_name(slot)
            by_tenant[name] = by_tenant.get(name, 0) + charge
        assert by_tenant == {name: n for name, n in self._tenants.items() if n}, self._tenants
        visible = {self.index.key(slot) for slot in slots}
        assert not visible & self.coming.keys(), "a value is visible and coming"
        self.policy.check()

    def tenants(self) -> Mapping[str, int]:
        """Charged visible bytes per tenant."""
        return {name: nbytes for name, nbytes in self._tenants.items() if nbytes}

    def _charge(self, slot: int) -> int:
        return self.footprint(self.index.nbytes[slot])

    def _forget(self, slot: int, charge: int, evicted: bool) -> None:
        self.policy.remove(slot, evicted=evicted)
        self._tenants[self.index.tenant_name(slot)] -= charge
        self.visible_nbytes -= charge
        self.index.remove(slot)

    def _choose(self, over: int, chosen: list[int], taken: set[int], tenant: str | None) -> bool:
        """Add victims until ``over`` bytes are found; those of one tenant only when it is given."""
        flags, index = self.index.flags, self.index

        skipped = 0

        def busy(slot: int) -> bool:
            nonlocal skipped
            skipped += 1
            unwanted = tenant is not None and index.tenant_name(slot) != tenant
            return skipped <= SEARCH and (flags[slot] > 0 or slot in taken or unwanted)

        while over > 0:
            slot = self.policy.victim(busy)
            if slot is None or skipped > SEARCH:
                return False
            chosen.append(slot)
            taken.add(slot)
            over -= self._charge(slot)
        return True
