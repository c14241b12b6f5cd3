"""Connections to the server, or to all nodes of a cluster: made when needed, kept, dropped when they break."""

from __future__ import annotations

import random as random_module
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from redis import Connection, RedisError, SSLConnection, UnixDomainSocketConnection
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import AuthenticationError, ResponseError
from redis.retry import Retry
from redis.sentinel import Sentinel

from lmcache_backend_redis.config import RedisConfig, target_of
from lmcache_backend_redis.resp import Broken, Link, Reply, Said, command
from lmcache_core.spi import BackendError, ConfigError, Unavailable

Address = tuple[str, int] | None
"""A node of a cluster; None is the server where there is one."""
HOPS = 5
"""Most redirects followed for one key."""
SLOTS = 16384


class Flight:
    """The connections that one call uses, so that whoever waits for it can leave."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self.abandoned = False

    def board(self, link: Link | None = None, /) -> None:
        """Go on, with a connection if one is given.

        Raises:
            Unavailable: nobody waits any more.
        """
        with self._lock:
            if self.abandoned:
                raise Unavailable("cancelled before it began")
            if link is not None:
                self._links.add(link)

    def leave(self, link: Link, /) -> None:
        with self._lock:
            self._links.discard(link)

    def interrupt(self) -> None:
        """Make what waits on these connections fail at once."""
        with self._lock:
            for link in self._links:
                link.interrupt()

    def abandon(self) -> None:
        """Let nothing new begin, and interrupt what runs."""
        with self._lock:
            self.abandoned = True
        self.interrupt()


class Client:
    """Blocking calls on one server, one master behind sentinels, or one cluster; thread-safe.

    Attributes:
        part_nbytes: most bytes of one string; more become parts.

    Raises:
        ConfigError: the URL cannot be read.
    """

    def __init__(self, config: RedisConfig, random: random_module.Random) -> None:
        self.random = random
        self.part_nbytes = int(config.part_size)
        self.target = target_of(config)
        self.cluster = self.target.kind == "redis-cluster"
        self.opened = False
        self._config = config
        self._prefix = config.prefix.encode()
        self._lock = threading.Lock()
        self._idle: dict[Address, list[Link]] = defaultdict(list)
        self._slots: list[Address] = []
        self._flight = Flight()
        self._closed = False
        self._sentinel = self._sentinels() if self.target.kind == "redis-sentinel" else None

    def name(self, text: str) -> bytes:
        """Name of a key in the store."""
        return self._prefix + text.encode()

    def place(self, name: bytes) -> Address:
        """The node that should have a name, as far as is known; any other redirects."""
        if not self.cluster:
            return None
        slots = self._slots
        return (slots[key_slot(name)] if slots else None) or self.target.hosts[0]

    @property
    def nodes(self) -> list[Address]:
        """Every node that has values, in a stable order."""
        return sorted(set(self._slots) - {None}, key=str) if self.cluster else [None]

    # -- connections -----------------------------------------------------------------------------------------

    @contextmanager
    def link(self, address: Address, flight: Flight | None = None) -> Iterator[Link]:
        """A connection to a node for the block; kept when the block ends well, closed when not.

        Raises:
            Unavailable: there is none, or it broke.
        """
        flight = flight or self._flight
        flight.board()
        link = self._kept(address) or self._connect(address)
        try:
            try:
                flight.board(link)
                yield link
            finally:
                flight.leave(link)
        except BaseException as error:
            link.close()
            if isinstance(error, Broken):
                self.forget(address)
                raise Unavailable(f"{self._shown(address)}: {error}") from error
            raise
        with self._lock:
            room = len(self._idle[address]) < self._config.threads
            if link.keep and room and not self._closed:
                self._idle[address].append(link)
                return
        link.close()

    def forget(self, address: Address) -> None:
        """Close what is kept to a node: it is gone, or no longer what it was."""
        with self._lock:
            links = self._idle.pop(address, [])
        for link in links:
            link.close()

    def interrupt(self) -> None:
        """Make the calls fail that no caller can abandon by itself."""
        self._flight.interrupt()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            links = [link for kept in self._idle.values() for link in kept]
            self._idle.clear()
        for link in links:
            link.close()
        if self._sentinel is not None:
            self._sentinel.close()

    def _kept(self, address: Address) -> Link | None:
        while True:
            with self._lock:
                if not self._idle[address]:
                    return None
                link = self._idle[address].pop()
            if link.clean:
                return link
            link.close()

    def _connect(self, address: Address) -> Link:
        try:
            return Link(self._connection(address), self._config.timeout)
        except (AuthenticationError, ResponseError) as error:
            refusal = f"{self._shown(address)} refuses the login: {_line(error)}"
            if self.opened:  # it worked before: no longer a fault of the configuration alone
                raise Unavailable(refusal, retryable=False) from error
            raise ConfigError(refusal) from error
        except (RedisError, OSError) as error:
            self.forget(address)
            raise Unavailable(f"{self._shown(address)}: {_line(error)}") from error

    def _connection(self, address: Address) -> Any:
        target = self.target
        options: dict[str, Any] = self._patience | {
            "db": target.database,
            "username": target.username or None,
            "password": target.password or None,
            "driver_info": None,
        }
        if target.kind == "unix":
            connect: Any = UnixDomainSocketConnection
            return connect(target.path, **options)
        if self._sentinel is not None:
            address = self._sentinel.discover_master(target.service)
        host, port = address or target.hosts[0]
        options |= {"host": host, "port": port, "socket_keepalive": True}
        connect = SSLConnection if target.encrypted else Connection
        return connect(**options, **(self._encryption if target.encrypted else {}))

    @property
    def _encryption(self) -> dict[str, Any]:
        tls = self._config.tls
        return {
            "ssl_cert_reqs": "required" if tls.verify else "none",
            "ssl_check_hostname": tls.verify,
            "ssl_ca_certs": tls.ca or None,
            "ssl_certfile": tls.cert or None,
            "ssl_keyfile": tls.key or None,
        }

    @property
    def _patience(self) -> dict[str, Any]:
        return {
            "protocol": 2,
            "socket_timeout": float(self._config.timeout),
            "socket_connect_timeout": float(self._config.connect_timeout),
            "retry": Retry(NoBackoff(), 0),  # one call, one deadline; trying again is the manager's
        }

    def _sentinels(self) -> Any:
        config = self._config
        options = self._patience | {
            "username": config.sentinel_username or None,
            "password": config.sentinel_password.reveal() or None,
        }
        if self.target.encrypted:
            options |= self._encryption | {"ssl": True}
        sentinel: Any = Sentinel  # untyped
        return sentinel(self.target.hosts, sentinel_kwargs=options)

    def _shown(self, address: Address) -> str:
        return f"{address[0]}:{address[1]}" if address else self.target.shown

    # -- short commands --------------------------------------------------------------------------------------

    def ask(self, address: Address, *words: bytes) -> Reply:
        """One short command on one node."""
        with self.link(address) as link:
            link.send(command(*words))
            return link.reply()

    def each(
        self, verb: bytes, names: Sequence[bytes], *more: bytes, flight: Flight | None = None
    ) -> list[Reply | BackendError]:
        """One short command on each name, all under way at once; a node that fails answers with its error."""
        answers: list[Reply | BackendError] = [None] * len(names)
        groups: dict[Address, list[int]] = defaultdict(list)
        for at, name in enumerate(names):
            groups[self.place(name)].append(at)
        for address, group in groups.items():
            try:
                with self.link(address, flight) as link:
                    link.send(b"".join(command(verb, names[at], *more) for at in group))
                    for at in group:
                        answers[at] = link.reply()
            except BackendError as error:
                if flight is None or not flight.abandoned:
                    self.find_elsewhere(address)
                for at in group:
                    answers[at] = error
        for at, answer in enumerate(answers):
            if isinstance(answer, Said) and answer.code in ("MOVED", "ASK"):
                answers[at] = self._follow(answer, command(verb, names[at], *more), flight)
        return answers

    def _follow(self, answer: Said, line: bytes, flight: Flight | None) -> Reply | BackendError:
        try:
            reply: Reply = answer
            for _ in range(HOPS):
                if not isinstance(reply, Said) or reply.code not in ("MOVED", "ASK"):
                    break
                asking = reply.code == "ASK"
                with self.link(self.redirected(reply), flight) as link:
                    link.send(command(b"ASKING") * asking + line)
                    if asking:
                        link.reply()
                    reply = link.reply()
            return reply
        except BackendError as error:
            return error

    # -- cluster ---------------------------------------------------------------------------------------------

    def discover(self, without: Address = None) -> None:
        """Learn which node has which slot, from any but one.

        Raises:
            Unavailable: no node tells.
        """
        problem: object = "no node"
        for address in dict.fromkeys((*self.nodes, *self.target.hosts)):
            if address == without:
                continue
            try:
                reply = self.ask(address, b"CLUSTER", b"SLOTS")
                if isinstance(reply, list):
                    self._slots = _slots(reply, address)
                    return
                problem = reply.text if isinstance(reply, Said) else "no list of slots"
            except Unavailable as error:
                problem = error
        raise Unavailable(f"{self.target.shown}: {problem}")

    def redirected(self, reply: Said) -> Address:
        """Where a ``MOVED`` or ``ASK`` reply points; a move is learned."""
        words = reply.text.split()
        host, _, port = words[-1].rpartition(":")
        if len(words) != 3 or not words[1].isdecimal() or not port.isdecimal():
            raise Unavailable(f"{self.target.shown} redirects to nowhere: {reply.text}")
        address = host or self.target.hosts[0][0], int(port)
        slot = int(words[1])
        if reply.code == "MOVED" and slot < len(self._slots):
            self._slots[slot] = address
        self.cluster = True
        return address

    def find_elsewhere(self, address: Address) -> None:
        """After a node failed: another may have taken its slots."""
        if self.cluster:
            with suppress(Unavailable):  # the errors of the calls tell
                self.discover(without=address)


def _slots(reply: list[Any], asked: Address) -> list[Address]:
    """``CLUSTER SLOTS`` as a table; a node without a name is the one that was asked.

    https://redis.io/docs/latest/commands/cluster-slots/
    """
    table: list[Address] = [None] * SLOTS
    try:
        for first, last, (host, port, *_), *_ in reply:
            name = (host or b"").decode() or (asked[0] if asked else "")
            table[first : last + 1] = [(name, int(port))] * (last + 1 - first)
    except (TypeError, ValueError, AttributeError) as error:
        raise Unavailable(f"no list of slots: {error}") from error
    if not any(table):
        raise Unavailable("no node has any slot")
    return table


def _line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
