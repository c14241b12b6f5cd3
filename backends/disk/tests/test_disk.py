"""What goes wrong with files ends as a refusal, a miss or a named error, never as other bytes."""

import errno
import logging

import pytest
from lmcache_backend_disk import DiskBackend
from lmcache_backend_disk.config import Direct, Sync

from lmcache_core.spi import (
    PRESENT,
    BufferTooSmall,
    Capabilities,
    Corrupt,
    Durability,
    Load,
    LoadStatus,
    Store,
    StoreStatus,
    Unavailable,
)
from lmcache_core.testing.files import SimDisk

MIB = 1 << 20


def test_value_is_one_file_with_exactly_the_bytes_given(rig):
    for number, nbytes in enumerate((0, 1, 511, 512, 4095, 4096, 4097, 70_000, 3 * MIB + 5)):
        assert rig.store(number, nbytes).status is StoreStatus.STORED
        assert rig.disk.peek(rig.path(number)) == rig.value(number, nbytes)
        assert rig.get(number) == rig.value(number, nbytes)


@pytest.mark.parametrize("cuts", [(4096, 8192), (8192, 8192), (100, 4096), (1, 2)])
@pytest.mark.parametrize("direct", [Direct.AUTO, Direct.OFF])
def test_parts_are_joined_whatever_their_lengths(new_rig, cuts, direct):
    rig = new_rig(direct=direct).open()
    value = memoryview(rig.value(0, 20_001))
    first, second = cuts
    parts = (value[:first], value[first:second], value[second:])
    assert rig.backend.store_blocking(Store(rig.key(0), parts)).status is StoreStatus.STORED
    assert rig.disk.peek(rig.path(0)) == value
    buffer = memoryview(bytearray(30_000))
    into = (buffer[:first], buffer[first:second], buffer[second:])
    assert rig.backend.load_blocking(Load(rig.key(0), into)).nbytes == 20_001
    assert buffer[:20_001] == value
    assert buffer[20_001:] == bytes(9_999)


@pytest.mark.parametrize("direct", [Direct.AUTO, Direct.OFF])
def test_parts_of_a_value_are_loaded_from_any_offset(new_rig, direct):
    rig = new_rig(direct=direct).open()
    nbytes = 2 * MIB + 77
    rig.store(0, nbytes)
    for offset, length in ((0, 4096), (4096, 8192), (1, 1), (511, 5000), (4097, MIB), (nbytes, 0)):
        loaded, buffer = rig.load(0, MIB + 9, offset, length)
        assert loaded.nbytes == length
        assert buffer == rig.value(0, nbytes)[offset : offset + length] + bytes(MIB + 9 - length)


def test_short_transfers_go_on_where_they_ended(new_rig):
    for seed in range(40):
        for direct in (Direct.AUTO, Direct.OFF):
            rig = new_rig(SimDisk(seed), direct=direct, verify_writes=seed % 2 == 0).open()
            rig.files.shorten("pwritev", times=5)
            rig.store(0, 20_001)
            rig.files.shorten("preadv", times=5)
            loaded, buffer = rig.load(0, 20_001)
            assert (loaded.nbytes, buffer) == (20_001, rig.value(0, 20_001))


def test_present_value_stays(rig):
    rig.keep(0)
    other = Store(rig.key(0), (memoryview(b"other"),))
    assert rig.backend.store_blocking(other) == PRESENT
    assert rig.get(0) == rig.value(0)


def test_nothing_is_left_open_or_in_the_temporary_folder(rig):
    rig.keep(0, 1)
    rig.store(0)
    rig.load(0, 10)
    rig.load(2)
    assert [path for path in rig.files.open_paths if path != "/kv/lock"] == []
    assert [path for path in rig.disk.walk() if "/tmp/" in path] == []
    rig.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG])
@pytest.mark.parametrize("call", ["open", "allocate", "pwritev", "sync", "link"])
def test_no_room_is_a_refusal_with_the_reason(rig, call, code):
    rig.files.fail(call, code, path="/tmp/" if call != "link" else "")
    stored = rig.store(0)
    assert stored.status is StoreStatus.REFUSED
    assert stored.reason.startswith("/kv: ")
    assert rig.lookup(0) == [None]
    assert [path for path in rig.disk.walk() if "/tmp/" in path] == []
    rig.keep(0)


