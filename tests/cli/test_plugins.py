"""``lmcache plugins``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lmcache_core._catalogue import Entry
from lmcache_core.cli import main
from lmcache_core.cli.plugins import Listed, listing
from lmcache_core.registry import Registry
from tests.registry.dists import BACKEND, MakeDist

CATALOGUE = (
    Entry(
        kind="backends", name="redis", dist="lmcache-backend-redis", path="backends/redis",
        object="lmcache_backend_redis:RedisBackend", extra="redis",
    ),
    Entry(
        kind="backends", name="gone", dist="lmcache-backend-gone", path="", object="",
        status="retired", reason="use s3",
    ),
    Entry(kind="engines", name="vllm", dist="lmcache-engine-vllm", path="engines/vllm", object="x"),
)  # fmt: skip
ACME = {"backends": {"acme": "MODULE:Backend"}}


def lines(probe: bool = False, **options: Any) -> dict[str, Listed]:
    settings: dict[str, Any] = {"environment": {}, "catalogue": CATALOGUE, "version": "1+tree"}
    found = listing(Registry(**{**settings, **options}), probe=probe)
    return {line.name: line for line in found}


def test_installed_without_importing(make_dist: MakeDist) -> None:
    module = make_dist("acme-store", ACME)
    line = lines()["acme"]
    assert (line.kind, line.dist, line.version) == ("backends", "acme-store", "1.2")
    assert (line.state, line.reason, line.capabilities) == ("installed", "", ())
    assert module not in sys.modules


def test_names_of_the_catalogue_that_are_not_here() -> None:
    found = lines(find=lambda: ())
    assert found["redis"].state == "not installed"
    assert found["redis"].reason == "pip install -c constraints.txt -e '.[redis]'"
    assert (found["gone"].state, found["gone"].reason) == ("retired", "use s3")
    assert "vllm" not in found


def test_denied(make_dist: MakeDist) -> None:
    make_dist("acme-store", ACME)
    line = lines(allow=["disk"], probe=True)["acme"]
    assert (line.state, line.reason) == ("denied", "not in plugins.allow (disk); add it there")


def test_what_no_configuration_chooses_is_not_denied_by_one(make_dist: MakeDist) -> None:
    make_dist("acme-tools", {"commands": {"acme": "MODULE:app"}, "ops": {"acme-ops": "MODULE"}})
    for permissions in ({"allow": ["disk"]}, {"deny": ["acme", "acme-ops"]}):
        found = lines(**permissions)
        assert (found["acme"].state, found["acme-ops"].state) == ("installed", "installed")
    named = Registry(environment={"LMCACHE_PLUGINS": "disk"}, catalogue=())
    assert {line.name: line.state for line in listing(named)}["acme"] == "denied"


def test_conflicting(make_dist: MakeDist) -> None:
    make_dist("acme-store", ACME)
    make_dist("other-store", ACME)
    found = [
        line for line in listing(Registry(environment={}, catalogue=())) if line.name == "acme"
    ]
    assert [(line.dist, line.state, line.reason) for line in found] in (
        [
            ("acme-store", "conflicting", "also offered by other-store"),
            ("other-store", "conflicting", "also offered by acme-store"),
        ],
        [
            ("other-store", "conflicting", "also offered by acme-store"),
            ("acme-store", "conflicting", "also offered by other-store"),
        ],
    )


def test_probing_shows_what_the_class_declares(make_dist: MakeDist) -> None:
    make_dist("acme-store", ACME)
    line = lines(probe=True)["acme"]
    assert (line.state, line.capabilities) == ("ready", ("ranges", "max_batch=7"))


@pytest.mark.parametrize(
    ("source", "state", "reason"),
    [
        ("import nothing_like_it", "broken", "ModuleNotFoundError"),
        ("Backend = 3", "incompatible", "is not a subclass of AbstractBackend"),
        (
            BACKEND + "    @classmethod\n    def unavailable(cls): return 'no device'\n",
            "unavailable",
            "no device",
        ),
        (
            BACKEND + "    @classmethod\n    def unavailable(cls): raise OSError('x')\n",
            "broken",
            "failed to say whether it works here: OSError: x",
        ),
        (BACKEND.replace("MemoryKind", "MemoryKind, Durability").replace(
            "max_batch=7", "durability=Durability.POWER"), "ready", ""),
    ],
)  # fmt: skip
def test_probing_shows_what_is_wrong(
    make_dist: MakeDist, source: str, state: str, reason: str
) -> None:
    make_dist("acme-store", ACME, source)
    line = lines(probe=True)["acme"]
    assert line.state == state
    assert reason in line.reason
    if state == "ready":
        assert line.capabilities == ("ranges", "durability=power")


def test_the_command_lists_tables_and_json(
    make_dist: MakeDist, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dist("acme-store", ACME)
    assert main(["plugins"]) == 0
    captured = capsys.readouterr()
    (row,) = [line.split() for line in captured.out.splitlines() if " acme " in line]
    assert row == ["backends", "acme", "acme-store", "1.2", "installed"]
    assert captured.err == (
        "nothing was imported; --probe asks each plugin whether it works here\n"
    )
    assert main(["plugins", "--json", "--probe"]) == 0
    captured = capsys.readouterr()
    (found,) = [line for line in json.loads(captured.out) if line["name"] == "acme"]
    assert found == {
        "kind": "backends",
        "name": "acme",
        "dist": "acme-store",
        "version": "1.2",
        "state": "ready",
        "reason": "",
        "capabilities": ["ranges", "max_batch=7"],
    }
    assert captured.err == ""


def test_the_memory_backend_and_the_policies_are_always_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plugins", "--json", "--probe"]) == 0
    ready = {
        (line["kind"], line["name"])
        for line in json.loads(capsys.readouterr().out)
        if line["state"] == "ready"
    }
    assert {("backends", "memory"), ("policies", "lru"), ("wrappers", "breaker")} <= ready


def test_a_broken_plugin_is_a_finding(
    make_dist: MakeDist, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dist("acme-store", ACME, "raise RuntimeError")
    assert main(["plugins", "--probe"]) == 1
    assert " broken " in capsys.readouterr().out


def test_permissions_of_a_file_are_applied(
    make_dist: MakeDist, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dist("acme-store", ACME)
    file = tmp_path / "kv.yaml"
    file.write_text("tiers: [not-there-at-all]\nplugins: {deny: [acme]}")
    assert main(["plugins", "--config", str(file)]) == 0
    assert "denied by plugins.deny; remove it there" in capsys.readouterr().out
