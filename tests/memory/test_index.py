from __future__ import annotations

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmcache_core.memory.index import NEVER, Index
from lmcache_core.spi import Key

SPACES = [hashlib.sha256(b"%d" % number).digest() for number in range(3)]


def key(number: int) -> Key:
    """Keys that share digests across spaces and groups."""
    return Key(SPACES[number % 3], hashlib.sha256(b"%d" % (number // 6)).digest(), number // 3 % 2)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.model: dict[Key, tuple[int, int, str, float, frozenset[str]]] = {}

    @rule(
        number=st.integers(0, 40),
        nbytes=st.integers(0, 1 << 40),
        tenant=st.sampled_from(["", "a", "b"]),
        expires=st.sampled_from([NEVER, 1.5]),
        tags=st.frozensets(st.sampled_from("xyz")),
    )
    def add(
        self, number: int, nbytes: int, tenant: str, expires: float, tags: frozenset[str]
    ) -> None:
        name = key(number)
        if name in self.model:
            with pytest.raises(AssertionError):
                self.index.add(name, nbytes)
            return
        identity = hashlib.md5(b"%d" % number).digest()
        slot = self.index.add(name, nbytes, identity=identity, tenant=tenant, expires=expires)
        assert slot not in {record[0] for record in self.model.values()}
        self.index.tag(slot, tags)
        self.model[name] = (slot, nbytes, tenant, expires, tags)
        assert self.index.identity(slot) == identity

    @rule(number=st.integers(0, 40))
    def remove(self, number: int) -> None:
        if key(number) in self.model:
            self.index.remove(self.model.pop(key(number))[0])

    @rule(number=st.integers(0, 40))
    def hide_for_a_while(self, number: int) -> None:
        if key(number) in self.model:
            slot = self.model.pop(key(number))[0]
            self.index.hide(slot)
            assert self.index.slot_of(key(number)) == -1
            assert self.index.key(slot) == key(number)
            again = self.index.add(key(number), 1)
            assert self.index.slot_of(key(number)) == again != slot
            self.index.remove(slot)
            assert self.index.slot_of(key(number)) == again
            self.index.remove(again)

    @invariant()
    def it_says_what_was_put_in(self) -> None:
        index = self.index
        names = [key(number) for number in range(41)]
        slots = index.slots_of(names)
        assert slots == [self.model[name][0] if name in self.model else -1 for name in names]
        assert slots == [index.slot_of(name) for name in names]
        for name, (slot, nbytes, tenant, expires, _) in self.model.items():
            assert index.key(slot) == name
            assert index.nbytes[slot] == nbytes
            assert index.tenant_name(slot) == tenant
            assert index.expires[slot] == expires
        for tag in "xyz":
            assert index.tagged(tag) == sorted(r[0] for r in self.model.values() if tag in r[4])
        assert len(index) == index.visible_count == len(self.model)
        assert sorted(index.slots()) == sorted(record[0] for record in self.model.values())
        assert len(index._tables) == len({(name.space, name.group) for name in self.model})

    @invariant()
    def pages_list_everything_once(self) -> None:
        for space in (None, SPACES[0]):
            listed: list[int] = []
            after: int | None = 0
            while after is not None:
                page, after = self.index.page(after, 3, space=space)
                assert len(page) == 3 or after is None
                listed += page
            expected = [r[0] for k, r in self.model.items() if space in (None, k.space)]
            assert listed == sorted(expected)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_fingerprint_depends_on_every_part_of_the_key() -> None:
    index = Index()
    prints = {index.fingerprint(key(number)) for number in range(36)}
    assert len(prints) == 36
    for number in range(36):
        index.add(key(number), 1)
    assert {index.fingerprint(key(number)) for number in range(36)} == prints
    assert all(0 <= each < 1 << 64 for each in prints)


def test_slots_of_a_mixed_batch_switch_tables() -> None:
    index = Index()
    wanted = [key(number) for number in (0, 1, 2, 3, 4, 5, 0, 9)]
    slots = {name: index.add(name, 1) for name in wanted[:6]}
    assert index.slots_of(wanted) == [slots.get(name, -1) for name in wanted]


def test_page_of_a_rare_space_looks_at_few_slots() -> None:
    index = Index()
    names = [Key(SPACES[0], number.to_bytes(32, "big"), 0) for number in range(20_000)]
    for name in names:
        index.add(name, 1)
    rare = index.add(Key(SPACES[1], bytes(32), 0), 1)
    page, after = index.page(0, 10, space=SPACES[1])
    assert page == []
    assert after is not None
    pages = 1
    while after is not None:
        found, after = index.page(after, 10, space=SPACES[1])
        page += found
        pages += 1
    assert page == [rare]
    assert pages == 3