@pytest.mark.parametrize("call", ["open", "pwritev", "truncate", "sync", "close", "link"])
def test_io_error_of_a_store_is_its_failure_and_leaves_nothing(rig, call):
    """Seen in LMCache#4991."""
    rig.files.fail(call, errno.EIO, path="/tmp/" if call != "link" else "")
    stored = rig.store(0)
    assert stored.status is StoreStatus.FAILED
    assert isinstance(stored.error, Unavailable)
    assert rig.lookup(0) == [None]
    assert [path for path in rig.disk.walk() if "/tmp/" in path] == []


def test_failed_folder_sync_takes_the_value_back(new_rig):
    rig = new_rig(sync=Sync.DURABLE).open()
    rig.files.fail("sync", errno.EIO, path=rig.path(0)[:5])
    assert rig.store(0).status is StoreStatus.FAILED
    assert rig.lookup(0) == [None]
    rig.keep(0)


def test_a_full_disk_refuses_before_writing_and_serves_on(new_rig):
    rig = new_rig(SimDisk(capacity=64 << 10)).open()
    rig.keep(*range(7))
    before = rig.disk.used
    assert rig.store(99, 60 << 10).status is StoreStatus.REFUSED
    assert rig.disk.used == before
    assert rig.get(3) == rig.value(3)
    assert rig.delete(*range(7)) == 7
    assert rig.store(99, 48 << 10).status is StoreStatus.STORED


def test_a_full_disk_can_be_opened_and_served_from(new_rig):
    rig = new_rig(SimDisk(capacity=16 << 10)).open()
    rig.keep(0)
    rig.store(1, 4000)
    assert rig.files.free("/") == 0
    rig.close()
    again = rig.again()
    assert again.get(0) == again.value(0)
    assert again.store(2).status is StoreStatus.REFUSED


def test_read_only_remount_refuses_stores_and_serves_loads(rig):
    rig.keep(0)
    rig.disk.read_only = True
    assert rig.store(1).status is StoreStatus.REFUSED
    assert "read-only" in rig.store(1).reason
    assert rig.get(0) == rig.value(0)
    with pytest.raises(Unavailable, match="read-only"):
        rig.delete(0)
    rig.disk.read_only = False
    rig.keep(1)


def test_read_error_is_a_failure_of_that_load(rig):
    """Seen in dynamo#15079."""
    rig.keep(0, 1)
    rig.files.fail("preadv", errno.EIO, path=rig.path(0))
    loaded, _ = rig.load(0)
    assert isinstance(loaded.error, Unavailable)
    assert rig.get(1) == rig.value(1)


def test_a_file_that_shrinks_under_a_load_is_corrupt(rig):
    rig.keep(0)
    real = rig.files.status_of

    def status_then_cut(descriptor):
        found = real(descriptor)
        rig.disk.cut(rig.path(0), 600)
        return found

    rig.files.status_of = status_then_cut
    loaded, _ = rig.load(0)
    assert isinstance(loaded.error, Corrupt)
    assert "600 of 5000" in str(loaded.error)


def test_short_buffers_and_ends_are_named(rig):
    rig.keep(0)
    assert isinstance(rig.load(0, 4999)[0].error, BufferTooSmall)
    assert isinstance(rig.load(0, 5000, 4000, 2000)[0].error, Corrupt)


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "link"])
def test_what_is_no_file_is_a_miss_named_once_and_left_alone(new_rig, kind, links, caplog):
    rig = new_rig(SimDisk(links=links)).open()
    rig.disk.plant(rig.path(0), kind=kind)
    assert rig.lookup(0, 0) == [None, None]
    assert rig.load(0)[0].status is LoadStatus.MISSED
    assert rig.store(0).status is StoreStatus.REFUSED  # a failure would count against the disk
    assert rig.delete(0) == 0
    assert rig.listing() == ([], [rig.path(0)])
    assert rig.disk.find(rig.path(0)).kind == kind
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([text for text in said if "no regular file" in text]) == 1


