"""What goes wrong with a plugin, each with its own error, one line and a remedy."""

from __future__ import annotations

import pytest

from lmcache_core._catalogue import Entry
from lmcache_core.registry import Registry
from lmcache_core.spi import (
    PluginConflict,
    PluginDenied,
    PluginError,
    PluginIncompatible,
    PluginLoadError,
    PluginNotFound,
    PluginUnavailable,
)
from tests.registry.dists import BACKEND, MakeDist

CATALOGUE = (
    Entry(
        kind="backends", name="redis", dist="lmcache-backend-redis", path="backends/redis",
        object="lmcache_backend_redis:RedisBackend", extra="redis", needs="the redis package",
    ),
    Entry(
        kind="backends", name="gone", dist="lmcache-backend-gone", path="", object="",
        status="retired", reason="its vendor closed; use s3",
    ),
)  # fmt: skip


def message(registry: Registry, kind: str, name: str, error: type[PluginError]) -> str:
    with pytest.raises(error) as caught:
        registry.load(kind, name)
    assert type(caught.value) is error
    text = str(caught.value)
    assert "\n" not in text
    return text


def registry(**options: object) -> Registry:
    settings: dict[str, object] = {"environment": {}, "catalogue": CATALOGUE, **options}
    return Registry(**settings)  # type: ignore[arg-type]  # passed on by name


def missing(version: str) -> Registry:
    return registry(version=version, find=lambda: ())


def test_missing_in_a_checkout() -> None:
    assert message(missing("2026.11.0+tree"), "backends", "redis", PluginNotFound) == (
        "backend 'redis' is not installed; pip install -c constraints.txt -e '.[redis]'"
    )


def test_missing_when_installed_from_an_index() -> None:
    assert message(missing("2026.11.0"), "backends", "redis", PluginNotFound) == (
        "backend 'redis' is not installed; pip install 'lmcache[redis]'"
    )


def test_missing_and_nothing_like_it() -> None:
    found = message(registry(find=lambda: (), catalogue=()), "backends", "zzz", PluginNotFound)
    assert found == "no backend 'zzz'; installed: none; `lmcache plugins` lists more"


def test_misspelt_but_installable() -> None:
    found = message(missing("1+tree"), "backends", "rediss", PluginNotFound)
    assert found == (
        "no backend 'rediss'; did you mean 'redis' (pip install -c constraints.txt -e '.[redis]')?"
    )


def test_misspelt_and_installed(make_dist: MakeDist) -> None:
    make_dist("acme-store", {"backends": {"acme": "MODULE:Backend"}})
    found = message(registry(), "backends", "acmee", PluginNotFound)
    assert found == "no backend 'acmee'; did you mean 'acme'?"


def test_retired() -> None:
    found = message(registry(), "backends", "gone", PluginNotFound)
    assert found == "backend 'gone' is retired: its vendor closed; use s3"


def test_a_retired_name_is_never_suggested() -> None:
    found = message(registry(), "backends", "gonee", PluginNotFound)
    assert "did you mean" not in found


def test_denied(make_dist: MakeDist) -> None:
    make_dist("acme-store", {"backends": {"acme": "MODULE:Backend"}})
    found = message(registry(deny=["acme"], allow=["acme"]), "backends", "acme", PluginDenied)
    assert found == "backend 'acme' is installed but denied by plugins.deny; remove it there"


def test_not_allowed(make_dist: MakeDist) -> None:
    make_dist("acme-store", {"backends": {"acme": "MODULE:Backend"}})
    found = message(registry(allow=["disk", "s3"]), "backends", "acme", PluginDenied)
    assert found == (
        "backend 'acme' is installed but not in plugins.allow (disk, s3); add it there"
    )


@pytest.mark.parametrize(("named", "shown"), [("disk, s3", "disk, s3"), ("", "empty")])
def test_not_named_by_the_environment(make_dist: MakeDist, named: str, shown: str) -> None:
    make_dist("acme-store", {"backends": {"acme": "MODULE:Backend"}})
    found = message(
        registry(environment={"LMCACHE_PLUGINS": named}), "backends", "acme", PluginDenied
    )
    assert found == (
        f"backend 'acme' is installed but not named by LMCACHE_PLUGINS ({shown}); add it there"
    )


def test_conflicting(make_dist: MakeDist) -> None:
    make_dist("acme-store", {"backends": {"acme": "MODULE:Backend"}})
    make_dist("other-store", {"backends": {"acme": "MODULE:Backend"}})
    found = message(registry(), "backends", "acme", PluginConflict)
    assert found == (
        "backend 'acme' is offered by acme-store and other-store;"
        " write 'acme@acme-store' or 'acme@other-store'"
    )


def test_no_such_distribution(make_dist: MakeDist) -> None:
    make_dist("acme-store", {"backends": {"acme": "MODULE:Backend"}})
    found = message(registry(), "backends", "acme@other", PluginNotFound)
    assert found == "no backend 'acme' in distribution 'other'; it is offered by acme-store"


