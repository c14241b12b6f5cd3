from __future__ import annotations

import contextlib
import random
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core import frame, ops
from lmcache_core.spi.errors import Corrupt
from lmcache_core.spi.keys import Key
from lmcache_core.spi.layout import Interior, KVSpec, SegmentSpec

KEY = Key(b"s" * 32, b"d" * 32, 3)
OTHER = Key(b"s" * 32, b"e" * 32, 3)


def spec(*sizes: int, **changes: Any) -> KVSpec:
    segments = tuple(SegmentSpec(i, 0, 4, n) for i, n in enumerate(sizes))
    fields: dict[str, Any] = {
        "dtype": "int8", "tokens": 16, "planes": 2, "heads": 4, "head_dim": 8,
        "interior": Interior.ROWS, "segments": segments,
    }  # fmt: skip
    return KVSpec(**fields | changes)


def sealed(key: Key = KEY, seed: int = 1, *sizes: int, **options: Any) -> bytearray:
    """A whole stored value: header room and payload."""
    form = spec(*(sizes or (300, 40, 7)))
    stored = options.pop("stored", form.nbytes)
    content = random.Random(seed).randbytes(stored)
    if options.get("chain"):
        options["stored"] = (0,) * (len(form.segments) - 1) + (stored,)
    room = frame.header_nbytes(
        len(form.segments), chain=options.get("chain", ()), tags=options.get("tags", ())
    )
    value = bytearray(room) + content
    view = memoryview(value)
    frame.seal_value(view[:room], view[room:], key, spec=form, **options)
    return value


def read(value: bytes | bytearray | memoryview, key: Key | None = KEY) -> frame.Header:
    """What a reader does with a stored value."""
    view = memoryview(value)
    header = frame.open_header(view, key)
    frame.verify(header, view[header.nbytes :])
    return header


names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=15)
labels = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


@given(
    key=st.builds(Key, *[st.binary(min_size=32, max_size=32)] * 2, st.integers(0, 65535)),
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=200),
    dtype=names,
    numbers=st.tuples(*[st.integers(0, 2**32 - 1)] * 3, st.integers(0, 2**63)),
    planes=st.integers(0, 255),
    interior=st.sampled_from(Interior),
    chain=st.lists(names, max_size=4).map(tuple),
    tags=st.lists(labels, max_size=16).map(tuple),
    stored=st.lists(st.integers(0, 50), min_size=200, max_size=200),
    known=st.booleans(),
    approximate=st.booleans(),
    first=st.integers(-1, 2**40),
)
def test_a_header_says_what_was_sealed(
    key: Key, sizes: list[int], dtype: str, numbers: tuple[int, ...], planes: int,
    interior: Interior, chain: tuple[str, ...], tags: tuple[str, ...], stored: list[int], known: bool,
    approximate: bool, first: int,
) -> None:  # fmt: skip
    """Seen in jjang-ai/vmlx#18."""
    tokens, heads, head_dim, created = numbers
    form = spec(
        *sizes, dtype=dtype, tokens=tokens, planes=planes, heads=heads, head_dim=head_dim,
        interior=interior,
    )  # fmt: skip
    raw = random.Random(0).randbytes(form.nbytes)
    stored, approximate = stored[: len(sizes)], approximate and bool(chain)
    payload = raw if not chain else random.Random(1).randbytes(sum(stored))
    digests = frame.segment_digests(memoryview(raw), form, frame.seed_of(key))
    room = bytearray(frame.header_nbytes(len(sizes), chain=chain, tags=tags))
    assert len(room) % 4096 == 0
    written = frame.seal_value(
        memoryview(room), memoryview(payload), key, spec=form, chain=chain,
        digests=digests if known else (), tags=tags, created=created, stored=stored,
        approximate=approximate, first=first,
    )  # fmt: skip
    header = read(room + payload, key)
    assert header == written
    assert (header.key, header.spec, header.chain, header.tags, header.created) == (
        key, form, chain, tags, created,
    )  # fmt: skip
    assert header.nbytes == len(room)
    assert header.identity == bytes(room[-16:])
    assert (header.first, header.approximate) == (first, approximate)
    assert header.stored == (tuple(stored) if chain else tuple(sizes))
    if not approximate:
        assert header.digests == (() if chain and not known else tuple(digests))
    frame.verify_raw(header, memoryview(raw))