def test_lookup_of_a_sick_file_is_a_miss_and_of_a_sick_disk_an_error(rig):
    rig.keep(0, 1)
    rig.files.fail("status", errno.EIO, path=rig.path(0))
    assert [found is not None for found in rig.lookup(0, 1)] == [False, True]
    rig.files.fail("status", errno.EIO, times=2)
    with pytest.raises(Unavailable, match="lookup failed"):
        rig.lookup(0, 1)


def test_direct_transfers_refused_later_are_given_up(rig, caplog):
    """Seen in LMCache#4364, LMCache#1522."""
    rig.keep(0)
    rig.disk.direct = 0
    assert rig.get(0) == rig.value(0)
    rig.keep(1)
    assert rig.get(1) == rig.value(1)
    assert "refuses direct transfers" in caplog.text


def test_write_that_the_disk_flips_is_not_published(new_rig):
    """Seen in LMCache#962."""
    rig = new_rig(verify_writes=True).open()
    real = rig.files.sync

    def sync_and_flip(descriptor):
        real(descriptor)
        (path,) = [path for path in rig.disk.walk() if "/tmp/" in path]
        rig.disk.flip(path)

    rig.files.sync = sync_and_flip
    stored = rig.store(0)
    assert stored.status is StoreStatus.FAILED
    assert "does not read back" in stored.reason
    assert rig.lookup(0) == [None]


def test_vanished_folders_are_made_again(rig):
    rig.disk.find("/kv").bind("tmp", None)
    for shard in "0123456789abcdef":
        rig.disk.find("/kv").bind(shard, None)
    assert rig.listing() == ([], [])
    rig.keep(0, 1, 2)
    assert rig.get(2) == rig.value(2)


def test_value_is_deleted_only_while_it_is_the_one_meant(rig):
    rig.keep(0)
    (found,) = rig.lookup(0)
    rig.delete(0)
    rig.disk.wall = lambda: 2e9
    rig.keep(0)
    assert not rig.backend._delete_exact(rig.key(0), found.etag)
    (found,) = rig.lookup(0)
    assert rig.backend._delete_exact(rig.key(0), found.etag)
    assert rig.lookup(0) == [None]


def test_scan_asks_again_before_it_passes_over_a_value(rig):
    rig.keep(1, 2)
    rig.files.fail("status", errno.EIO, path=rig.path(1), times=2)
    assert sorted(rig.listing()[0]) == sorted([rig.key(1), rig.key(2)])
    rig.files.fail("status", errno.EIO, path=rig.path(1), times=3)
    assert rig.listing() == ([rig.key(2)], [rig.path(1)])


def test_scan_lists_values_once_and_names_what_is_foreign(rig):
    rig.keep(*range(30))
    misplaced = f"/kv/0/{'1' * 132}"
    foreign = ["/kv/notes.txt", "/kv/0/core", "/kv/f/UPPER", misplaced]
    for path in foreign:
        rig.disk.plant(path, b"keep me")
    rig.disk.plant("/kv/tmp/core", b"keep me")
    for limit in (1, 7, 1000):
        keys, found = rig.listing(limit) if limit > 1 else rig.listing(2)
        assert sorted(keys) == sorted(rig.key(number) for number in range(30))
        assert sorted(found) == sorted(foreign)
    rig.close()
    again = rig.again()
    for path in [*foreign, "/kv/tmp/core"]:
        assert again.disk.peek(path) == b"keep me"


class Rival(DiskBackend):
    """Another thread lists everything whenever this one has listed a folder."""

    armed = False

    @property
    def _listing(self):
        return self._last

    @_listing.setter
    def _listing(self, listing):
        self._last = listing
        if self.armed:
            self.armed = False
            self._scan(None, 1000)
            self.armed = True


