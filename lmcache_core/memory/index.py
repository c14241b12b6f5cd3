"""What is stored, one record per value, in columns: 1 M values in less than 300 bytes each.

A record is a *slot*: a small integer that stays the same while the value is in the index and is used
again afterwards, so that policies and other columns can be flat arrays. Keys of one space and group
share one dictionary keyed by the 32 raw bytes of the digest. Not thread-safe: its owner has a lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

from lmcache_core.spi.keys import Key

IDENTITY_NBYTES = 16
NO_IDENTITY = bytes(IDENTITY_NBYTES)
NEVER = float("inf")
_LOOK = 1 << 13
_ODD = 0x9E3779B97F4A7C15


class Table:
    """Slots by digest for the keys of one space and group.

    ``homes`` are what ``Index`` keeps per slot, one object per tenant: this table and the tenant's name.
    """

    __slots__ = ("group", "homes", "nbytes", "salt", "slots", "space")

    def __init__(self, space: bytes, group: int) -> None:
        self.space = space
        self.group = group
        self.salt = _salt(space, group)
        self.nbytes = 0
        self.slots: dict[bytes, int] = {}
        self.homes: dict[str, tuple[Table, str]] = {}


class Index:
    """Slots by key, and their columns. Nothing is left of a space without values.

    Columns (read freely, index them by slot; those marked * may be written):

    * ``nbytes``: length of the value.
    * ``flags`` *: bits that belong to the owner of the index; 0 at ``add``.
    * ``expires`` *: clock time after which the value counts as absent, ``NEVER`` by default.
    * ``places``, ``positions``, ``leases`` *: extents of a pool (only with ``extents``).

    ``watch``, where it is set, is told each key that can be found from now on (True) or no longer (False).
    """

    def __init__(self, *, extents: bool = False) -> None:
        self._tables: dict[tuple[bytes, int], Table] = {}
        self._digests: list[bytes | None] = []
        self._home: list[tuple[Table, str] | None] = []
        self._free: list[int] = []
        self._labels: dict[str, set[int]] = {}
        self._labelled: dict[int, set[str]] = {}
        self._identity = bytearray()
        self.nbytes = array("Q")
        self.flags = bytearray()
        self.expires = array("d")
        self.extents = extents
        self.positions = array("H")  # a slab has at most 16 Ki extents
        self.leases = array("I")
        self.places: list[Any] = []
        self.watch: Callable[[Key, bool], None] | None = None

    def __len__(self) -> int:
        return len(self._digests) - len(self._free)

    @property
    def visible_count(self) -> int:
        """Values that can be found."""
        return sum(len(table.slots) for table in self._tables.values())

    def tables(self) -> Iterator[tuple[bytes, int, int, int]]:
        """(space, group, values, bytes of values) of everything that can be found."""
        for (space, group), table in self._tables.items():
            yield space, group, len(table.slots), table.nbytes

    def slots_of(self, keys: Sequence[Key], /) -> list[int]:
        """Slot of each key, -1 where absent."""
        if not keys:
            return []
        spaces, digests, groups = zip(*keys, strict=True)
        if spaces.count(spaces[0]) == len(keys) == groups.count(groups[0]):  # of one prefix, mostly
            table = self._tables.get((spaces[0], groups[0]))
            slots = {} if table is None else table.slots
            return [*map(slots.get, digests, repeat(-1))]
        find = self._tables.get
        return [
            -1 if (table := find((space, group))) is None else table.slots.get(digest, -1)
            for space, digest, group in keys
        ]

    def slot_of(self, key: Key, /) -> int:
        """Slot of one key, -1 where absent."""
        table = self._tables.get((key.space, key.group))
        return -1 if table is None else table.slots.get(key.digest, -1)

    def add(
        self,
        key: Key,
        nbytes: int,
        /,
        *,
        identity: bytes = NO_IDENTITY,
        tenant: str = "",
        expires: float = NEVER,
    ) -> int:
        """Take in an absent key and return its slot; ``identity`` has 16 bytes."""
        space, digest, group = key
        table = self._tables.get((space, group))
        if table is None:
            table = self._tables[space, group] = Table(space, group)
        assert digest not in table.slots, f"{key!r} is in the index already"
        slot = self._free.pop() if self._free else self._grow()
        table.slots[digest] = slot
        table.nbytes += nbytes
        self._digests[slot] = digest
        self._home[slot] = table.homes.get(tenant) or table.homes.setdefault(
            tenant, (table, tenant)
        )
        self.nbytes[slot] = nbytes
        self.flags[slot] = 0
        self.expires[slot] = expires
        start = slot * IDENTITY_NBYTES
        assert len(identity) == IDENTITY_NBYTES
        self._identity[start : start + IDENTITY_NBYTES] = identity
        if self.watch is not None:
            self.watch(key, True)
        return slot

    def hide(self, slot: int, /) -> None:
        """Make the value absent but keep its record until ``remove`` (somebody still reads it)."""
        home, digest = self._home[slot], self._digests[slot]
        if home is not None and digest is not None and home[0].slots.get(digest) == slot:
            table = home[0]
            del table.slots[digest]
            table.nbytes -= self.nbytes[slot]
            if not table.slots:
                del self._tables[table.space, table.group]
                table.homes.clear()  # no cycle is left to the collector
            if self.watch is not None:
                self.watch(Key(table.space, digest, table.group), False)

    def remove(self, slot: int, /) -> None:
        """Forget a record; its slot may be used again."""
        self.hide(slot)
        self._digests[slot] = self._home[slot] = None
        for label in self._labelled.pop(slot, ()):
            self._labels[label].discard(slot)
            if not self._labels[label]:
                del self._labels[label]
        if self.extents:
            self.places[slot] = None
        self._free.append(slot)

    def key(self, slot: int, /) -> Key:
        """The key of a slot in use."""
        home, digest = self._home[slot], self._digests[slot]
        assert home is not None and digest is not None, f"slot {slot} is empty"
        return Key(home[0].space, digest, home[0].group)

    def visible(self, slot: int, /) -> bool:
        """Whether the slot is in use and not hidden."""
        home, digest = self._home[slot], self._digests[slot]
        return home is not None and digest is not None and home[0].slots.get(digest) == slot

    def fingerprint(self, key: Key, /) -> int:
        """64-bit number drawn from a key, for policies."""
        table = self._tables.get((key.space, key.group))
        salt = table.salt if table is not None else _salt(key.space, key.group)
        return int.from_bytes(key.digest[:8], "little") ^ salt

    def identity(self, slot: int, /) -> bytes:
        """The 16-byte digest given at ``add``."""
        return bytes(self._identity[slot * IDENTITY_NBYTES : (slot + 1) * IDENTITY_NBYTES])

    def identities(self, slots: Iterable[int], /) -> bytes:
        """The digests of several slots, back to back."""
        digests, size = self._identity, IDENTITY_NBYTES
        return b"".join([digests[slot * size : (slot + 1) * size] for slot in slots])

    def tenant_name(self, slot: int, /) -> str:
        """Whose value it is."""
        home = self._home[slot]
        assert home is not None, f"slot {slot} is empty"
        return home[1]

    def slots(self) -> Iterator[int]:
        """All slots in use, hidden ones too, ascending."""
        return (slot for slot, digest in enumerate(self._digests) if digest is not None)

    def page(
        self, after: int, limit: int, /, *, space: bytes | None = None
    ) -> tuple[list[int], int | None]:
        """Up to ``limit`` visible slots from ``after`` on, and where to go on (None at the end).

        A value that stays is listed exactly once, whatever else comes and goes between pages. A page may be
        short, even empty, where few of many slots are wanted, so that one call stays bounded.
        """
        page: list[int] = []
        end = min(len(self._digests), after + max(limit, _LOOK))
        for slot in range(after, end):
            home = self._home[slot]
            if home is not None and space in (None, home[0].space) and self.visible(slot):
                if len(page) == limit:
                    return page, slot
                page.append(slot)
        return page, end if end < len(self._digests) else None

    def tag(self, slot: int, labels: Iterable[str], /) -> None:
        """Add labels to a value."""
        for label in labels:
            self._labels.setdefault(label, set()).add(slot)
            self._labelled.setdefault(slot, set()).add(label)

    def tagged(self, label: str, /) -> list[int]:
        """Slots that carry a label, ascending."""
        return sorted(self._labels.get(label, ()))

    def _grow(self) -> int:
        self._digests.append(None)
        self._home.append(None)
        self._identity.extend(NO_IDENTITY)
        self.nbytes.append(0)
        self.flags.append(0)
        self.expires.append(NEVER)
        if self.extents:
            self.positions.append(0)
            self.leases.append(0)
            self.places.append(None)
        return len(self._digests) - 1


def _salt(space: bytes, group: int) -> int:
    """A number for xor with digests, which must not be one of them."""
    return (int.from_bytes(space[:8], "little") + group + 1) * _ODD % (1 << 64)
