"""``lmcache server``: run the daemon."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from lmcache_core import __version__
from lmcache_core.cli.output import remark
from lmcache_core.config import Effective, load
from lmcache_core.memory.arena import Access
from lmcache_core.memory.limits import text
from lmcache_core.spi import ConfigError, PluginError, Secret
from lmcache_core.wire.address import DEFAULT_PORT, runtime_folder, socket_path
from lmcache_server import service
from lmcache_server.client.operator import read_token
from lmcache_server.daemon import Daemon, Options
from lmcache_server.flags import FLAGS, Effect
from lmcache_server.http import command as http_command

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_MODES = {"sealed": Access.OWNER, "shared-rw": Access.SHARED}
_NO_PORT = ("none", "off")
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@app.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "help_option_names": [],
    }
)
def main(context: typer.Context) -> int:
    """Run the daemon: one cache for all engines of this node."""
    given = _parse(context.args)
    flags = {**_settings_file(given.settings), **settings(given)}
    path = given.config

    def read() -> Effective:
        try:
            return load(path, flags=flags)
        except (ConfigError, PluginError) as error:
            raise type(error)(_in_flags(str(error))) from error

    effective = read()
    options, http = _options(given), beside_flags(given)
    report = _daemonize(given.log_file) if given.daemonize else None
    if given.private:
        with suppress(OSError):  # an engine may have been bound to a few cores
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
    logging.basicConfig(level=logging.WARNING, format=_LOG_FORMAT, stream=sys.stderr)
    logging.getLogger("lmcache").setLevel(effective.config.log_level.upper())
    for note in effective.notes:
        logging.getLogger("lmcache.server").warning("%s", note)

    beside = []

    def ready(daemon: Daemon) -> None:
        _banner(daemon)
        service.tell(service.READY)
        if report is not None:
            os.write(report, b"+")
            os.close(report)
        if http:
            beside.append(http_command.beside(options.path, *http))

    try:
        shutdown = Daemon(effective, options, reload=read, ready=ready).run()
    except Exception as error:
        if report is not None:  # named boundary: the foreground process prints it
            os.write(report, str(error).encode()[:4000])
        raise
    for tier, trouble in shutdown.errors.items():
        remark(f"tier {tier}: {trouble}")
    if shutdown.unwritten:
        remark(f"{text(shutdown.unwritten)} were not written")
    sys.stderr.flush()
    # A tier that hangs in the kernel must not keep the process; everything else has ended.
    os._exit(int(bool(shutdown.errors or shutdown.unwritten)))


def beside_flags(given: argparse.Namespace) -> list[str]:
    """Flags of the HTTP process beside the daemon; none where no port of it is wanted.

    Raises:
        ConfigError: a port is none.
    """
    metrics = given.prometheus_port
    if given.disable_metrics or given.disable_observability:
        metrics = _NO_PORT[0]
    flags = []
    for own, flag, written, default, host in (
        ("", "--http-port", given.http_port, http_command.PORT, given.http_host),
        ("prometheus-", "--prometheus-port", metrics, http_command.METRICS_PORT, given.prometheus_host),
    ):  # fmt: skip
        if (written is None and given.private) or written in _NO_PORT:
            continue
        port = _number(flag, written, default)
        flags += [f"--{own}port", str(port), f"--{own}host", host or "127.0.0.1"]
    if flags and "--port" not in flags:
        flags.append("--only-prometheus")
    return flags


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """Configuration keys that the flags stand for.

    Raises:
        ConfigError: a flag that is refused, or a tier that is none.
    """
    for flag in FLAGS:
        value = getattr(given, flag.attribute)
        if flag.effect is Effect.REFUSED and value not in (None, False, flag.harmless):
            raise ConfigError(f"{flag.name} is not supported: {flag.what}")
        if flag.effect is Effect.NOTHING and value not in (None, False):
            remark(f"{flag.name} has no effect: {flag.what}")
    found = {
        flag.to: getattr(given, flag.attribute)
        for flag in FLAGS
        if flag.to and getattr(given, flag.attribute) not in (None, False)
    }
    if given.l2_adapter:
        memory: dict[str, Any] = {}
        if "max_local_cpu_size" in found:
            memory["size"] = f"{found.pop('max_local_cpu_size')}GiB"
        if found.pop("local_cpu_use_hugepages", False):
            memory["huge_pages"] = True
        if "local_disk" in found:
            raise ConfigError(
                "--l2-disk-path cannot stand beside --l2-adapter; write it as one more"
            )
        policy = found.pop("cache_policy", None)
        tiers = [{"cpu": memory}, *(_adapter(written) for written in given.l2_adapter)]
        if policy is not None:
            for tier in tiers:
                for options in tier.values():
                    options.setdefault("policy", policy.lower())
        found["tiers"] = tiers
    return found


def _in_flags(problem: str) -> str:
    """What is wrong with a key that a flag stands for, under the flag's own name."""
    for flag in FLAGS if problem.startswith("flag ") else ():
        if flag.to:
            to = re.escape(flag.to)
            key = rf"\b(?:flag )?{to}\b(?: \({to}\)|: {to}\b)*"
            problem = re.sub(key, flag.name, problem)
    return problem