def test_two_listings_at_once_do_not_mix(new_rig):
    rig = new_rig(backend=Rival).open()
    rig.keep(*range(30))
    rig.backend.armed = True
    keys, foreign = rig.listing()
    assert sorted(keys) == sorted(rig.key(number) for number in range(30))
    assert foreign == []


def test_a_listing_begins_with_what_is_there_then(rig):
    mine = [number for number in range(100) if rig.key(number).text.endswith("0")]
    rig.keep(*mine[:-1])
    rig.backend._scan(None, 1)  # stopped in the first folder
    rig.keep(mine[-1])
    assert sorted(rig.listing()[0]) == sorted(rig.key(number) for number in mine)


def test_values_are_spread_over_paths_and_found_after_a_reorder(new_rig):
    rig = new_rig(path=("/a", "/b", "/c")).open()
    rig.keep(*range(30))
    for root in "abc":
        assert sum(path.startswith(f"/{root}/") and len(path) > 100 for path in rig.disk.walk()) > 3
    assert len(rig.listing()[0]) == 30
    rig.close()
    again = rig.again(path=("/c", "/b", "/d", "/a"))
    assert None not in again.lookup(*range(30))
    assert again.store(5) == PRESENT
    assert again.get(5) == again.value(5)
    assert again.delete(*range(30)) == 30


def test_a_full_path_gives_way_to_the_others(new_rig):
    rig = new_rig(path=("/a", "/b")).open()
    rig.files.fail("allocate", errno.ENOSPC, path="/a/", times=100)
    rig.keep(*range(20))
    assert None not in rig.lookup(*range(20))


def test_a_dead_disk_among_several_takes_only_its_own_values(new_rig, caplog):
    rig = new_rig(path=("/well", "/dead")).open()
    homes = {number: rig.backend._roots_of(rig.key(number))[0].path for number in range(40)}
    well = [number for number, home in homes.items() if home == "/well"]
    dead = [number for number, home in homes.items() if home == "/dead"]
    rig.keep(*well[:5], *dead[:5])
    rig.files.fail("", errno.EIO, path="/dead", times=1 << 60)
    assert [rig.get(number) for number in well[:5]] == [rig.value(number) for number in well[:5]]
    assert rig.lookup(well[5]) == [None]
    assert rig.load(well[5])[0].status is LoadStatus.MISSED
    rig.keep(*well[5:10])
    with pytest.raises(Unavailable, match="lookup failed"):
        rig.lookup(dead[0])
    assert isinstance(rig.load(dead[0])[0].error, Unavailable)
    assert rig.store(dead[5]).status is StoreStatus.FAILED
    assert caplog.text.count("/dead cannot be asked") == 1


@pytest.mark.parametrize("block", [4096, 65_536])
def test_footprint_counts_in_blocks_of_the_file_system(new_rig, block, monkeypatch):
    monkeypatch.setattr("lmcache_core.testing.disk.BLOCK", block)
    monkeypatch.setattr("lmcache_core.testing.files.BLOCK", block)
    rig = new_rig(path=("/a", "/b")).open()
    rig.keep(0)
    node = next(rig.disk.find(path) for path in rig.disk.walk() if rig.key(0).text in path)
    assert node.allocated == -(-5000 // block) * block
    assert rig.backend._usage().nbytes == rig.backend.footprint(5000)


def test_footprint_covers_what_a_value_takes(rig):
    rig.keep(0)
    (found,) = rig.lookup(0)
    assert rig.disk.find(rig.path(0)).allocated <= rig.backend.footprint(found.nbytes)
    assert rig.backend.footprint(0) > 0
    assert rig.backend._usage().nbytes == rig.backend.footprint(5000)


def test_capabilities_say_what_the_options_make_of_it(new_rig):
    assert new_rig(sync=Sync.DURABLE).backend.capabilities.durability is Durability.POWER
    assert new_rig(sync=Sync.ORDERED).backend.capabilities.durability is Durability.PROCESS
    plain: Capabilities = new_rig(direct=Direct.OFF).backend.capabilities
    assert (plain.alignment, plain.shared, plain.hints) == (1, False, False)
    assert new_rig().backend.capabilities.alignment == 4096
