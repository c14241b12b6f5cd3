"""The command itself: fast, quiet, one line per error, fixed exit statuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lmcache_core
from lmcache_core import cli
from lmcache_core.cli import main
from lmcache_core.spi import ConfigError, Corrupt, LMCacheError, PluginNotFound, Unavailable
from tests.registry.dists import MakeDist


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LMCACHE_")]:
        monkeypatch.delenv(name)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in cli.OWN:
        assert f"\n  {name} " in out


@pytest.mark.parametrize("name", [*cli.OWN, "plugins verify", "plugins new"])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == 0
    assert f"Usage: lmcache {name} " in capsys.readouterr().out


def test_without_a_command_help_is_shown_as_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Usage: lmcache ")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lmcache {lmcache_core.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "no such command 'nope' (see `lmcache --help`)"),
        (["plugins", "verify"], "missing argument 'name' (see `lmcache plugins verify --help`)"),
        (["config", "--sett", "a=1"], "no such option: --sett"),
        (
            ["config", "--set", "a"],
            "not KEY=VALUE: 'a' (example: tiers.disk.size=1TiB) (see `lmcache config --help`)",
        ),
        (["config", "--config", "/none.yaml"], "/none.yaml: cannot be read: No such file or directory"),
        (["doctor", "--set", "chunk_sizes=1"], "flag chunk_sizes: chunk_sizes: unknown key; did you mean 'chunk_size'?"),
        (["plugins", "new", "backend", "A_b"], "not a plugin name: 'A_b' (lower case, digits, single hyphens)"),
    ],
)  # fmt: skip
def test_usage_and_configuration_errors_are_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    first, *rest = captured.err.splitlines()
    assert rest == []
    # Words of the parsing library differ between its versions; ours do not.
    assert first.startswith("lmcache: ")
    assert message in first or message.lower().replace("'", "") in first.lower().replace("'", "")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ConfigError("kv.yaml:1: wrong"), 2, "kv.yaml:1: wrong"),
        (PluginNotFound("no backend 'x'"), 2, "no backend 'x'"),
        (Unavailable("no answer"), 3, "no answer"),
        (Corrupt("damaged"), 3, "damaged"),
        (ConnectionRefusedError(111, "Connection refused"), 3, "[Errno 111] Connection refused"),
        (LMCacheError("something"), 1, "something"),
        (FileNotFoundError(2, "No such file", "x"), 1, "[Errno 2] No such file: 'x'"),
        (
            RuntimeError("first\nsecond"),
            1,
            "internal error: RuntimeError: first (LMCACHE_DEBUG=1 shows where)",
        ),
    ],
)
def test_every_error_ends_in_one_line_and_its_status(
    error: BaseException,
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("lmcache_core.config.load", fail)
    assert main(["config"]) == status
    assert capsys.readouterr().err == f"lmcache: {message}\n"


def test_debugging_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("here")

    monkeypatch.setattr("lmcache_core.config.load", fail)
    monkeypatch.setenv("LMCACHE_DEBUG", "1")
    with pytest.raises(RuntimeError, match="here"):
        main(["config"])


COMMAND = """
import typer
app = typer.Typer()
@app.command()
def greet(status: int = 0):
    print("hello")
    raise typer.Exit(status)
"""


def test_a_command_of_another_distribution(
    make_dist: MakeDist, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dist("acme-tools", {"commands": {"greet": "MODULE:app"}}, COMMAND)
    assert main(["--help"]) == 0
    assert re.search(r"greet +From acme-tools\.", capsys.readouterr().out)
    info = next(Path(sys.path[0]).glob("acme_tools-*.dist-info/METADATA"))
    info.write_text(f"{info.read_text()}Summary: Says hello.\n")
    assert main(["--help"]) == 0
    assert re.search(r"greet +Says hello \(from acme-tools\)\.", capsys.readouterr().out)
    assert main(["greet", "--status", "3"]) == 3
    assert capsys.readouterr().out == "hello\n"


def test_the_shell_completes_commands_without_importing_them(
    make_dist: MakeDist, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make_dist("acme-tools", {"commands": {"boom": "MODULE:app"}}, "raise RuntimeError")
    for words, found in (("lmcache bo", ["boom"]), ("lmcache config --js", ["--json"])):
        monkeypatch.setenv("_LMCACHE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        with pytest.raises(SystemExit):
            main([])
        assert capsys.readouterr().out.split() == found
    assert module not in sys.modules


def test_a_command_is_imported_only_when_it_is_named(
    make_dist: MakeDist, capsys: pytest.CaptureFixture[str]
) -> None:
    module = make_dist(
        "acme-tools", {"commands": {"boom": "MODULE:app"}}, "raise RuntimeError('x')"
    )
    assert main(["--help"]) == 0
    assert main(["config"]) == 0
    assert module not in sys.modules
    capsys.readouterr()
    assert main(["boom"]) == 2
    assert capsys.readouterr().err == (
        "lmcache: command 'boom' (acme-tools 1.2) failed to import: RuntimeError: x;"
        " repair or remove acme-tools\n"
    )


def test_a_command_cannot_take_a_name_of_the_core(
    make_dist: MakeDist, capsys: pytest.CaptureFixture[str]
) -> None:
    module = make_dist("acme-tools", {"commands": {"config": "MODULE:app"}}, COMMAND)
    assert main(["config", "--json"]) == 0
    assert module not in sys.modules
    assert json.loads(capsys.readouterr().out)["settings"]


def test_an_interruption_has_the_usual_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lmcache_core.config.load", interrupt)
    assert main(["config"]) == 130


def test_module_form_is_the_same_command_and_a_closed_pipe_is_not_complained_about() -> None:
    script = f"{sys.executable} -m lmcache_core config | head -n 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.split() == ["key", "value", "source"]


def test_help_imports_neither_tensors_nor_the_plugin_contract_nor_rich() -> None:
    code = (
        "import sys; from lmcache_core.cli import main; main(['--help']);"
        "print(sorted({'torch', 'numpy', 'rich', 'yaml', 'msgspec', 'asyncio', 'lmcache_core.spi'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_no_command_of_the_core_imports_tensors(tmp_path: Path) -> None:
    code = (
        "import sys; from lmcache_core.cli import main;"
        "[main(a) for a in (['config'], ['plugins'], ['doctor', '--help'])];"
        "print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
