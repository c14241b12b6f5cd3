from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.identity import (
    Chain,
    Extra,
    Unkeyable,
    chunk_digests,
    embedding_extras,
    keys,
    probe_digest,
)
from tests.identity.samples import plain_chain, space

ROOT = bytes(range(32))
IDS = list(range(100, 150))
GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "chain.json"


def media(name: str, begin: int, end: int) -> Extra:
    return Extra("media", name.encode().ljust(32, b"."), begin, end)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], int, list[Extra]]:
    ids = draw(st.lists(st.integers(0, 2**32 - 1), max_size=60))
    spans = draw(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 30)), max_size=4))
    kinds = st.sampled_from(["media", "embedding"])
    found = [
        Extra(draw(kinds), draw(st.binary(min_size=16, max_size=32)), b, b + n) for b, n in spans
    ]
    return ids, draw(st.integers(1, 9)), found


@given(prompts())
def test_chain_equals_its_plain_writing(prompt: tuple[list[int], int, list[Extra]]) -> None:
    ids, size, extras = prompt
    expected = plain_chain(ROOT, ids, size, extras)
    assert chunk_digests(ROOT, ids, size, extras=extras, partial=True) == expected
    assert chunk_digests(ROOT, ids, size, extras=extras) == expected[: len(ids) // size]


@given(prompts(), st.lists(st.integers(0, 60), max_size=5))
def test_growing_in_any_steps_gives_the_same_digests(
    prompt: tuple[list[int], int, list[Extra]], cuts: list[int]
) -> None:
    ids, size, extras = prompt
    chain = Chain(ROOT, size, extras=extras)
    fresh: list[bytes] = []
    for a, b in pairwise([0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]):
        fresh += chain.extend(ids[a:b])
    last = chain.partial()
    assert fresh == chain.digests
    assert chain.tokens == len(ids)
    assert fresh + ([last] if last else []) == plain_chain(ROOT, ids, size, extras)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_lists_and_buffers_of_equal_ids_agree(ids: list[int]) -> None:
    """Seen in LMCache#1150."""
    expected = chunk_digests(ROOT, ids, 8)
    packed = array("I", ids)
    assert chunk_digests(ROOT, memoryview(packed), 8) == expected
    assert chunk_digests(ROOT, memoryview(packed.tobytes()), 8) == expected
    assert chunk_digests(ROOT, memoryview(array("q", ids)), 8) == expected


def test_golden_chains_hold() -> None:
    """Seen in LMCache#2581."""
    cases = json.loads(GOLDEN.read_text())["cases"]
    assert {case["name"] for case in cases} >= {
        "text", "text-prefix-then-image", "two-images", "two-images-swapped", "embeddings",
        "embeddings-mixed", "partial",
    }  # fmt: skip
    for case in cases:
        extras = [
            Extra(e["kind"], bytes.fromhex(e["digest"]), e["begin"], e["end"])
            for e in case["extras"]
        ]
        root, size = bytes.fromhex(case["root"]), case["chunk_tokens"]
        found = chunk_digests(root, case["tokens"], size, extras=extras, partial=True)
        assert [digest.hex() for digest in found] == case["digests"], case["name"]


def test_an_image_changes_its_own_chunks_and_later_ones_only() -> None:
    """LMCache#690"""
    plain = chunk_digests(ROOT, IDS, 8)
    first = chunk_digests(ROOT, IDS, 8, extras=[media("cat", 20, 30)])
    second = chunk_digests(ROOT, IDS, 8, extras=[media("dog", 20, 30)])
    assert plain[:2] == first[:2] == second[:2]
    assert not {*plain[2:]} & {*first[2:]} and not {*first[2:]} & {*second[2:]}


@pytest.mark.parametrize(
    "other",
    [
        media("cat", 21, 31),
        media("cat", 20, 31),
        media("cow", 20, 30),
        Extra("user", media("cat", 20, 30).digest, 20, 30),
    ],
)
def test_place_length_kind_and_content_of_an_extra_all_count(other: Extra) -> None:
    """Seen in sglang#24638."""
    base = chunk_digests(ROOT, IDS, 16, extras=[media("cat", 20, 30)])
    assert chunk_digests(ROOT, IDS, 16, extras=[other])[1:] != base[1:]


def test_a_later_part_of_a_medium_is_not_its_first_part() -> None:
    """Two prompts whose second chunks hold equal ids but other parts of one long picture."""
    early = Chain(ROOT, 8, extras=[media("map", 0, 40)]).extend([0] * 16)
    late = Chain(ROOT, 8, extras=[media("map", 4, 44)]).extend([0] * 16)
    assert early[0] != late[0] and early[1] != late[1]


def test_order_in_which_extras_are_listed_does_not_matter() -> None:
    """Seen in LMCache#2310."""
    extras = [media("cat", 3, 9), media("dog", 3, 9), Extra("user", b"u" * 16, 0, 0)]
    assert chunk_digests(ROOT, IDS, 8, extras=extras) == chunk_digests(
        ROOT, IDS, 8, extras=extras[::-1]
    )


def test_swapped_images_are_another_prompt() -> None:
    """LMCache#4086"""
    one = chunk_digests(ROOT, IDS, 8, extras=[media("cat", 0, 4), media("dog", 4, 8)])
    two = chunk_digests(ROOT, IDS, 8, extras=[media("dog", 0, 4), media("cat", 4, 8)])
    assert one[0] != two[0]


def test_digests_that_agree_in_many_bits_stay_apart() -> None:
    """LMCache#3301: 2,000 images, all alike in the last 16 bits."""
    found = {
        chunk_digests(ROOT, [0] * 8, 8, extras=[Extra("media", i.to_bytes(30) + b"zz", 0, 8)])[0]
        for i in range(2000)
    }
    assert len(found) == 2000


def test_embedding_prompts_of_equal_length_differ_where_their_rows_differ() -> None:
    """Ids of embedded positions are all zero in the engine."""
    rows = bytearray(40 * 6)
    one = embedding_extras(memoryview(rows), 6, 0, dtype="float16", chunk_tokens=8)
    rows[17 * 6] = 1
    two = embedding_extras(memoryview(rows), 6, 0, dtype="float16", chunk_tokens=8)
    a, b = (chunk_digests(ROOT, [0] * 40, 8, extras=e) for e in (one, two))
    assert a[:2] == b[:2]
    assert all(x != y for x, y in zip(a[2:], b[2:], strict=True))
    assert [(e.begin, e.end) for e in one] == [(i, i + 8) for i in range(0, 40, 8)]


def test_embeddings_in_the_middle_are_cut_at_chunk_borders() -> None:
    found = embedding_extras(memoryview(bytes(50)), 5, 13, dtype="float32", chunk_tokens=8)
    assert [(e.begin, e.end) for e in found] == [(13, 16), (16, 23)]
    other = embedding_extras(memoryview(bytes(50)), 5, 13, dtype="int8", chunk_tokens=8)
    assert found[0].digest != other[0].digest
    with pytest.raises(Unkeyable, match="no multiple"):
        embedding_extras(memoryview(bytes(51)), 5, 0, dtype="int8", chunk_tokens=8)


@pytest.mark.parametrize("ids", [[1, -1], [2**32], [1, None], [1.5], ["1"]])
def test_an_id_that_is_no_token_is_refused(ids: list[int]) -> None:
    """Seen in LMCache#1150."""
    with pytest.raises(Unkeyable, match="token ids"):
        chunk_digests(ROOT, ids, 1)


def test_signed_placeholders_in_a_buffer_are_refused() -> None:
    with pytest.raises(Unkeyable, match="-1 at position 2"):
        chunk_digests(ROOT, memoryview(array("i", [5, 6, -1])), 1)
    with pytest.raises(Unkeyable, match="whole number"):
        chunk_digests(ROOT, memoryview(b"12345"), 1)


@pytest.mark.parametrize(
    ("kind", "digest", "begin", "end"),
    [
        ("", b"x" * 32, 0, 1),
        ("\u00fc", b"x" * 32, 0, 1),
        ("k" * 256, b"x" * 32, 0, 1),
        ("media", b"x" * 2, 0, 1),
        ("media", "x" * 32, 0, 1),
        ("media", b"x" * 32, -1, 1),
        ("media", b"x" * 32, 2, 1),
    ],
)
def test_an_extra_that_cannot_be_named_is_refused(
    kind: str, digest: bytes, begin: int, end: int
) -> None:
    with pytest.raises(Unkeyable):
        Extra(kind, digest, begin, end)


def test_an_extra_for_a_chunk_already_named_is_refused_and_nothing_changes() -> None:
    chain = Chain(ROOT, 8)
    chain.extend(IDS[:20])
    with pytest.raises(Unkeyable, match="too late"):
        chain.extend(IDS[20:], extras=[media("cat", 15, 30)])
    assert chain.tokens == 20
    assert (
        chain.extend(IDS[20:], extras=[media("cat", 16, 30)])[0] != (chunk_digests(ROOT, IDS, 8)[2])
    )


def test_short_roots_are_refused() -> None:
    with pytest.raises(Unkeyable, match="31 root bytes"):
        Chain(ROOT[1:], 8)


def test_keys_carry_space_and_group() -> None:
    here = space()
    digests = chunk_digests(here.root, IDS, 16)
    found = keys(here, digests, 1)
    assert [(k.space, k.digest, k.group) for k in found] == [(here.digest, d, 1) for d in digests]
    assert keys(here.digest, digests, 1) == found


@pytest.mark.slow
def test_two_processes_with_other_hash_seeds_and_locales_agree() -> None:
    """LMCache#1139: no environment input, no language hash."""
    code = (
        "from lmcache_core.identity import probe_digest; from tests.identity.samples import space;"
        "print(probe_digest().hex(), space().digest.hex(), space().root.hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"PYTHONHASHSEED": seed, "LC_ALL": locale},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed, locale in [("1", "C"), ("2", "de_DE.UTF-8"), ("random", "tr_TR.UTF-8")]
    }
    assert outputs == {f"{probe_digest().hex()} {space().digest.hex()} {space().root.hex()}\n"}
    assert probe_digest().hex() == json.loads(GOLDEN.read_text())["probe"]
