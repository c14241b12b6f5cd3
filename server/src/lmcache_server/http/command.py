"""``lmcache http``: the process in front of a daemon, and how ``lmcache server`` starts it beside itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Annotated, Any

import typer

from lmcache_core.cli.output import remark
from lmcache_core.spi import ConfigError
from lmcache_core.wire.address import runtime_folder

app = typer.Typer(add_completion=False, rich_markup_mode=None)
PORT = 8080
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

    operator = Operator(daemon, token=read_token(token_file))
    servers: list[Callable[[], None]] = []
    if prometheus_port is not None:
        listener = _listen(prometheus_host, prometheus_port)
        servers.append(_server(create_scraped(operator), listener, until_stdin_ends))
        remark(f"lmcache http serves /metrics on {_shown(listener)}")
    if not only_prometheus:
        listener = _listen(host, port)
        path = http_token_file or f"{runtime_folder()}/http-{listener.getsockname()[1]}.token"
        served = create(operator, make_token(path), hosts=tuple(allow_host or ()))
        servers.append(_server(served, listener, until_stdin_ends))
        remark(f"lmcache http serves on {_shown(listener)}; token in {path}")
    if not servers:
        raise ConfigError("--only-prometheus needs --prometheus-port")
    for run in servers[:-1]:  # signals reach the last; the others end with the process
        threading.Thread(target=run, name="lmcache-http-metrics", daemon=True).start()
    servers[-1]()
    operator.close()
    return 0


def _server(served: Any, listener: socket.socket, until_stdin_ends: bool) -> Callable[[], None]:
    import uvicorn

    server = uvicorn.Server(
        uvicorn.Config(
            served, log_level="warning", access_log=False, proxy_headers=False, server_header=False,
            limit_concurrency=_MOST_REQUESTS, timeout_graceful_shutdown=5, ws="none",
        )
    )  # fmt: skip
    if until_stdin_ends:
        threading.Thread(
            target=_watch, args=(server,), name="lmcache-http-end", daemon=True
        ).start()
    return lambda: server.run([listener])


def _shown(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _watch(server: object) -> None:
    """The daemon holds the other end of standard input and never writes; it ends however the daemon ends."""
    sys.stdin.buffer.read()
    server.should_exit = True  # type: ignore[attr-defined]


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(f"cannot listen on {host}:{port}: {why}") from error


def beside(path: str, /, *flags: str) -> subprocess.Popen[bytes]:
    """Start it for the daemon at this socket; it ends with the process that holds the answer."""
    return subprocess.Popen(
        [
            sys.executable, "-m", "lmcache_core", "http", "--until-stdin-ends",
            "--daemon", f"unix://{path}", *flags,
        ],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
    )  # fmt: skip
