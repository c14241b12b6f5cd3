"""Values and bytes by key space, kept as values come and go."""

from lmcache_core.memory.index import Index
from lmcache_core.spi import Key


def key(space: int, number: int, group: int = 0) -> Key:
    return Key(bytes([space]) * 32, bytes([number]) * 32, group)


def test_tables_count_what_can_be_found() -> None:
    """Seen in sglang#21624."""
    index = Index()
    slots = [index.add(key(1, n), 10 * n) for n in (1, 2, 3)]
    index.add(key(1, 1, group=1), 7)
    index.add(key(2, 1), 5)
    assert list(index.tables()) == [
        (b"\1" * 32, 0, 3, 60),
        (b"\1" * 32, 1, 1, 7),
        (b"\2" * 32, 0, 1, 5),
    ]
    index.hide(slots[0])
    index.remove(slots[0])
    index.remove(slots[2])
    assert next(index.tables()) == (b"\1" * 32, 0, 1, 20)
    index.remove(slots[1])
    assert [row[:2] for row in index.tables()] == [(b"\1" * 32, 1), (b"\2" * 32, 0)]
