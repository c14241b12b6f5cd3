"""Binding mappings to any record, and what is never shown."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.config import Binder, Share, items
from lmcache_core.spi import ByteSize, ConfigError, Secret
from tests.config.plugins import read


class Colour(Enum):
    RED = "red"
    DEEP_BLUE = "deep-blue"


@dataclass(frozen=True, slots=True)
class Inner:
    number: int
    share: Share = Share(0.5)  # noqa: RUF009  a number


@dataclass(frozen=True, slots=True)
class Outer:
    colour: Colour = Colour.RED
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    size: ByteSize | None = None
    ratio: float = 1.0
    either: int | str = 0
    anything: Any = None


def bound(data: dict[str, Any], text: bool = False) -> Outer:
    return Binder().bind(Outer, items(data, "here", text=text), "")


def test_records_inside_records() -> None:
    assert bound({"inner": {"number": 1}, "many": [{"number": 2, "share": "10%"}]}) == Outer(
        inner=Inner(1), many=(Inner(2, Share(0.1)),)
    )


@pytest.mark.parametrize(
    ("data", "field", "value"),
    [
        ({"colour": "deep_blue"}, "colour", Colour.DEEP_BLUE),
        ({"colour": "RED"}, "colour", Colour.RED),
        ({"size": None}, "size", None),
        ({"size": "null"}, "size", None),
        ({"size": "4KiB"}, "size", 4096),
        ({"ratio": 2}, "ratio", 2.0),
        ({"either": "x"}, "either", "x"),
        ({"either": 3}, "either", 3),
        ({"many": {"number": 3}}, "many", None),
        ({"anything": {"a": [1]}}, "anything", {"a": [1]}),
    ],
)
def test_values(data: dict[str, Any], field: str, value: object) -> None:
    if field == "many":
        with pytest.raises(ConfigError, match="here: many: expected a list, got a mapping"):
            bound(data)
    else:
        assert getattr(bound(data, text=data == {"size": "null"}), field) == value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"inner": {}}, "here: inner.number: is required"),
        ({"inner": {"number": "1"}}, "here: inner.number: expected a whole number, got text"),
        ({"inner": {"number": True}}, "here: inner.number: expected a whole number, got true or false"),
        ({"many": [{"number": 1}, {"nummer": 1}]}, "here: many[1].nummer: unknown key; did you mean 'number'?"),
        ({"ratio": "x"}, "here: ratio: expected a number, got text"),
        ({"colour": "rd"}, "here: colour: not one of the choices: 'rd'; did you mean 'red'?"),
        ({"inner": 3}, "here: inner: expected a mapping of keys, got a whole number"),
        ({"qqqq": 3}, "here: qqqq: unknown key; valid: anything, colour, either, inner, many, ratio, size"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(data: dict[str, Any], message: str) -> None:
    """Seen in LMCache#447, LMCache#2854."""
    with pytest.raises(ConfigError) as caught:
        bound(data)
    assert str(caught.value) == message


HUSH = "hunter2"
WITH_SECRETS = f"""
tiers:
- redis:
    url: "redis://user:{HUSH}@cache:6379/0"
    password: {HUSH}
    prefix: kv
"""


def test_no_secret_is_shown_anywhere(tmp_path: Path) -> None:
    effective = read(tmp_path, WITH_SECRETS)
    options = effective.config.tiers[0].options
    assert options.password.reveal() == HUSH  # type: ignore[attr-defined]
    shown = {s.path: s.value for s in effective.settings}
    assert shown["tiers.redis.password"] == "***"
    assert shown["tiers.redis.url"] == "redis://***@cache:6379/0"
    assert HUSH not in repr(effective.settings)
    assert isinstance(options.password, Secret)  # type: ignore[attr-defined]
    plain = asdict(options)  # type: ignore[call-overload]
    plain.pop("url")
    assert HUSH not in json.dumps(plain, default=str)
    assert HUSH not in repr(plain)


def test_settings_nobody_wrote_are_told_field_by_field(tmp_path: Path) -> None:
    told = {s.path: (s.value, s.source) for s in read(tmp_path, WITH_SECRETS).settings}
    assert told["daemon.port"] == (5555, "default")
    assert told["daemon.token"] == ("***", "default")
    assert "daemon" not in told


@pytest.mark.parametrize(
    "text",
    [
        f"tiers: [{{redis: {{url: x, pasword: {HUSH}}}}}]",
        f"tiers: [{{redis: {{url: x, password: [{HUSH}]}}}}]",
        f"tiers: [{{redis: {{url: x, timeout: {{a: {HUSH}}}}}}}]",
        f"pasword: {HUSH}",
        f"tenants: {{a: {{token: {HUSH}}}}}",
    ],
)
def test_a_mistake_beside_a_secret_does_not_show_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert HUSH not in str(caught.value)


def test_text_under_a_telling_name_is_not_shown_even_without_the_type() -> None:
    @dataclass(frozen=True)
    class Careless:
        api_key: str
        access_token: str | None = None
        tokens: int = 0

    binder = Binder()
    binder.bind(Careless, items({"api_key": HUSH, "access_token": HUSH, "tokens": 3}, "here"), "")
    assert [s.value for s in binder.settings] == ["***", "***", 3]


@pytest.mark.parametrize(
    ("written", "value"), [("25%", 0.25), (0.25, 0.25), (1, 1.0), ("0.5", 0.5), ("100 %", 1.0)]
)
def test_shares(written: object, value: float) -> None:
    assert Share.parse(written) == value


@pytest.mark.parametrize("written", ["101%", -0.1, 2, "half", True, None, "nan"])
def test_what_is_no_share(written: object) -> None:
    with pytest.raises(ValueError, match="not a share"):
        Share.parse(written)
