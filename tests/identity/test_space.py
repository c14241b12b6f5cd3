from __future__ import annotations

import json
import os
import time
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.identity import (
    Adapter,
    Group,
    KeyManager,
    KeySpace,
    Rope,
    Unkeyable,
    canonical,
    chunk_tokens,
    weights_fingerprint,
    with_manager,
)
from lmcache_core.spi.layout import Interior, Reuse
from tests.identity.samples import group, pages, rope, space

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "space.json"
BASE = space()
RECORDS: dict[type, Any] = {
    KeySpace: BASE,
    Rope: rope(),
    Group: pages(reuse=Reuse.WINDOW, window=128),
    Adapter: BASE.adapter,
}
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.binary(max_size=8)
)  # fmt: skip
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=8)


def changed(value: Any) -> Any:
    """Another legal value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, bytes):
        return bytes([value[0] ^ 1]) + value[1:]
    if isinstance(value, str):
        return "approx:x" if value == "exact" else value + "x"
    if isinstance(value, int | float):
        return value * 2 or 1
    if isinstance(value, Adapter):
        return None
    return value[:-1] or (*value, *value)


CASES = [(record, field.name) for record in RECORDS for field in fields(record)]


@pytest.mark.parametrize(("record", "name"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_a_change_of_any_field_changes_digest_and_root(record: type, name: str) -> None:
    """LMCache#690 and all its relatives.

    Seen in Tanguille/cluster#4213, dynamo#14416.
    """
    special: dict[str, Any] = {
        "interior": Interior.STATE,
        "layers": (0, 1, 2),
        "groups": (group(),),
        "rope": (),
        "tags_in_key": (),
        "fields": (),
        "parameters": (),
        "head_range": (0, 4),
        "page_size": 8,
    }
    old = RECORDS[record]
    if name == "reuse":
        new = replace(old, reuse=Reuse.ALL, window=0)
    else:
        value = special[name] if name in special else changed(getattr(old, name))
        new = replace(old, **{name: value})
    assert new != old

    def inside(value: Any) -> KeySpace:
        if record is KeySpace:
            return value  # type: ignore[no-any-return]
        if record is Adapter:
            return replace(BASE, adapter=value)
        if record is Rope:
            return replace(BASE, rope=(value,))
        return replace(BASE, groups=(value,))

    assert inside(new).digest != inside(old).digest
    assert inside(new).root != inside(old).root


def test_every_field_is_required() -> None:
    """LMCache#4825: a forgotten salt is an error, not a shared one."""
    for record in RECORDS:
        assert all(
            f.default is MISSING and f.default_factory is MISSING and f.kw_only
            for f in fields(record)
        )


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": None},
        {"epoch": True},
        {"weights": "x" * 32},
        {"weights": b"short"},
        {"groups": ()},
        {"groups": [group()]},
        {"fidelity": "approx:"},
        {"fidelity": "approximate"},
        {"fields": (("a", 1), ("a", 2))},
        {"fields": (("a", float("nan")),)},
        {"model": "\ud800"},
    ],
    ids=str,
)
def test_impossible_spaces_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Unkeyable):
        _ = space(**change).digest


@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 16},
        {"engine": "vllm"},
        {"interior": Interior.PAGE},
        {"window": 4},
        {"reuse": Reuse.WINDOW},
        {"layers": (1, 0)},
        {"layers": ()},
        {"head_range": (4, 9)},
        {"head_range": (0, 4, 8)},
        {"tokens_per_chunk": 0},
        {"planes": 0},
    ],
    ids=str,
)
def test_impossible_groups_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Unkeyable):
        group(**change)


def test_a_chunk_holds_whole_pages() -> None:
    """Seen in LMCache#4782.

    Seen in LMCache#5217.
    """
    with pytest.raises(Unkeyable, match="no multiple of page size 24"):
        pages(page_size=24)
    assert [chunk_tokens(256, b) for b in ([], [16, 32], [784], [1056, 48])] == [
        256, 256, 784, 1056,
    ]  # fmt: skip


