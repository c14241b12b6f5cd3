"""``lmcache http``: the process in front of a daemon, and how ``lmcache server`` starts it beside itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmcache_core.cli.output import remark
from lmcache_core.spi import ConfigError
from lmcache_core.wire.address import runtime_folder

if TYPE_CHECKING:
    from uvicorn import Server

app = typer.Typer(add_completion=False, rich_markup_mode=None)
PORT = 8080
METRICS_PORT = 9090
_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
_MOST_REQUESTS = 64


@app.command()
def http(
    daemon: Annotated[
        str, typer.Option(envvar="LMCACHE_DAEMON", help="Its address.")
    ] = "localhost",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = PORT,
    http_token_file: Annotated[
        str | None, typer.Option(help="Where the token of this start is written.")
    ] = None,
    token_file: Annotated[
        str | None, typer.Option(help="The daemon's token, where its socket is out of reach.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A name by which it is reached; repeat for several.")
    ] = None,
    prometheus_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="One more port, for /metrics alone.")
    ] = None,
    prometheus_host: Annotated[str, typer.Option(help="Its address.")] = "127.0.0.1",
    only_prometheus: Annotated[bool, typer.Option(help="Serve nothing but /metrics.")] = False,
    until_stdin_ends: Annotated[bool, typer.Option(hidden=True)] = False,
) -> int:
    """Serve health, status, metrics and administration of a daemon over HTTP."""
    from lmcache_server.client.operator import Operator, read_token
    from lmcache_server.http.app import create, create_scraped
    from lmcache_server.http.guard import make_token

    if only_prometheus and prometheus_port is None:
        raise ConfigError("--only-prometheus needs --prometheus-port")
    operator = Operator(daemon, token=read_token(token_file))
    servers: list[tuple[Server, socket.socket]] = []

    def listen(flag: str, host: str, port: int) -> socket.socket | None:
        try:
            return _listen(host, port)
        except ConfigError as error:
            if not until_stdin_ends:
                raise
            remark(f"lmcache: {error}; {flag} PORT takes another one, {flag} none takes none")
            return None

    if prometheus_port is not None:
        listener = listen("--prometheus-port", prometheus_host, prometheus_port)
        if listener is not None:
            servers.append((_server(create_scraped(operator)), listener))
            remark(f"lmcache http serves /metrics on {_shown(listener)}")
    if not only_prometheus:
        listener = listen("--http-port", host, port)
        if listener is not None:
            path = http_token_file or f"{runtime_folder()}/http-{listener.getsockname()[1]}.token"
            served = create(operator, make_token(path), hosts=tuple(allow_host or ()))
            servers.append((_server(served), listener))
            remark(f"lmcache http serves on {_shown(listener)}; token in {path}")
    if servers:
        _serve(servers, until_stdin_ends)
    operator.close()
    return 0 if servers else 2


def _server(served: Any) -> Server:
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(
            served, log_level="warning", access_log=False, proxy_headers=False, server_header=False,
            limit_concurrency=_MOST_REQUESTS, timeout_graceful_shutdown=5, ws="none",
        )
    )  # fmt: skip


def _serve(servers: list[tuple[Server, socket.socket]], until_stdin_ends: bool) -> None:
    """Until a signal, or the end of the daemon: it holds the other end of standard input, never writes, and lets
    go of it however it ends.
    """

    def stop(*told: object) -> None:
        for server, _ in servers:
            server.should_exit = True

    def watch() -> None:
        sys.stdin.buffer.read()
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)  # uvicorn raises again what ended it: a good end to us
    if until_stdin_ends:
        threading.Thread(target=watch, name="lmcache-http-end", daemon=True).start()
    for server, listener in servers[:-1]:  # signals reach the last; the others end with the process
        threading.Thread(
            target=server.run, args=([listener],), name="lmcache-http-metrics", daemon=True
        ).start()
    server, listener = servers[-1]
    server.run([listener])


def _shown(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(f"cannot listen on {host}:{port}: {why}") from error


def beside(path: str, /, *flags: str) -> subprocess.Popen[bytes] | None:
    """Start it for the daemon at this socket; it ends with the process that holds the answer.

    Where it cannot be started a line says why, and the daemon goes on without it.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        remark(
            f"lmcache: no HTTP and no metrics port: {', '.join(missing)} not installed; "
            "`pip install fastapi uvicorn prometheus-client` brings them, "
            "--http-port none --prometheus-port none does without"
        )
        return None
    try:
        return subprocess.Popen(
            [
                sys.executable, "-m", "lmcache_core", "http", "--until-stdin-ends",
                "--daemon", f"unix://{path}", *flags,
            ],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            process_group=0,  # an interrupt from the terminal is the daemon's, which then ends this
        )  # fmt: skip
    except OSError as error:
        remark(f"lmcache: no HTTP and no metrics port: {error}")
        return None