def test_one_page_holds_ninety_segments() -> None:
    assert frame.header_nbytes(90, chain=("x12", "zstd", "aesgcm"), tags=("user=someone",)) == 4096
    assert frame.header_nbytes(120) == 8192


def test_a_segment_is_verified_alone() -> None:
    value = sealed()
    header = frame.open_header(memoryview(value), KEY)
    payload = memoryview(value)[header.nbytes :]
    for index, offset in enumerate((0, 300, 340)):
        size = header.spec.segments[index].nbytes
        frame.verify_segment(header, index, payload[offset : offset + size])
    with pytest.raises(Corrupt, match="segment 1 differs"):
        frame.verify_segment(header, 1, payload[0:40])
    with pytest.raises(Corrupt, match="cannot be verified by 39 bytes"):
        frame.verify_segment(header, 1, payload[300:339])
    encoded = frame.open_header(memoryview(sealed(chain=("x12",), stored=100)), KEY)
    with pytest.raises(Corrupt, match="cannot be verified"):
        frame.verify_segment(encoded, 1, payload[300:340])
    lossy = sealed(chain=("q4",), stored=100, approximate=True)
    header, stored = frame.open_header(memoryview(lossy), KEY), memoryview(lossy)[4096:]
    frame.verify_segment(header, 2, stored)
    lossy[4100] ^= 1
    with pytest.raises(Corrupt, match="segment 2 differs"):
        frame.verify_segment(header, 2, stored)


def test_room_behind_the_payload_does_not_count() -> None:
    for value in (sealed(), sealed(chain=("x12",), stored=200)):
        assert read(value + bytes(5000)) == read(value)


def test_decoded_bytes_are_proved_by_the_segment_digests() -> None:
    raw = bytearray(random.Random(1).randbytes(347))
    digests = frame.segment_digests(memoryview(raw), spec(300, 40, 7), frame.seed_of(KEY))
    header = read(sealed(chain=("x12",), stored=99, digests=digests))
    frame.verify_raw(header, memoryview(raw))
    raw[310] ^= 1
    with pytest.raises(Corrupt, match="digest of segment 1"):
        frame.verify_raw(header, memoryview(raw))
    with pytest.raises(Corrupt, match="346 of 347 raw"):
        frame.verify_raw(header, memoryview(raw)[:-1])


