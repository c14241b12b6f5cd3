"""The laws catch wrong implementations: each mutant breaks the law named beside it."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import xxhash

from lmcache_core.ops import PlaneTable, Reference
from lmcache_core.spi.layout import Interior
from lmcache_core.testing.ops import OpsTests

MUTANTS: list[tuple[type[Reference], str, tuple[object, ...]]] = []


def breaks(law: str, *arguments: object) -> Any:
    def register(mutant: type[Reference]) -> type[Reference]:
        MUTANTS.append((mutant, law, arguments))
        return mutant

    return register


@breaks("test_copy_moves_every_byte_and_no_other")
class ForgetsTheLastByte(Reference):
    @staticmethod
    def copy(dst: Any, src: Any, *, threads: int = 1) -> None:
        Reference.copy(dst[:-1], src[:-1]) if len(src) else None


@breaks("test_overlapping_copy_reads_its_source_first", 100, 1)
class CopiesForwards(Reference):
    @staticmethod
    def copy(dst: Any, src: Any, *, threads: int = 1) -> None:
        for i in range(len(src)):
            dst[i] = src[i]


@breaks("test_digest_is_xxh3_128")
class IgnoresTheSeed(Reference):
    @staticmethod
    def digest(data: Any, seed: int) -> bytes:
        return xxhash.xxh3_128_digest(data)


@breaks("test_large_copies_are_exact_at_any_alignment", 1, 0)
class DigestsWithoutCopying(Reference):
    @staticmethod
    def copy_and_digest(dst: Any, src: Any, seed: int) -> bytes:
        return Reference.digest(src, seed)


@breaks("test_chain_links_full_chunks_by_the_published_formula")
class HashesTheTail(Reference):
    @staticmethod
    def chain(root: Any, tokens: Any, chunk_tokens: int) -> bytes:
        whole = Reference.chain(root, tokens, chunk_tokens)
        tail = memoryview(tokens).cast("B")[len(whole) // 8 * chunk_tokens :]
        return whole + (Reference.chain(root, tail, len(tail) // 4) if len(tail) else b"")


@breaks("test_chain_links_full_chunks_by_the_published_formula")
class ForgetsThePrefix(Reference):
    @staticmethod
    def chain(root: Any, tokens: Any, chunk_tokens: int) -> bytes:
        view, step = memoryview(tokens).cast("B"), 4 * chunk_tokens
        chunks = range(0, len(view) - step + 1, step)
        return b"".join(Reference.chain(root, view[at : at + step], chunk_tokens) for at in chunks)


@breaks("test_chain_refuses_what_could_be_read_as_other_tokens")
class TakesAnyIntegers(Reference):
    @staticmethod
    def chain(root: Any, tokens: Any, chunk_tokens: int) -> bytes:
        return Reference.chain(root, memoryview(tokens).cast("B"), chunk_tokens)


@breaks("test_an_id_that_does_not_fit_is_named", -1)
class WrapsIds(Reference):
    @staticmethod
    def pack_tokens(ids: Any) -> bytes:
        return Reference.pack_tokens([value % 2**32 for value in ids])


@breaks("test_gather_and_scatter_move_exactly_the_selected_cells")
class IgnoresFirst(Reference):
    @staticmethod
    def gather(table: PlaneTable, block_ids: Any, first: int, *rest: Any, **named: Any) -> Any:
        return Reference.gather(table, block_ids, 0, *rest, **named)


@breaks("test_large_selections_are_exact_in_every_order", "LBHNC", Interior.ROWS, 132, 8, 1)
class IgnoresStrides(Reference):
    @staticmethod
    def scatter(table: PlaneTable, block_ids: Any, first: int, *rest: Any, **named: Any) -> int:
        swapped = PlaneTable(table.specs)
        swapped.specs = tuple(reversed(table.specs))
        return Reference.scatter(swapped, block_ids, first, *rest, **named)


@breaks("test_scatter_copies_all_and_names_the_first_damaged_segment")
class NamesTheLastDamage(Reference):
    @staticmethod
    def scatter(*part: Any, **named: Any) -> int:
        found = Reference.scatter(*part, **named)
        return found if found < 0 else len(named["digests"]) // 16 - 1


@breaks("test_scatter_copies_all_and_names_the_first_damaged_segment")
class TrustsEveryPayload(Reference):
    @staticmethod
    def scatter(*part: Any, **named: Any) -> int:
        Reference.scatter(*part)
        return -1


@breaks("test_a_foreign_block_id_is_refused_before_anything_moves", -1)
class ClampsBlocks(Reference):
    @staticmethod
    def gather(table: PlaneTable, block_ids: Any, *rest: Any, **named: Any) -> Any:
        ids = array("q", [min(max(block, 0), table.blocks - 1) for block in block_ids])
        return Reference.gather(table, ids, *rest, **named)


@breaks("test_a_foreign_block_id_is_refused_before_anything_moves", 4)
class ChecksAfterwards(Reference):
    @staticmethod
    def gather(*part: Any, **named: Any) -> Any:
        part[-1][:1] = b"\0"
        return Reference.gather(*part, **named)


@breaks("test_pages_move_whole_or_not_at_all", 1, 4)
class RoundsPages(Reference):
    @staticmethod
    def gather(table: PlaneTable, block_ids: Any, *rest: Any, **named: Any) -> Any:
        return Reference.gather(table, block_ids, 0, 4, bytearray(table.nbytes(4)))


@breaks("test_populate_changes_no_byte", 1, 1)
class OnlyPretends(Reference):
    @staticmethod
    def populate(view: Any, *, threads: int = 1) -> None:
        Reference.populate(view[:0], threads=threads)


@pytest.mark.parametrize(
    ("mutant", "law", "arguments"), MUTANTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_wrong_implementation_breaks_its_law(
    mutant: type[Reference], law: str, arguments: tuple[object, ...]
) -> None:
    subject, right = OpsTests(), OpsTests()
    subject.ops, right.ops = mutant, Reference  # type: ignore[misc]
    getattr(right, law)(*arguments)
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        getattr(subject, law)(*arguments)