def test_broken_keeps_the_cause_and_says_what_is_needed(make_dist: MakeDist) -> None:
    """Seen in LMCache#1966."""
    make_dist(
        "lmcache-backend-redis",
        {"backends": {"redis": "MODULE:Backend"}},
        "import a_module_that_is_not_there",
    )
    with pytest.raises(PluginLoadError) as caught:
        registry().load("backends", "redis")
    assert str(caught.value) == (
        "backend 'redis' (lmcache-backend-redis 1.2) failed to import: ModuleNotFoundError:"
        " No module named 'a_module_that_is_not_there'; it needs the redis package"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_broken_in_any_other_way(make_dist: MakeDist) -> None:
    make_dist("acme-store", {"backends": {"acme": "MODULE:Backend"}}, "raise RuntimeError('a\\nb')")
    found = message(registry(), "backends", "acme", PluginLoadError)
    assert found == (
        "backend 'acme' (acme-store 1.2) failed to import: RuntimeError: a;"
        " repair or remove acme-store"
    )


def test_entry_point_names_nothing(make_dist: MakeDist) -> None:
    make_dist("acme-store", {"backends": {"acme": "MODULE:Nothing"}})
    found = message(registry(), "backends", "acme", PluginLoadError)
    assert "has no attribute 'Nothing'" in found


def test_incompatible_api(make_dist: MakeDist) -> None:
    make_dist(
        "acme-store",
        {"backends": {"acme": "MODULE:Backend"}},
        BACKEND.replace("config_type = Options", "config_type = Options\n    plugin_api = 99"),
    )
    found = message(registry(), "backends", "acme", PluginIncompatible)
    assert found == (
        "backend 'acme' (acme-store 1.2) speaks plugin API 99, this core 1;"
        " install a version made for 1"
    )


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("def Backend(): ...", "is not a subclass of AbstractBackend"),
        (BACKEND.replace("    async def delete", "    async def erase"), "lacks delete"),
        (BACKEND.replace("config_type = Options", ""), "has no dataclass as its config_type"),
    ],
)
def test_not_of_its_kind(make_dist: MakeDist, source: str, fault: str) -> None:
    module = make_dist("acme-store", {"backends": {"acme": "MODULE:Backend"}}, source)
    found = message(registry(), "backends", "acme", PluginIncompatible)
    assert found == f"backend 'acme' (acme-store 1.2) is no backend: {module}:Backend {fault}"


def test_an_observer_must_observe(make_dist: MakeDist) -> None:
    make_dist("acme-watch", {"observers": {"acme": "MODULE:Watch"}}, "class Watch: ...")
    found = message(registry(), "observers", "acme", PluginIncompatible)
    assert found.endswith("Watch has no observe(event)")


UNAVAILABLE = BACKEND + "    @classmethod\n    def unavailable(cls): {}\n"


def test_unavailable_here(make_dist: MakeDist) -> None:
    make_dist(
        "acme-store",
        {"backends": {"acme": "MODULE:Backend"}},
        UNAVAILABLE.format("return 'there is no /dev/acme'"),
    )
    found = message(registry(), "backends", "acme", PluginUnavailable)
    assert found == "backend 'acme' is unavailable here, because there is no /dev/acme"
    assert registry().load("backends", "acme", anyway=True).__name__ == "Backend"


def test_fails_to_say_whether_it_is_available(make_dist: MakeDist) -> None:
    make_dist(
        "acme-store", {"backends": {"acme": "MODULE:Backend"}}, UNAVAILABLE.format("return 1 / 0")
    )
    found = message(registry(), "backends", "acme", PluginLoadError)
    assert found == (
        "backend 'acme' failed to say whether it works here: ZeroDivisionError: division by zero"
    )


def test_path_without_permission() -> None:
    found = message(registry(), "backends", "my.module:Store", PluginDenied)
    assert found == (
        "backend 'my.module:Store' is a path, which runs any code;"
        " set plugins.allow_paths: true to allow that"
    )


def test_path_not_named_by_the_environment() -> None:
    strict = registry(allow_paths=True, environment={"LMCACHE_PLUGINS": ""})
    found = message(strict, "backends", "my.module:Store", PluginDenied)
    assert found == (
        "backend 'my.module:Store' is not named by LMCACHE_PLUGINS (empty); add it there"
    )


def test_a_finder_that_fails(make_dist: MakeDist) -> None:
    make_dist("acme-finder", {"finders": {"acme": "MODULE:find"}}, "def find(kind): return 1 / 0")
    found = message(registry(), "backends", "any", PluginLoadError)
    assert found == (
        "finder 'acme' (acme-finder 1.2) failed: ZeroDivisionError: division by zero;"
        " remove it or leave it out of LMCACHE_PLUGINS"
    )
