"""Whatever is written, the answer is a configuration or one line."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.config import Config, load
from lmcache_core.config.names import NAMES
from lmcache_core.spi import ConfigError, PluginError
from tests.config.plugins import OFFERS, registry

KEYS = sorted(
    {row.key for row in NAMES}
    | {offer.name for offer in OFFERS}
    | {"tiers", "tenants", "plugins", "manager", "observers", "key_managers", "policy", "name", "size"}
    | {"serde", "wrappers", "ttl", "deadline", "write", "path", "url", "allow", "quota", "quotas", "x"}
)  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 10**12), st.floats(), st.text(max_size=5),
    st.sampled_from(["1GiB", "50%", "5s", "lru", "zip", "quant", "redis://u:p@h", "exact", "${X}", "[", "{a"]),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
    ),
    max_leaves=10,
)


def outcome(**sources: Any) -> None:
    message = ""
    try:
        assert isinstance(load(**sources, registry=registry()).config, Config)
    except (ConfigError, PluginError) as error:
        message = str(error)
    assert "\n" not in message
    assert "Item(" not in message


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_any_values_of_known_keys(written: dict[str, Any]) -> None:
    outcome(env={}, flags=written)
    outcome(env={}, engine={f"lmcache.{key}": value for key, value in written.items()})


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([key.upper() for key in KEYS]), st.text(max_size=12), max_size=3
    )
)
def test_any_text_in_the_environment(written: dict[str, str]) -> None:
    outcome(env={f"LMCACHE_{key}": value for key, value in written.items() if key != "CONFIG_FILE"})


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3), VALUES)
def test_any_block_in_a_file(tmp_path_factory: Any, written: dict[str, Any], block: Any) -> None:
    import yaml

    file = tmp_path_factory.mktemp("any") / "kv.yaml"
    file.write_text(yaml.safe_dump({**written, "lmcache": block}, allow_unicode=True))
    message = ""
    try:
        load(file, env={}, registry=registry())
    except (ConfigError, PluginError) as error:
        message = str(error)
    assert "\n" not in message


BACKENDS = [offer.name for offer in OFFERS if offer.kind == "backends"]
OPTIONS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4)
TIERS = st.lists(
    st.one_of(st.dictionaries(st.sampled_from(BACKENDS), OPTIONS, max_size=2), VALUES), max_size=3
)


@settings(max_examples=300, deadline=None)
@given(TIERS, st.dictionaries(st.sampled_from([*BACKENDS, "shared"]), OPTIONS, max_size=2))
def test_any_tiers_and_any_changes_of_them(tiers: list[Any], changes: dict[str, Any]) -> None:
    outcome(env={}, engine={"lmcache.tiers": tiers}, flags={"tiers": changes})
