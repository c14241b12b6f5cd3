"""``verify``, the report, promised services, and what the pytest plugin adds."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from unittest import SkipTest

import pytest

from lmcache_core.spi import ConfigError, PluginNotFound, Unavailable
from lmcache_core.testing.laws import Outcome, Verdict, conformance
from lmcache_core.testing.services import need_service
from lmcache_core.testing.verify import verify


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)


def test_memory_backend_conforms_and_the_report_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert verify("memory", as_json=True) == 0
    shown = json.loads(capsys.readouterr().out)
    written = json.loads(Path("conformance.json").read_text())
    assert shown == written
    assert (written["name"], written["plugin_api"]) == ("memory", 1)
    skipped = [number for number, law in written["laws"].items() if law["outcome"] != "passed"]
    assert skipped == ["B14"]  # only a hook can make a store full
    assert "no peek hook" in written["laws"]["B8"]["reasons"].values()


def test_one_law_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("memory", only="B9") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["B9   passed   delete_is_idempotent_and_counts_what_was_there"]


def test_run_that_selected_no_law_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("memory", only="two_instances_see_one_store") == 1
    assert "memory: no law was selected, so nothing was shown" in capsys.readouterr().err


def test_unknown_law_names_the_laws() -> None:
    with pytest.raises(ConfigError, match="no law or test 'B99'; laws are B1, B2"):
        verify("memory", only="B99")


def test_unknown_backend_is_the_registrys_message() -> None:
    with pytest.raises(PluginNotFound):
        verify("no-such-backend")


def test_configuration_file_is_used() -> None:
    Path("c.yaml").write_text("tiers:\n  - memory: {size: 64MiB}\n")
    assert verify("memory", config="c.yaml", only="B1") == 0
    Path("c.yaml").write_text("tiers: []\n")
    with pytest.raises(ConfigError, match=r"c.yaml: no tier of plugin 'memory' \(there: none\)"):
        verify("memory", config="c.yaml")


BROKEN = """
from lmcache_core.memory.backend import MemoryBackend
from lmcache_core.spi import Unavailable

class Broken(MemoryBackend):
    async def delete(self, keys, /):
        await super().delete(keys)
        return len(keys)

class Unreachable(MemoryBackend):
    async def open(self):
        raise Unavailable("nobody answers at port 1")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    Path("somebodys_backend.py").write_text(BROKEN)
    Path("paths.yaml").write_text("plugins: {allow_paths: true}\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(tmp_path / "paths.yaml"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "somebodys_backend"


def test_broken_law_is_named_with_its_reason(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(f"{module}:Broken") == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if " failed " in line]
    assert {line.split()[0] for line in failed} == {"B9", "M1"}
    laws = json.loads(Path("conformance.json").read_text())["laws"]
    assert [number for number, law in laws.items() if law["outcome"] == "failed"] == ["B9", "M1"]


def test_store_that_does_not_answer_is_one_error(module: str) -> None:
    with pytest.raises(Unavailable, match="nobody answers at port 1"):
        verify(f"{module}:Unreachable")


def test_law_with_one_failed_test_is_failed_whatever_else_passed() -> None:
    verdicts = [
        Verdict("B10", "test_a", Outcome.PASSED),
        Verdict("B2", "test_b", Outcome.SKIPPED, "no hook"),
        Verdict("B10", "test_c", Outcome.FAILED, "because"),
    ]
    laws = conformance("x", "1", verdicts)["laws"]
    assert list(laws) == ["B2", "B10"]
    assert laws["B2"]["outcome"] == "skipped"
    assert laws["B10"] == {
        "outcome": "failed",
        "tests": {"test_a": "passed", "test_c": "failed"},
        "reasons": {"test_c": "because"},
    }


def test_service_that_is_there_is_used() -> None:
    need_service("redis", None, start="valkey-server", environment={})


def test_missing_service_skips_and_says_how_to_start_it() -> None:
    with pytest.raises(SkipTest, match="redis: refused; start it with: valkey-server"):
        need_service("redis", "refused", start="valkey-server", environment={})


def test_missing_service_that_was_promised_fails() -> None:
    promised = {"LMCACHE_TEST_SERVICES": "s3, redis"}
    with pytest.raises(AssertionError, match="promises redis, but refused"):
        need_service("redis", "refused", start="valkey-server", environment=promised)


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    offered = {entry.value for entry in entry_points(group="pytest11")}
    plugin = [] if "lmcache_core._pytest" in offered else ["-p", "lmcache_core._pytest"]
    command = [sys.executable, "-m", "pytest", "-q", *plugin, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


CLASS = """
from lmcache_core.memory.backend import MemoryBackend
from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import test_context

class TestMine(BackendTests):
    plugin = "mine"
    version = "7"
    def make_backend(self):
        return MemoryBackend(MemoryBackend.testing_config(), test_context())
"""


def test_pytest_writes_one_report_per_class() -> None:
    Path("test_mine.py").write_text(CLASS)
    done = run_pytest("test_mine.py", "--conformance", "reports", "-k", "delete or expires")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(Path("reports/mine.json").read_text())
    assert (report["name"], report["version"]) == ("mine", "7")
    assert {number: law["outcome"] for number, law in report["laws"].items()} == {
        "B9": "passed",
        "B12": "passed",
        "B15": "passed",
    }


def test_pytest_run_in_which_every_law_was_skipped_fails() -> None:
    Path("test_mine.py").write_text(CLASS)
    done = run_pytest("test_mine.py", "--conformance", "reports", "-k", "two_instances")
    assert done.returncode == 1
    assert "1 skipped" in done.stdout


def test_pytest_plugin_imports_nothing_of_the_kit() -> None:
    program = (
        "import sys, lmcache_core._pytest;"
        "print([name for name in sys.modules if name.startswith('lmcache_core.')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"['lmcache_core._pytest']\n"