def _adapter(written: str) -> dict[str, dict[str, Any]]:
    try:
        options = json.loads(written)
        kind = options.pop("type")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f'--l2-adapter takes an object with a type, such as \'{{"type": "disk", ...}}\', not {written[:80]!r}'
        ) from error
    return {str(kind): options}


def _settings_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return dict(json.loads(Path(path).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--settings {path}: no JSON object can be read: {error}") from error


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lmcache server", allow_abbrev=False, argument_default=None, exit_on_error=False,
        description="Run the daemon: one cache for all engines of this node.",
    )  # fmt: skip
    for flag in FLAGS:
        shown = flag.what if flag.effect is Effect.MAPPED else argparse.SUPPRESS
        if flag.name == "--l2-adapter":
            parser.add_argument(flag.name, action="append", metavar=flag.value, help=shown)
        elif flag.value:
            parser.add_argument(flag.name, metavar=flag.value, help=shown)
        else:
            parser.add_argument(flag.name, action="store_true", help=shown)
    try:
        given, unknown = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error} (see `lmcache server --help`)") from error
    if unknown:
        own = [flag.name for flag in FLAGS if flag.effect is Effect.MAPPED]
        near = get_close_matches(unknown[0].partition("=")[0], own, 1)
        hint = f"did you mean {near[0]}?" if near else "see `lmcache server --help`"
        raise ConfigError(f"no such flag: {unknown[0]}; {hint}")
    return given


def _options(given: argparse.Namespace) -> Options:
    port = _number("--port", given.port, 0 if given.private else DEFAULT_PORT)
    sockets = service.passed()
    paths = [str(sock.getsockname()) for sock in sockets if sock.family == socket.AF_UNIX]
    paths += [given.socket] if given.socket and given.socket not in paths else []
    if len(paths) > 1:
        raise ConfigError(f"clients find one unix socket, not {' and '.join(paths)}")
    passed = [sock.getsockname()[:2] for sock in sockets if sock.family != socket.AF_UNIX]
    host, port = passed[0] if passed else (given.host or "localhost", port)
    if given.arena_mode not in (None, *_MODES):
        raise ConfigError(f"--arena-mode is {' or '.join(_MODES)}, not {given.arena_mode!r}")
    token = read_token(given.token_file)
    for each in (host, *(address for address, _ in passed)):
        if not token and each not in ("localhost", "127.0.0.1", "::1"):
            raise ConfigError(f"{each} is not this machine alone: --host needs --token-file")
    return Options(
        path=paths[0] if paths else socket_path(runtime_folder(), f"port-{port}"),
        sockets=sockets,
        host=host,
        port=port,
        token=Secret(token),
        certificate=given.ssl_certfile or "",
        key=given.ssl_keyfile or "",
        access=_MODES[given.arena_mode or ("shared-rw" if given.private else "sealed")],
        overcommit=given.overcommit,
        grace=_number("--grace", given.grace, 30.0) if given.private else None,
        drain=_number("--drain-seconds", given.drain_seconds, 5.0),
        changes=_number("--kv-event-log-size", given.kv_event_log_size, 1 << 14, most=1 << 24),
    )


def _number(flag: str, written: str | None, default: Any, *, most: int = (1 << 16) - 1) -> Any:
    if written is None:
        return default
    try:
        value = type(default)(written)
    except ValueError as error:
        raise ConfigError(f"{flag} takes a number, not {written!r}") from error
    if not 0 <= value <= most:
        raise ConfigError(f"{flag} is out of range: {written}")
    return value


def _banner(daemon: Daemon) -> None:
    config, options = daemon.effective.config, daemon.options
    tcp = f", tcp {options.host}:{options.port}" if options.port else ""
    if options.port:
        tcp += " (TLS, " if options.certificate else " ("
        tcp += "token)" if options.token else "hello only: no token)"
    remark(f"lmcache server {__version__} (pid {os.getpid()}) serves on {options.path}{tcp}")
    remark(
        f"memory: {text(daemon.manager.pool.capacity)}, {options.mode}; chunk_size {config.engine.chunk_size}"
    )
    for tier in daemon.manager.tiers:
        wrapped = ", ".join(each.name for chain in tier.config.chains for each in chain)
        size = f", {text(tier.config.size)}" if tier.config.size else ""
        state = "ready" if tier.usable else "not answering yet"
        remark(
            f"tier {tier.name}: {tier.config.plugin}{size}{', ' + wrapped if wrapped else ''}, {state}"
        )


def _daemonize(log_file: str | None) -> int:
    """Go on in a process of its own session; this one waits for news and ends. Returns where to say ``+``."""
    told, report = os.pipe()
    if os.fork():
        os.close(report)
        with os.fdopen(told, "rb") as news:
            said = news.read()
        if said != b"+":
            remark(f"lmcache: {said.decode(errors='replace') or 'the daemon ended'}")
            os._exit(2)
        os._exit(0)
    os.close(told)
    os.setsid()
    if os.fork():
        os._exit(0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if log_file else nowhere
    for target, source in ((0, nowhere), (1, log), (2, log)):
        os.dup2(source, target)
    return report
