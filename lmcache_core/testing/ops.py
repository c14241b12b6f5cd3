"""Laws of the byte operations, for the reference and for every implementation that wants its place.

Expected bytes come from a plain walk over addresses, written here a second time on purpose, and from
``hashlib`` and ``xxhash``; the reference itself is one of the subjects.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import struct
import threading
from array import array
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_core.ops import CHUNK_TAG, PlaneTable
from lmcache_core.spi.layout import Interior
from lmcache_core.testing.pages import ORDERS, Pages, aligned, make_pages, selections

EDGES = (0, 1, 3, 4, 8, 9, 16, 17, 63, 64, 65, 128, 129, 159, 160, 240, 241, 1023, 1024, 1025, 1088)
"""Lengths at which xxh3 changes its way."""

_relaxed = settings(
    deadline=None,
    max_examples=60,
    # laws are inherited, so one test has many executors by design
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
)
_seeds = st.sampled_from((0, 1, 0x9E3779B97F4A7C15, 2**63, 2**64 - 1))
_offsets = st.sampled_from((0, 1, 3, 32, 64))


class OpsTests:
    """Subclass with ``ops`` set to the implementation: a module or a class with the operations."""

    ops: ClassVar[Any]

    @_relaxed
    @given(data=st.binary(max_size=600), left=_offsets, right=_offsets)
    def test_copy_moves_every_byte_and_no_other(self, data: bytes, left: int, right: int) -> None:
        source, target = aligned(len(data), left), aligned(len(data) + 2, right)
        source[:] = data
        assert self.ops.copy(target[1:-1], source) is None
        assert bytes(target) == b"\xa5" + data + b"\xa5"

    @pytest.mark.parametrize("threads", [1, 2, 7])
    @pytest.mark.parametrize("offset", [0, 1, 63])
    def test_large_copies_are_exact_at_any_alignment(self, threads: int, offset: int) -> None:
        data = os.urandom((9 << 20) + 77)
        target = aligned(len(data) + 2, offset)
        self.ops.copy(target[1:-1], data, threads=threads)
        assert target[1:-1] == data
        assert (target[0], target[-1]) == (0xA5, 0xA5)
        target[1:-1] = bytes(len(data))
        assert self.ops.copy_and_digest(target[1:-1], data, 3) == xxhash.xxh3_128_digest(data, 3)
        assert target[1:-1] == data
        assert (target[0], target[-1]) == (0xA5, 0xA5)

    @pytest.mark.parametrize("nbytes", [100, (2 << 20) + 5])
    @pytest.mark.parametrize("shift", [-65, -1, 0, 1, 65])
    def test_overlapping_copy_reads_its_source_first(self, nbytes: int, shift: int) -> None:
        for digested in (False, True):
            room = bytearray(os.urandom(nbytes + 200))
            view, before = memoryview(room), bytes(room[100 : 100 + nbytes])
            target = view[100 + shift : 100 + shift + nbytes]
            if digested:
                result = self.ops.copy_and_digest(target, view[100 : 100 + nbytes], 0)
                assert result == xxhash.xxh3_128_digest(before)
            else:
                self.ops.copy(target, view[100 : 100 + nbytes])
            assert target == before

    @_relaxed
    @given(data=st.binary(max_size=3000), seed=_seeds, offset=_offsets)
    def test_digest_is_xxh3_128(self, data: bytes, seed: int, offset: int) -> None:
        source, target = aligned(len(data), offset), aligned(len(data), 64 - offset)
        source[:] = data
        expected = xxhash.xxh3_128_digest(data, seed)
        assert self.ops.digest(source, seed) == expected
        assert self.ops.copy_and_digest(target, source, seed) == expected
        assert target == data

    @pytest.mark.parametrize("nbytes", EDGES)
    def test_digest_holds_at_every_edge_of_the_algorithm(self, nbytes: int) -> None:
        for seed in (0, 2**64 - 1):
            data = hashlib.shake_128(bytes([seed % 251])).digest(nbytes)
            assert self.ops.digest(data, seed) == xxhash.xxh3_128_digest(data, seed)

    def test_digest_has_not_changed_since_the_first_release(self) -> None:
        assert self.ops.digest(b"lmcache", 7).hex() == "e9127d8ec99b09bc28d25e75d17a248a"
        root = self.ops.chain(bytes(32), self.ops.pack_tokens(range(8)), 4)[32:]
        assert root.hex() == "a23483788718efdd45489d2f5fec098aee6f0121d989847ecdc5efa81568d3b0"

    @_relaxed
    @given(
        ids=st.lists(st.integers(0, 2**32 - 1), max_size=80),
        chunk=st.sampled_from((1, 2, 3, 4, 16, 40, 256)),
        root=st.binary(min_size=32, max_size=32),
    )
    def test_chain_links_full_chunks_by_the_published_formula(
        self, ids: list[int], chunk: int, root: bytes
    ) -> None:
        previous, expected = root, b""
        for at in range(0, len(ids) - chunk + 1, chunk):
            words = struct.pack(f"<I{chunk}II", chunk, *ids[at : at + chunk], 0)
            previous = hashlib.sha256(CHUNK_TAG + previous + words).digest()
            expected += previous
        packed = self.ops.pack_tokens(ids)
        assert self.ops.chain(root, packed, chunk) == expected
        assert self.ops.chain(memoryview(root), array("I", ids), chunk) == expected

    def test_chain_refuses_what_could_be_read_as_other_tokens(self) -> None:
        for tokens in (array("q", [1, 2]), b"12345", array("H", [1, 2])):
            with pytest.raises(ValueError, match="uint32"):
                self.ops.chain(bytes(32), tokens, 1)
        for root, chunk in ((bytes(31), 1), (bytes(32), 0), (bytes(32), 1 << 32)):
            with pytest.raises(ValueError, match="root"):
                self.ops.chain(root, b"", chunk)

    @_relaxed
    @given(
        ids=st.lists(st.integers(0, 2**32 - 1), max_size=50), kind=st.sampled_from((list, tuple))
    )
    def test_token_ids_are_packed_little_endian(self, ids: list[int], kind: type) -> None:
        assert self.ops.pack_tokens(kind(ids)) == struct.pack(f"<{len(ids)}I", *ids)

    @pytest.mark.parametrize("bad", [-1, 2**32, 2**70, -(2**70)])
    def test_an_id_that_does_not_fit_is_named(self, bad: int) -> None:
        with pytest.raises(ValueError, match=rf"token id {bad} at position 2\b"):
            self.ops.pack_tokens([0, 2**32 - 1, bad, -5])
        with pytest.raises(TypeError):
            self.ops.pack_tokens([1, "2"])

    @_relaxed
    @given(chosen=selections(), seed=_seeds, threads=st.integers(1, 3))
    def test_gather_and_scatter_move_exactly_the_selected_cells(
        self, chosen: tuple[Pages, array[int], int, int, int], seed: int, threads: int
    ) -> None:
        pages, ids, first, count, offset = chosen
        self._check_both_ways(pages, ids, first, count, offset, seed, threads)

    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize("interior", [Interior.ROWS, Interior.PAGE])
    @pytest.mark.parametrize(("cell", "offset", "threads"), [(128, 0, 1), (128, 0, 3), (132, 8, 2)])
    def test_large_selections_are_exact_in_every_order(
        self, order: str, interior: Interior, cell: int, offset: int, threads: int
    ) -> None:
        pages = make_pages(
            order, blocks=90, heads=4, states=16, cell=cell, padding=64, interior=interior
        )
        ids = array("q", [*range(89, 0, -2), *range(0, 90, 2)])
        first = 16 if interior is Interior.PAGE else 5
        count = len(ids) * 16 - first - (32 if interior is Interior.PAGE else 3)
        self._check_both_ways(pages, ids, first, count, offset, 1, threads)

    def _check_both_ways(
        self,
        pages: Pages,
        ids: array[int],
        first: int,
        count: int,
        offset: int,
        seed: int,
        threads: int,
    ) -> None:
        table, cells = PlaneTable(pages.specs), pages.cells(ids, first, count)
        expected = b"".join(pages.memory[at : at + size] for at, size in cells)
        payload = aligned(len(expected) + 2, offset)
        body = payload[1:-1] if offset % 2 else payload[:-2]
        part = (table, ids, first, count, body)
        assert self.ops.gather(*part, threads=threads) is None
        assert body == expected
        body[:] = bytes(len(expected))
        digests = self.ops.gather(*part, seed=seed, threads=threads)
        assert body == expected
        assert payload[-1] == 0xA5
        planes = len(pages.specs) // table.segments
        share = len(expected) // table.segments
        assert table.segments * planes == len(pages.specs)
        assert digests == b"".join(
            xxhash.xxh3_128_digest(expected[i * share : (i + 1) * share], seed)
            for i in range(table.segments)
        )
        fresh = bytearray(b"\xa5") * len(pages.memory)
        done = 0
        for at, size in cells:
            fresh[at : at + size] = expected[done : done + size]
            done += size
        for kept in ({}, {"seed": seed, "digests": digests}):
            pages.memory[:] = b"\xa5" * len(pages.memory)
            assert self.ops.scatter(*part, threads=threads, **kept) == -1
            assert pages.memory == fresh

    def test_scatter_copies_all_and_names_the_first_damaged_segment(self) -> None:
        pages = make_pages("LBNHC", layers=5, cell=72)
        table, ids = PlaneTable(pages.specs), array("q", [2, 0])
        payload = bytearray(table.nbytes(7))
        digests = self.ops.gather(table, ids, 1, 7, payload, seed=11)
        share = len(payload) // table.segments
        for segment, threads in itertools.product(range(table.segments), (1, 3)):
            for at in (segment * share, (segment + 1) * share - 1):
                damaged = bytearray(payload)
                damaged[at] ^= 0x10
                damaged[-1] ^= 1  # the last one is damaged too: the first is reported
                back = {"seed": 11, "digests": digests, "threads": threads}
                assert self.ops.scatter(table, ids, 1, 7, damaged, **back) == segment
                assert (
                    self.ops.gather(table, ids, 1, 7, bytearray(len(payload)), seed=11) != digests
                )
        assert self.ops.scatter(table, ids, 1, 7, payload, seed=11, digests=digests) == -1
        assert self.ops.scatter(table, ids, 1, 7, payload, seed=12, digests=digests) == 0

    @pytest.mark.parametrize("bad", [-1, 4, 2**40, -(2**63)])
    def test_a_foreign_block_id_is_refused_before_anything_moves(self, bad: int) -> None:
        pages = make_pages("BLHNC")
        table, ids = PlaneTable(pages.specs), array("q", [0, bad, 1])
        before, payload = bytes(pages.memory), aligned(table.nbytes(8))
        for call in (self.ops.gather, self.ops.scatter):
            with pytest.raises(ValueError, match=f"block {bad} is outside"):
                call(table, ids, 0, 8, payload)
        assert pages.memory == before
        assert payload == b"\xa5" * len(payload)
        part = payload[: table.nbytes(4)]
        self.ops.gather(table, ids, 0, 4, part)  # an id that is not used may be anything
        self.ops.gather(table, ids, 8, 4, part)

    @pytest.mark.parametrize(
        ("first", "count", "nbytes", "message"),
        [
            (-1, 2, 512, "not within"),
            (0, -1, 0, "not within"),
            (7, 2, 512, "not within"),
            (2**62, 2**62, 0, "not within"),
            (0, 2, 511, "bytes"),
            (0, 2, 513, "bytes"),
        ],
    )
    def test_a_selection_or_length_that_does_not_fit_is_refused(
        self, first: int, count: int, nbytes: int, message: str
    ) -> None:
        table, ids = PlaneTable(make_pages("LBNHC", layers=1).specs), array("q", [0, 1])
        for call in (self.ops.gather, self.ops.scatter):
            with pytest.raises(ValueError, match=message):
                call(table, ids, first, count, bytearray(nbytes))

    @pytest.mark.parametrize(("first", "count"), [(1, 4), (0, 3), (4, 1)])
    def test_pages_move_whole_or_not_at_all(self, first: int, count: int) -> None:
        rows = make_pages("LBHNC", interior=Interior.PAGE).specs
        mixed = (make_pages("LBHNC").specs[0], *rows[1:])
        for specs in (rows, mixed):
            table, ids = PlaneTable(specs), array("q", [0, 1])
            for call in (self.ops.gather, self.ops.scatter):
                with pytest.raises(ValueError, match="cut a block"):
                    call(table, ids, first, count, bytearray(table.nbytes(count)))

    def test_arguments_that_are_not_what_they_seem_are_refused(self) -> None:
        ops, room = self.ops, bytearray(64)
        table, ids = PlaneTable(make_pages("LBNHC", layers=1).specs), array("q", [0])
        payload = bytearray(table.nbytes(1))
        refused: list[Callable[[], object]] = [
            lambda: ops.copy(room, bytes(63)),
            lambda: ops.copy(bytes(64), room),
            lambda: ops.copy(memoryview(room)[::2], bytes(32)),
            lambda: ops.copy(room, memoryview(bytes(128))[::2]),
            lambda: ops.copy(room, bytes(64), threads=0),
            lambda: ops.copy_and_digest(room, bytes(63), 0),
            lambda: ops.copy_and_digest(room, bytes(64), -1),
            lambda: ops.digest(room, 1 << 64),
            lambda: ops.digest(memoryview(room)[::2], 0),
            lambda: ops.gather(table, array("i", [0, 0]), 0, 1, payload),
            lambda: ops.gather(table, array("d", [0]), 0, 1, payload),
            lambda: ops.gather(table, ids, 0, 1, bytes(payload)),
            lambda: ops.gather(table, ids, 0, 1, payload, seed=-1),
            lambda: ops.gather(table, ids, 0, 1, payload, threads=-1),
            lambda: ops.scatter(table, ids, 0, 1, payload, seed=1),
            lambda: ops.scatter(table, ids, 0, 1, payload, digests=bytes(16)),
            lambda: ops.scatter(table, ids, 0, 1, payload, seed=1, digests=bytes(15)),
            lambda: ops.populate(memoryview(room)[::2]),
            lambda: ops.populate(room, threads=0),
        ]
        for call in refused:
            with pytest.raises(ValueError):
                call()
        for value in ("text", 1, None):
            with pytest.raises(TypeError):
                ops.copy(room, value)
            with pytest.raises(TypeError):
                ops.digest(value, 0)
        assert room == bytes(64)
        assert payload == bytes(len(payload))

    def test_nothing_is_a_legal_amount(self) -> None:
        empty = PlaneTable(())
        self.ops.copy(bytearray(), b"")
        self.ops.populate(bytearray())
        assert self.ops.pack_tokens([]) == self.ops.chain(bytes(32), b"", 256) == b""
        assert self.ops.gather(empty, array("q"), 0, 0, bytearray(), seed=1) == b""
        assert self.ops.scatter(empty, array("q"), 0, 0, b"") == -1

    @pytest.mark.parametrize("threads", [1, 3])
    @pytest.mark.parametrize("access", [mmap.ACCESS_WRITE, mmap.ACCESS_READ])
    def test_populate_changes_no_byte(self, threads: int, access: int) -> None:
        size = (40 << 20) + 5
        descriptor = os.memfd_create("populate")
        try:
            os.ftruncate(descriptor, size)
            os.pwrite(descriptor, b"kept", size - 4)
            with mmap.mmap(descriptor, size, access=access) as mapped:
                view = memoryview(mapped)
                self.ops.populate(view, threads=threads)
                self.ops.populate(view[1:], threads=threads)
                assert bytes(view[-4:]) == b"kept"
                assert not any(view[: 1 << 20])
                view.release()
            assert os.fstat(descriptor).st_blocks * 512 >= size & -mmap.PAGESIZE
        finally:
            os.close(descriptor)

    def test_many_callers_share_the_helpers(self) -> None:
        data, wrong = os.urandom(9 << 20), []

        def work(number: int) -> None:
            target = bytearray(len(data))
            for _ in range(3):
                self.ops.copy(target, data, threads=number % 4 + 1)
                if self.ops.digest(target, number) != xxhash.xxh3_128_digest(data, number):
                    wrong.append(number)

        callers = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert wrong == []
