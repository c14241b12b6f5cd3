"""Every instruction set of this machine obeys the laws, and agrees with the reference byte by byte."""

from __future__ import annotations

import ast
import importlib
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.ops import NAMES, PlaneTable, Reference
from lmcache_core.testing.ops import OpsTests
from lmcache_core.testing.pages import Pages, aligned, selections

ops = pytest.importorskip(
    "lmcache_native.ops", reason="not built: pip install --no-build-isolation ./csrc"
)


@pytest.fixture(params=ops.INSTRUCTION_SETS, scope="class")
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    """All tests of a class, once with each set this machine has."""
    ops.select(request.param)
    yield
    ops.select(ops.INSTRUCTIONS)


@pytest.mark.usefixtures("instruction_set")
class TestNative(OpsTests):
    ops = ops

    @settings(deadline=None, max_examples=60)
    @given(chosen=selections(), seed=st.integers(0, 2**64 - 1), threads=st.integers(1, 3))
    def test_paged_copies_equal_the_reference(
        self, chosen: tuple[Pages, array[int], int, int, int], seed: int, threads: int
    ) -> None:
        pages, ids, first, count, offset = chosen
        table = PlaneTable(pages.specs)
        ours, theirs = (aligned(table.nbytes(count), offset) for _ in range(2))
        part = (table, ids, first, count)
        digests = ops.gather(*part, ours, seed=seed, threads=threads)
        assert digests == Reference.gather(*part, theirs, seed=seed)
        assert ours == theirs
        damaged = bytearray(ours)
        if damaged:
            damaged[seed % len(damaged)] ^= 1
        after = []
        for subject in (ops, Reference):
            found = subject.scatter(*part, damaged, seed=seed, digests=digests, threads=threads)
            after.append((found, bytes(pages.memory)))
            subject.scatter(*part, ours, seed=seed, digests=digests)
        assert after[0] == after[1]

    @settings(deadline=None, max_examples=60)
    @given(
        data=st.binary(max_size=2000),
        seed=st.integers(0, 2**64 - 1),
        repeat=st.sampled_from((1, 2, 700)),
    )
    def test_digests_equal_the_reference(self, data: bytes, seed: int, repeat: int) -> None:
        data *= repeat
        ours, theirs = bytearray(len(data)), bytearray(len(data))
        expected = Reference.copy_and_digest(theirs, data, seed)
        assert ops.copy_and_digest(ours, data, seed) == ops.digest(data, seed) == expected
        assert ours == theirs

    @settings(deadline=None, max_examples=60)
    @given(
        ids=st.lists(st.integers(-(2**33), 2**33) | st.booleans(), max_size=200),
        root=st.binary(min_size=32, max_size=32),
        chunk=st.integers(1, 70),
    )
    def test_chains_equal_the_reference(self, ids: list[int], root: bytes, chunk: int) -> None:
        fits = [value % 2**32 for value in ids]
        packed = ops.pack_tokens(fits)
        assert packed == Reference.pack_tokens(fits)
        assert ops.chain(root, packed, chunk) == Reference.chain(root, packed, chunk)
        if any(not 0 <= value < 2**32 for value in ids):
            with pytest.raises(ValueError) as ours:
                ops.pack_tokens(ids)
            with pytest.raises(ValueError) as theirs:
                Reference.pack_tokens(ids)
            assert str(ours.value) == str(theirs.value)


def test_all_operations_are_there_and_the_best_set_is_named() -> None:
    assert set(NAMES) <= set(vars(ops))
    assert ops.INSTRUCTION_SETS[0] == ops.INSTRUCTIONS
    assert ops.INSTRUCTION_SETS[-1] == "scalar"


def test_an_instruction_set_that_is_not_here_is_refused() -> None:
    with pytest.raises(ValueError, match="'sse9' does not run here"):
        ops.select("sse9")


def test_a_list_that_changes_while_it_is_packed_is_an_error_and_not_a_stray_read() -> None:
    class Cutting:
        def __index__(self) -> int:
            ids.clear()
            return 1

    ids: list[object] = [1, Cutting(), 2, 3]
    with pytest.raises(IndexError):
        ops.pack_tokens(ids)


def test_calls_leave_no_hold_on_their_buffers() -> None:
    room = bytearray(4096)
    ops.copy(room, bytes(4096))
    with pytest.raises(ValueError):
        ops.copy(room, bytes(1))
    with pytest.raises(ValueError):
        ops.digest(room, -1)
    room.clear()  # a buffer still exported could not change its length
    assert room == b""


def test_the_stub_says_what_the_module_offers() -> None:
    package = importlib.import_module("lmcache_native")
    stub = Path(str(package.__file__)).with_name("ops.pyi").read_text()
    functions = {n for n in vars(ops) if not n.startswith("_") and callable(getattr(ops, n))}
    written = ast.parse(stub).body
    assert {n.name for n in written if isinstance(n, ast.FunctionDef | ast.ClassDef)} - {
        "PlaneTable"
    } == functions
    constants = {n.target.id for n in written if isinstance(n, ast.AnnAssign)}  # type: ignore[union-attr]
    assert constants == {n for n in vars(ops) if n.isupper()}
