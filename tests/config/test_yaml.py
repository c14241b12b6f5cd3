"""Reading files: lines, references, doubles."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_core.config.tree import items, merge, read_yaml
from lmcache_core.spi import ConfigError
from tests.config.plugins import read

ENV = {"SIZE": "3", "HOST": "cache", "EMPTY": "", "TRICKY": "a: {b: 1}\nc: 2"}


def plain(text: str) -> object:
    return read_yaml(text, "f", ENV).plain()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: ${SIZE}", {"a": 3}),
        ("a: '${SIZE}'", {"a": "3"}),
        ("a: redis://${HOST}:${PORT:-6379}/x", {"a": "redis://cache:6379/x"}),
        ("a: ${UNSET:-}", {"a": None}),
        ("a: ${EMPTY:-5}", {"a": 5}),
        ("a: $${HOST}", {"a": "${HOST}"}),
        ("a: $HOST", {"a": "$HOST"}),
        ("a: [${SIZE}, {b: ${SIZE}}]", {"a": [3, {"b": 3}]}),
        ("a: ${TRICKY}", {"a": "a: {b: 1}\nc: 2"}),
        ("on: off", {"on": False}),
        (
            "a: &x {b: 1}\nc: {<<: *x, d: 2}\ne: *x",
            {"a": {"b": 1}, "c": {"b": 1, "d": 2}, "e": {"b": 1}},
        ),
        ("a: {b: ${SIZE}, c: x${HOST}y}", {"a": {"b": 3, "c": "xcachey"}}),
        ("a: 1 # ${UNSET}", {"a": 1}),
        ("a: |\n  ${HOST}\n  x", {"a": "cache\nx"}),
        ("", {}),
        ('{"a": [1, 2]}', {"a": [1, 2]}),
    ],
)
def test_references_and_plain_yaml(text: str, expected: object) -> None:
    assert plain(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: ${UNSET}", "f:2: environment variable UNSET is not set; set it or write ${UNSET:-default}"),
        ("a: ${9}", "f:1: not a reference: '${9}' (write ${NAME}, ${NAME:-default}, or $${ for the characters themselves)"),
        ("a: ${HOST", "f:1: not a reference: '${HOST' (write ${NAME}, ${NAME:-default}, or $${ for the characters themselves)"),
        ("a: 1\n\na: 2", "f:3: key 'a' is there twice"),
        ("x:\n  a: 1\n  a: 2", "f:3: key 'a' is there twice"),
        ("? [a]\n: 1", "f:1: a key must be text"),
        ("a: [1", "f:1: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("a: !!python/object:os.system 1", "f:1: not YAML: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object:os.system'"),
        ("a: 2020-99-99", "f: not YAML: month must be in 1..12"),
        ("a: \x00", "f: not YAML: unacceptable character #x0000: special characters are not allowed"),
        ("a: 1\n---\nb: 2", "f:2: not YAML: but found another document"),
        ("a: &x [*x]", "f:1: more than 100000 values, aliases expanded"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_one_line(text: str, message: str) -> None:
    """Seen in LMCache#1735."""
    with pytest.raises(ConfigError) as caught:
        plain(text)
    assert str(caught.value) == message


def test_aliases_cannot_blow_up_memory() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(ConfigError, match="more than 100000 values"):
        plain("\n".join(lines))


def test_a_value_remembers_its_line() -> None:
    root = read_yaml("a: 1\nb:\n  - c: 2\n", "f", ENV)
    assert root.value["a"].origin == "f:1"
    assert root.value["b"].value[0].value["c"].origin == "f:3"


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv.yaml:1: expected a mapping of keys, got a list$"):
        read(tmp_path, "[1]")


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    message = ""
    try:
        read_yaml(text, "f", ENV)
    except ConfigError as error:
        message = str(error)
    assert "\n" not in message


TREES = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
)  # fmt: skip


@given(
    st.dictionaries(st.sampled_from("abc"), TREES), st.dictionaries(st.sampled_from("abc"), TREES)
)
def test_merging_keeps_every_key_and_prefers_the_later_leaf(
    under: dict[str, object], over: dict[str, object]
) -> None:
    def expected(a: object, b: object) -> object:
        if isinstance(a, dict) and isinstance(b, dict):
            return {
                k: expected(a[k], b[k]) if k in a and k in b else {**a, **b}[k] for k in {**a, **b}
            }
        return b

    merged = merge(items(under, "u").value, items(over, "o").value)
    assert {key: item.plain() for key, item in merged.items()} == expected(under, over)


@pytest.mark.parametrize("text", ["a: " + "[" * 700, "a: " + "[{a: " * 400])
def test_values_in_values_without_an_end_are_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^f: not YAML: maximum recursion depth exceeded.*$"):
        plain(text)