def resealed(value: bytearray, offset: int, layout: str, *new: int) -> bytearray:
    """A frame with a field replaced by a writer that also made the header digest anew."""
    struct.pack_into(layout, value, offset, *new)
    value[4080:4096] = ops.digest(memoryview(value)[:4080], 0)
    return value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "0 bytes are too short"),
        (sealed()[:4095], "header length 4096 in 4095 bytes"),
        (sealed()[:-1], "346 of 347 payload bytes"),
        (b"PK" + sealed()[2:], "does not start like a frame"),
        (resealed(sealed(), 8, "<H", 3), "frame version 3, this is 2"),
        (resealed(sealed(), 10, "<I", 4097), "header length 4097"),
        (resealed(sealed(), 10, "<I", 0), "header length 0"),
        (sealed()[:200] + b"x" + sealed()[201:], "header digest differs"),
        (sealed(OTHER), "holds another key"),
        (resealed(sealed(), 14, "<H", 0), "unknown interior 0 or flags 0"),
        (resealed(sealed(), 82, "<B", 9), "unknown interior 9"),
        (resealed(sealed(), 96, "<Q", 348), "segments do not make up a payload"),
        (resealed(sealed(), 104, "<Q", 346), "segments do not make up a payload"),
        (resealed(sealed(), 128, "<I", 0), "cannot hold 0 segments"),
        (resealed(sealed(), 128, "<I", 2**32 - 1), "cannot hold 4294967295 segments"),
        (resealed(sealed(), 132, "<HH", 65535, 65535), "cannot hold 3 segments"),
        (sealed()[:4096] + bytes(347), "digest of segment 0 differs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said(value: bytes | bytearray, reason: str) -> None:
    with pytest.raises(Corrupt, match=reason) as caught:
        read(value)
    assert not caught.value.retryable


@given(st.data())
def test_no_header_made_by_a_faulty_writer_breaks_the_reader(data: st.DataObject) -> None:
    """Any fields behind a right digest: an answer or ``Corrupt``, nothing else."""
    value = sealed(tags=("a=b",))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(14, 400))
        value[at] = data.draw(st.integers(0, 255))
    resealed(value, 14, "<")
    with contextlib.suppress(Corrupt):
        read(value, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"chain": ("sixteen-letters!",), "stored": (1, 1)}, "1 to 15 ASCII"),
        ({"chain": ("",), "stored": (1, 1)}, "1 to 15 ASCII"),
        ({"tags": ("x" * 256,)}, "has 256 bytes"),
        ({"tags": ("t",) * 17}, "17 tags"),
        ({"digests": ()}, "0 digests for 2 segments"),
        ({"digests": (b"x" * 15, b"x" * 16)}, "another length"),
        ({"approximate": True}, "without a serde chain"),
        ({"chain": ("x12",), "stored": (3,)}, "1 stored lengths for 2 segments"),
        ({"spec": spec()}, "for 0 segments"),
        ({"spec": spec(1, 1, planes=256)}, "cannot carry"),
        ({"created": -1}, "cannot carry"),
        ({"room": 4000}, "no multiple of 4096"),
        ({"tags": ("x" * 255,) * 16}, "is short of"),
        ({"key": Key(b"s", b"d" * 32)}, "another length"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_frame_can_carry_is_refused(changes: dict[str, Any], reason: str) -> None:
    room = memoryview(bytearray(changes.pop("room", 4096)))
    options: dict[str, Any] = {"spec": spec(1, 1), "digests": (b"x" * 16,) * 2} | changes
    with pytest.raises(ValueError, match=reason):
        frame.seal(room, options.pop("key", KEY), **options)
    assert not any(room)


def test_a_payload_of_another_length_is_not_sealed() -> None:
    with pytest.raises(ValueError, match="346 bytes, 347 expected"):
        sealed(stored=346)


def test_equal_content_under_two_keys_has_different_digests() -> None:
    one, two = sealed(KEY), sealed(OTHER)
    assert one[4096:] == two[4096:]
    assert not {*read(one, KEY).digests} & {*read(two, OTHER).digests}
    moved = Key(KEY.space, KEY.digest, KEY.group + 1)
    assert len({frame.seed_of(key) for key in (KEY, OTHER, moved)}) == 3


def damage(rng: random.Random, values: dict[Key, bytearray]) -> bytes | bytearray | memoryview:
    """One fault in the value of ``KEY``; every byte is equally likely to be hit."""
    value, other = values[KEY], values[OTHER]
    kind = rng.randrange(8)
    if kind < 4:
        at = rng.randrange(len(value))
        broken = bytearray(value)
        broken[at] ^= 1 << rng.randrange(8) if kind < 3 else rng.randrange(1, 256)
        return broken
    if kind == 4:
        return memoryview(value)[: rng.randrange(len(value))]
    if kind == 5:  # two frames swapped, or torn and joined
        at = rng.choice((0, 4096, rng.randrange(1, 4096), rng.randrange(4097, len(value))))
        broken = bytearray(value[:at] + other[at:])
        return broken
    if kind == 6:  # same place, other content of the same key
        at = rng.randrange(4096, len(value))
        broken = bytearray(value)
        broken[at:] = rng.randbytes(len(value) - at)
        return broken
    return resealed(bytearray(value), 8, "<H", rng.randrange(2, 65536))


@pytest.mark.slow
@pytest.mark.parametrize("chain", [(), ("x12", "zstd")])
def test_fifty_thousand_random_faults_are_all_detected(chain: tuple[str, ...]) -> None:
    rng = random.Random(7)
    values = {k: sealed(k, i, 1500, 1500, 100, chain=chain) for i, k in enumerate((KEY, OTHER))}
    read(values[KEY])
    missed = 0
    for _ in range(50_000):
        broken = damage(rng, values)
        try:
            read(broken)
        except Corrupt:
            continue
        missed += broken != values[KEY]  # a cut may restore the very same bytes
    assert missed == 0
