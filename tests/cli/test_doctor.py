"""``lmcache doctor``: each finding with its remedy."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmcache_core.cli import machine, main
from lmcache_core.cli.doctor import Finding, memory, room
from lmcache_core.cli.roundtrip import round_trip
from lmcache_core.config import Config, Effective, TierConfig, load
from lmcache_core.memory.backend import MemoryBackend
from lmcache_core.registry import Offer, Registry
from lmcache_core.spi import (
    MISSED,
    ByteSize,
    Capabilities,
    Corrupt,
    Load,
    Loaded,
    MemoryOptions,
    ResidentPool,
    Store,
    Stored,
    Unavailable,
)
from tests.registry.dists import BACKEND, MakeDist


def offering(backend: type, name: str = "store") -> Registry:
    """A registry in which ``name`` stands for a class of this module."""
    offer = Offer("backends", name, f"{backend.__module__}:{backend.__qualname__}")
    return Registry(environment={}, find=lambda: (offer,))


def tried(backend: type, size: ByteSize | None = ByteSize(1 << 26), timeout: float = 20) -> Finding:
    tier = TierConfig(plugin="store", name="it", size=size, wrappers={"retry": False})
    effective = Effective(Config(tiers=(tier,)), (), (), offering(backend))
    finding = round_trip(tier, effective, timeout=timeout)
    assert finding.about == "tier it"
    return finding


class OneByOne(MemoryBackend):
    capabilities = Capabilities(max_batch=1, max_value=9000)


def test_a_good_tier_is_measured_and_left_empty() -> None:
    left: list[int] = []

    class Watched(MemoryBackend):
        async def aclose(self) -> None:
            left.append((await self.usage()).values)
            await super().aclose()

    globals()["Watched"] = Watched
    Watched.__qualname__ = "Watched"
    finding = tried(Watched)
    assert finding.state == "good"
    assert finding.found.startswith("stored at ")
    assert finding.found.endswith(" ms (16 values of 1024 KiB)")
    assert left == [0]


def test_limits_of_a_tier_are_respected() -> None:
    assert tried(OneByOne).found.endswith("(16 values of 8 KiB)")
    assert tried(MemoryBackend, ByteSize(1 << 20)).found.endswith("(16 values of 32 KiB)")
    assert tried(MemoryBackend, ByteSize(3)) == Finding(
        "tier it", "warning", "too small for values of 0 bytes", "raise its limits"
    )


class Silent(MemoryBackend):
    async def open(self) -> None:
        raise Unavailable("cannot reach cache:6379: connection refused")


def always(batch: Sequence[Any], result: Any, done: Any) -> list[Any]:
    """The same outcome for every item, completed as the contract wants it."""
    for index in range(len(batch)):
        if done is not None:
            done(index, result)
    return [result] * len(batch)


class Refusing(MemoryBackend):
    async def store(self, batch: Sequence[Store], /, **how: Any) -> Sequence[Stored]:
        return always(batch, Stored.refused("read-only"), how.get("done"))


class Failing(MemoryBackend):
    async def load(self, batch: Sequence[Load], /, **how: Any) -> Sequence[Loaded]:
        return always(batch, Loaded.failed(Corrupt("digest differs")), how.get("done"))


class Forgetful(MemoryBackend):
    async def lookup(self, keys: Any, /, **_: Any) -> Any:
        return [None] * len(keys)


class Missing(MemoryBackend):
    async def load(self, batch: Sequence[Load], /, **how: Any) -> Sequence[Loaded]:
        return always(batch, MISSED, how.get("done"))


class Garbling(MemoryBackend):
    async def load(self, batch: Sequence[Load], /, **how: Any) -> Sequence[Loaded]:
        done = how.pop("done", None)
        await super().load(batch, **how)
        batch[0].into[0][-1] ^= 1
        return always(batch, Loaded.filled(batch[0].room), done)


class Faulty(MemoryBackend):
    async def store(self, batch: Sequence[Store], /, **_: Any) -> Sequence[Stored]:
        raise ZeroDivisionError("oops\nmore")


@pytest.mark.parametrize(
    ("backend", "finding"),
    [
        (Silent, ("unreachable", "cannot reach cache:6379: connection refused", "start the store, or correct where it is expected")),
        (Refusing, ("warning", "refused a store: read-only", "make room in it")),
        (Failing, ("fault", "digest differs", "do not use this tier")),
        (Forgetful, ("fault", "a stored value is not found", "do not use this tier")),
        (Missing, ("fault", "a stored value is not loaded", "do not use this tier")),
        (Garbling, ("fault", "segment 0", "do not use this tier")),
        (Faulty, ("fault", "ZeroDivisionError: oops", "report it to store")),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_tier(backend: type, finding: tuple[Any, ...]) -> None:
    state, found, remedy = finding
    result = tried(backend)
    assert (result.state, result.remedy) == (state, remedy)
    assert found in result.found


RELEASE = threading.Event()


class Hung(MemoryBackend):
    async def lookup(self, keys: Any, /, **_: Any) -> Any:
        await asyncio.to_thread(RELEASE.wait, 20)
        return []


def test_a_hung_tier_does_not_hang_the_doctor() -> None:
    finding = tried(Hung, timeout=0.2)
    RELEASE.set()
    assert finding == Finding(
        "tier it", "unreachable", "no answer within 0.2 s", "check the store and the network"
    )


class Pooled(MemoryBackend):
    """A tier whose values are used where they lie."""

    capabilities = Capabilities(resident=True)

    async def open(self) -> None:
        self._pool = self.context.create_pool(MemoryOptions())

    @property
    def pool(self) -> ResidentPool:
        return self._pool

    async def aclose(self) -> None:
        self._pool.close()


def test_a_resident_tier_gets_memory_for_the_trial() -> None:
    assert tried(Pooled).found.endswith("(16 values of 1024 KiB)")


def test_a_plugin_that_is_unavailable_is_a_fault_of_its_tier() -> None:
    tier = TierConfig(plugin="gds", name="it")
    registry = Registry(environment={}, find=lambda: ())
    finding = round_trip(tier, Effective(Config(tiers=(tier,)), (), (), registry), timeout=5)
    assert finding.state == "fault"
    assert "no backend 'gds'" in finding.found


def fake_root(folder: Path, **files: str) -> Path:
    for name, text in {
        "proc/meminfo": "MemTotal: 1000 kB\nHugePages_Free: 0\n",
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [never] deny\n",
        **{name.replace("__", "/").replace("DOT", "."): text for name, text in files.items()},
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("free", "transparent", "state"),
    [("0", "[never]", "note"), ("0", "[advise]", "good"), ("8", "[never]", "good")],
)
def test_huge_pages(tmp_path: Path, free: str, transparent: str, state: str) -> None:
    root = fake_root(
        tmp_path,
        proc__meminfo=f"HugePages_Free: {free}\n",
        sys__kernel__mm__transparent_hugepage__shmem_enabled=transparent,
    )
    assert machine.huge_pages(root).state == state


def test_findings_about_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (512, 4096))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    found = {finding.about: finding for finding in machine.system(fake_root(tmp_path))}
    assert found["open files"] == Finding(
        "open files", "warning", "512", "raise it with `ulimit -n 4096`"
    )
    assert found["locked memory"].state == "note"
    assert found["device files"].found == "NVIDIA"
    monkeypatch.setattr("resource.getrlimit", lambda which: (-1, -1))
    assert {f.about: f for f in machine.system(fake_root(tmp_path))}[
        "locked memory"
    ].state == "good"


def test_another_system_is_told_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    found = next(machine.system())
    assert (found.state, found.remedy) == (
        "warning",
        "only core, memory tier and CLI work off Linux",
    )


@pytest.mark.parametrize(
    ("script", "state", "found"),
    [
        ("#!/bin/sh\necho '[\"2.13.0\", \"cuda\", 2]'\n", "good", "2.13.0, 2 x cuda"),
        ("#!/bin/sh\necho '[\"2.13.0\", \"\", 0]'\n", "good", "2.13.0, no accelerator"),
        ("#!/bin/sh\necho 'ImportError: libx.so' >&2; exit 1\n", "fault", "import torch failed: ImportError: libx.so"),
        ("#!/bin/sh\nkill -11 $$\n", "fault", "import torch failed: exit status -11"),
        ("#!/bin/sh\nexec sleep 20\n", "fault", "import torch did not end within 0.3 s"),
    ],
)  # fmt: skip
def test_torch_is_asked_in_a_process_of_its_own(
    tmp_path: Path, script: str, state: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(script)
    python.chmod(0o700)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    if "sleep" in script:
        monkeypatch.setattr(machine, "TORCH_TIMEOUT_S", 0.3)
    finding = machine.torch(str(python))
    assert (finding.state, finding.found) == (state, found)


def test_without_torch_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert machine.torch("/does/not/exist").found == "not installed"


@pytest.mark.parametrize(
    ("said", "state"),
    [("native: avx512", "good"), ("python, because lmcache-native is not installed", "warning")],
)
def test_byte_operations(said: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_core.ops.implementation", lambda: said)
    finding = machine.native()
    assert (finding.state, finding.found) == (state, said)


@dataclass(frozen=True)
class FolderOptions:
    path: tuple[str, ...]


class Folder(MemoryBackend):
    config_type = FolderOptions  # type: ignore[assignment]  # never opened here


def test_limits_beyond_what_the_file_system_has(tmp_path: Path) -> None:
    registry = offering(Folder)

    def findings(size: str) -> list[Finding]:
        tiers = f"[{{store: {{path: [{tmp_path}/new/folder], size: {size}}}}}]"
        return room(load(env={"LMCACHE_TIERS": tiers}, registry=registry))

    (good,) = findings("1KiB")
    assert (good.about, good.state) == ("tier store", "good")
    (bad,) = findings("900PiB")
    assert bad.state == "warning"
    assert bad.found.endswith("iB free, less than its limit of 921600TiB")
    assert bad.remedy.startswith("free space or lower tiers.store.size")


def test_memory_tiers_beyond_the_limit_of_the_process() -> None:
    effective = load(env={"LMCACHE_TIERS": "[{memory: {size: 1GiB}}]"})
    assert memory(effective, 1 << 31) == []
    (finding,) = memory(effective, (1 << 30) - 1)
    assert finding.found == "tiers may take 1024 MiB, and 1023 MiB are to be had"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the machine, which differs from one to the next."""
    good = Finding("machine", "good", "fine")
    monkeypatch.setattr(machine, "system", lambda: [good])
    monkeypatch.setattr(machine, "native", lambda: good)
    monkeypatch.setattr(machine, "torch", lambda: good)


