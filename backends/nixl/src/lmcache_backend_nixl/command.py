"""``lmcache nixl-target``: lend memory of this node to the tiers of others."""

# No postponed annotations: the command line is made from the types.

import asyncio
import ipaddress
import signal
from pathlib import Path
from typing import Annotated

import typer

from lmcache_backend_nixl.config import ADDRESS, ETCD, PEERS
from lmcache_backend_nixl.directory import Directory, Record
from lmcache_backend_nixl.target import Target
from lmcache_core.cli.output import remark
from lmcache_core.spi import ByteSize, ConfigError

ETCD_S = 3.0
"""Longest wait for an answer of etcd."""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def main(
    size: Annotated[str, typer.Option("--size", help="Memory to lend, such as 20GiB.")],
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT.")] = "127.0.0.1:5560",
    backend: Annotated[str, typer.Option("--backend", help="UCX or LIBFABRIC.")] = "UCX",
    param: Annotated[
        list[str] | None, typer.Option("--param", help="NAME=VALUE for the NIXL plugin.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="What tiers must show as `token`.")
    ] = None,
    announce: Annotated[
        str, typer.Option("--announce", help="etcd://HOST:PORT/NAME to be found by.")
    ] = "",
) -> int:
    """Lend memory of this node to nixl tiers of other nodes. Runs until it is told to end."""
    match = ADDRESS.fullmatch(listen)
    if match is None:
        raise ConfigError(f"--listen is {listen!r}; write HOST:PORT")
    host, port = match[2].strip("[]"), int(match[3])
    if announce and not ETCD.fullmatch(announce):
        raise ConfigError(f"--announce is {announce!r}; write etcd://HOST:PORT[,HOST:PORT]/NAME")
    if announce and host in ("0.0.0.0", "::"):
        raise ConfigError(f"--listen {listen} is no address to announce; write one to connect to")
    if backend not in PEERS:
        raise ConfigError(f"--backend is {backend!r}; one of {', '.join(PEERS)}")
    params = dict(_pair(each) for each in param or ())
    token = token_file.read_text(encoding="utf-8").strip() if token_file is not None else ""
    if not token and not _loopback(host):
        raise ConfigError(f"--listen {listen} is not this machine alone; give a --token-file")
    try:
        nbytes = ByteSize.parse(size)
    except ValueError as error:
        raise ConfigError(f"--size: {error}") from None
    target = Target(nbytes, backend, params, token=token)
    remark(f"lends {nbytes} bytes by {backend} on {listen}")
    directory = Directory(announce, ETCD_S) if announce else None
    asyncio.run(_serve(target, host, port, directory))
    target.agent.close()
    return 0


async def _serve(target: Target, host: str, port: int, directory: Directory | None) -> None:
    end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end.set)
    server = await target.serve(host, port)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    record = Record(address, target.agent.name, target.agent.describe())
    announcing = None if directory is None else asyncio.create_task(directory.keep(record))
    await end.wait()
    if announcing is not None:
        announcing.cancel()
    server.close()


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _pair(written: str) -> tuple[str, str]:
    name, separator, value = written.partition("=")
    if not separator:
        raise ConfigError(f"--param is {written!r}; write NAME=VALUE")
    return name, value