def test_rows_are_shared_by_engines_and_page_sizes() -> None:
    """Nothing of the engine enters the key of canonical rows, everything that of opaque pages."""
    assert group().engine is None
    assert space(groups=(pages(),)).root != space(groups=(pages(engine="sglang"),)).root


@given(values, values)
def test_canonical_bytes_are_equal_exactly_for_equal_values(a: Any, b: Any) -> None:
    assert (canonical(a) == canonical(b)) == (_typed(a) == _typed(b))


def _typed(value: Any) -> Any:
    """Numbers compare by value; True is not 1."""
    if isinstance(value, tuple):
        return tuple(map(_typed, value))
    return ("bool", value) if isinstance(value, bool) else value


@pytest.mark.parametrize("value", [float("inf"), [1], {"a": 1}, object(), KeySpace])
def test_values_outside_the_table_have_no_canonical_form(value: object) -> None:
    with pytest.raises(Unkeyable):
        canonical(value)


def test_order_of_tagged_fields_does_not_matter() -> None:
    tags = (("b", "1"), ("a", "2"))
    assert space(tags_in_key=tags).root == space(tags_in_key=tags[::-1]).root
    assert space(fields=(("b", 1), ("a", 2))) == space(fields=(("a", 2), ("b", 1)))


def test_golden_spaces_hold() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert canonical(BASE).hex() == golden["canonical"]
    assert (BASE.digest.hex(), BASE.root.hex()) == (golden["digest"], golden["root"])


def test_the_salt_is_not_shown() -> None:
    assert "blue" not in repr(BASE)


def test_approximate_engines_read_exact_chunks_but_never_the_reverse() -> None:
    lossy = space(fidelity="approx:kv4")
    assert lossy.readable == (BASE, lossy)
    assert BASE.readable == (BASE,)


class Site(KeyManager):
    config_type = str

    def __init__(self, site: str, /) -> None:
        self.site = site

    def fields(self, labels: Any, /) -> dict[str, Any]:
        return {"site": self.site} if "local" in labels else {}


def test_key_managers_add_fields_under_their_own_name() -> None:
    """sglang#24638"""
    bare = replace(BASE, fields=())
    with_site = with_manager(bare, "geo", Site("berlin"), {"local": "1"})
    assert with_site.fields == (("geo.site", "berlin"),)
    assert with_manager(bare, "geo", Site("berlin"), {}) is bare
    assert with_site.root != with_manager(bare, "other", Site("berlin"), {"local": "1"}).root


def tensors(path: Path, names: str, data: bytes) -> None:
    share = len(data) // len(names)
    table = {
        n: {"dtype": "U8", "shape": [share], "data_offsets": [i * share, (i + 1) * share]}
        for i, n in enumerate(names)
    }
    head = json.dumps(table | {"__metadata__": {"format": "pt"}}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


def test_fingerprint_follows_content_and_names_not_times(tmp_path: Path) -> None:
    """sglang#24758: other weights under the same name."""
    data = os.urandom(9000)
    for folder in ("a", "b", "c", "d"):
        (tmp_path / folder).mkdir()
    tensors(tmp_path / "a" / "m.safetensors", "xyz", data)
    tensors(tmp_path / "b" / "m.safetensors", "xyz", data)
    tensors(tmp_path / "c" / "m.safetensors", "xyw", data)
    tensors(tmp_path / "d" / "m.safetensors", "xyz", data[:3000] + bytes(3000) + data[6000:])
    os.utime(tmp_path / "b" / "m.safetensors", (1, 1))
    a, b, c, d = (weights_fingerprint(tmp_path / f) for f in "abcd")
    assert a == b
    assert len({a, c, d}) == 3


def test_fingerprint_of_a_large_file_reads_little_of_it(tmp_path: Path) -> None:
    for name in ("sparse.bin", "lying.safetensors"):
        with (tmp_path / name).open("wb") as file:
            file.write((1 << 40).to_bytes(8, "little"))
            file.truncate(8 << 30)
    before = time.process_time()
    weights_fingerprint(tmp_path)
    assert time.process_time() - before < 2  # all of it would take several times as long


def test_a_folder_without_weights_has_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no tensor file"):
        weights_fingerprint(tmp_path)