@pytest.mark.usefixtures("quick")
def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("tiers: [{memory: {size: 64MiB}}]")
    assert main(["doctor", "--config", str(file), "--json"]) == 0
    captured = capsys.readouterr()
    found = {line["about"]: line for line in json.loads(captured.out)}
    assert found["tier memory"]["state"] == "good"
    assert captured.err.splitlines()[-1] == "writing to and reading from tier memory"
    assert main(["doctor", "--config", str(file)]) == 0
    assert "about        state  found" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_findings_and_unreachable_stores_have_their_statuses(
    make_dist: MakeDist, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--set", "tiers=[]"]) == 1
    assert "none is configured: every lookup is a miss" in capsys.readouterr().out
    make_dist(
        "acme-store",
        {"backends": {"acme": "MODULE:Backend"}},
        BACKEND + "    async def open(self): raise ConnectionRefusedError('no one there')\n",
    )
    assert main(["doctor", "--set", "tiers=[acme]"]) == 3
    assert "no one there" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_broken_plugins_and_notes_are_reported(
    make_dist: MakeDist, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dist("acme-store", {"backends": {"acme": "MODULE:Backend"}}, "raise RuntimeError('x')")
    assert main(["doctor", "--set", "numa_mode=auto", "--json"]) == 1
    found = {line["about"]: line for line in json.loads(capsys.readouterr().out)}
    assert found["backends acme"]["state"] == "fault"
    assert found["configuration"]["found"].startswith("flag numa_mode: numa_mode has no effect")
