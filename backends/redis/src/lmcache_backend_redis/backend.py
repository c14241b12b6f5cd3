"""The tier: batches over connections, replies to results."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from lmcache_backend_redis.client import Address, Client, Flight
from lmcache_backend_redis.config import RedisConfig
from lmcache_backend_redis.heads import MARK, Head
from lmcache_backend_redis.moving import VERBS, Item
from lmcache_backend_redis.parts import carry, heads, lengths, remove
from lmcache_backend_redis.resp import Reply, Said
from lmcache_core.spi import (
    BackendError,
    BlockingBackend,
    Capabilities,
    Closed,
    ConfigError,
    Context,
    Durability,
    Found,
    Key,
    Load,
    Loaded,
    LoadStatus,
    ScanPage,
    Store,
    Stored,
    StoreStatus,
    Unavailable,
)

PROBE_NBYTES = 1 << 20


class RedisBackend(BlockingBackend):
    """Values as strings of a Redis server, of the master that sentinels name, or of a cluster.

    One value is one string: the bytes as given, written once by ``SET NX``; a longer one than a string may be is
    a head and parts. The server may evict and expire them, so a lookup is a hint. A batch is spread over several connections by node.
    """

    config_type: ClassVar[type] = RedisConfig
    servers: ClassVar[tuple[str, ...]] = ("redis-server", "valkey-server")
    """Programs that ``testing_config`` starts, in order of preference."""
    config: RedisConfig

    def __init__(self, config: RedisConfig, context: Context, /) -> None:
        super().__init__(config, context)
        self._client: Client | None = None
        self._problem = ""
        self.capabilities = Capabilities(
            ranges=True,
            scan=True,
            ttl=True,
            shared=True,
            persistent=True,
            hints=True,
            durability=Durability.PROCESS,
            iov_max=1024,
            quiescence_s=config.connect_timeout + config.timeout + 1.0,
        )

    @classmethod
    def testing_config(cls) -> RedisConfig:
        """A server of this process, which ends with it."""
        from lmcache_backend_redis.serving import shared_server

        return RedisConfig(url=shared_server(cls.servers).url)

    @property
    def client(self) -> Client:
        if self._client is None:
            raise Closed(f"{type(self).__name__} is not open")
        return self._client

    # -- life ------------------------------------------------------------------------------------------------

    def open_blocking(self) -> None:
        self.close_blocking()  # of an earlier attempt
        client = self._client = Client(self.config, self.context.random)
        if not client.cluster:
            info = client.ask(None, b"INFO", b"server")
            client.cluster = isinstance(info, bytes) and b"redis_mode:cluster" in info
        if client.cluster:
            client.discover()
        limit = client.ask(client.nodes[0], b"CONFIG", b"GET", b"proto-max-bulk-len")
        if isinstance(limit, list) and len(limit) == 2:  # else it may not be asked
            client.part_nbytes = min(int(limit[1]), client.part_nbytes)
        self._probe()
        client.opened = True

    def _probe(self) -> None:
        """Send one value there and back.

        Raises:
            ConfigError: this user may not read here.
            Unavailable: what comes back is something else.
        """
        random = self.context.random
        key = Key(random.randbytes(32), random.randbytes(32))
        nbytes = min(PROBE_NBYTES, self.client.part_nbytes)
        value, back = random.randbytes(nbytes), bytearray(nbytes)
        began = time.perf_counter()
        stored = self.store_blocking(Store(key, (memoryview(value),), 60.0))
        middle = time.perf_counter()
        loaded = self.load_blocking(Load(key, (memoryview(back),)))
        ended = time.perf_counter()
        if loaded.error is not None:
            denied = any(word in str(loaded.error) for word in ("NOPERM", "NOAUTH"))
            kind = ConfigError if denied else Unavailable
            raise kind(f"{self.client.target.shown}: {loaded.error}")
        if stored.status in (StoreStatus.REFUSED, StoreStatus.FAILED):
            self.context.log.warning("%s takes no values: %s", self.context.tier, stored.reason)
            return
        self.delete_blocking([key])
        if loaded.status is LoadStatus.FILLED and back != value:
            raise Unavailable(f"{self.client.target.shown} gives back other bytes than it got")
        self.context.log.debug(
            "%s: a value of %d bytes took %.1f ms there and %.1f ms back",
            self.context.tier, nbytes, (middle - began) * 1e3, (ended - middle) * 1e3,
        )  # fmt: skip

    def close_blocking(self) -> None:
        if self._client is not None:
            self._client.close()

    def interrupt_blocking(self) -> None:
        if self._client is not None:
            self._client.interrupt()

    # -- values ----------------------------------------------------------------------------------------------

    def load_blocking(self, load: Load, /) -> Loaded:
        result: Loaded = self._one("load", load)
        return result

    def store_blocking(self, store: Store, /) -> Stored:
        result: Stored = self.screen_store(store) or self._one("store", store)
        return result

    def screen_store(self, store: Store, /) -> Stored | None:
        if not store.nbytes:
            return Stored.refused("empty: the server does not tell it from an absent value")
        return super().screen_store(store)

    def _one(self, operation: str, item: Any) -> Any:
        results: list[Any] = []
        name = self.client.name(item.key.text)
        items, address = [(0, name, item)], self.client.place(name)
        carry(self.client, operation, address, items, lambda _, it: results.append(it), Flight())
        return results[0]

    async def _batch(
        self, operation: str, batch: Sequence[Any], done: Callable[[int, Any], None] | None, /
    ) -> list[Any]:
        flight = Flight()
        answers = self._answers(operation, batch, done)
        lanes = self._lanes(answers.wanted)
        futures = [
            self._submit(
                operation, carry, self.client, operation, address, lane, answers.tell, flight
            )
            for address, lane in lanes
        ]
        pending, left = set(futures), False
        while pending:
            try:
                _, pending = await asyncio.wait(pending)
            except asyncio.CancelledError:  # honoured when no thread touches memory any more
                left = True
                flight.abandon()
        if left:
            raise asyncio.CancelledError
        answers.drain()  # what was told last
        for future, (_, lane) in zip(futures, lanes, strict=True):
            error = future.exception()
            if isinstance(error, BackendError):  # no thread could be started
                for at, _, _ in lane:
                    answers.settle(at, VERBS[operation].failed(error))
            elif error is not None:
                raise error
        return answers.results

    def _lanes(self, items: Sequence[tuple[int, Any]]) -> list[tuple[Address, list[Item]]]:
        """Items by node, and those of a node over several connections."""
        groups: dict[Address, list[Item]] = defaultdict(list)
        for at, item in items:
            name = self.client.name(item.key.text)
            groups[self.client.place(name)].append((at, name, item))
        each = self.config.lanes
        return [
            (address, group[first::each])
            for address, group in groups.items()
            for first in range(min(each, len(group)))
        ]

    # -- keys ------------------------------------------------------------------------------------------------

    def lookup_blocking(self, keys: Sequence[Key], /) -> Sequence[Found | None]:
        answers = self._each("lookup", lengths, keys)
        found: list[Found | None] = []
        for answer in answers:
            if isinstance(answer, Said) and answer.code == "WRONGTYPE":
                found.append(Found(1, promise=False))  # a load will tell what it is
            else:
                nbytes = answer if isinstance(answer, int) else 0
                found.append(Found(nbytes, promise=False) if nbytes else None)
        return found

    def delete_blocking(self, keys: Sequence[Key], /) -> int:
        answers = self._each("delete", remove, keys)
        return sum(answer for answer in answers if isinstance(answer, int))

    def _each(
        self, operation: str, ask: Callable[..., list[Reply | BackendError]], keys: Sequence[Key]
    ) -> list[Reply | BackendError]:
        """What ``ask`` says of each key; an error when no key got an answer."""
        answers = ask(self.client, [self.client.name(key.text) for key in keys])
        errors: list[BackendError] = []
        for answer in answers:
            if isinstance(answer, BackendError):
                errors.append(answer)
            elif isinstance(answer, Said) and answer.code != "WRONGTYPE":
                errors.append(answer.unavailable(operation))
        if len(errors) == len(answers):
            raise errors[0]
        problem = str(errors[0]) if errors else ""
        if problem and problem != self._problem:  # told once, not with every lookup
            self.context.log.warning("%s answers in part: %s", self.context.tier, problem)
        self._problem = problem
        return answers

    async def scan(self, after: str | None = None, /, *, limit: int = 1000) -> ScanPage:
        return await self.call("scan", self._scan, after, limit)

    def _scan(self, after: str | None, limit: int) -> ScanPage:
        """``after`` is NODE:CURSOR:SKIP; a reply may hold more than was asked for, and is then asked for again."""
        nodes = self.client.nodes
        number, cursor, skip = (int(part) for part in (after or "0:0:0").split(":"))
        if number >= len(nodes):
            return ScanPage([], None)
        pattern = _literally(self.client.name("")) + b"*"
        words = (b"SCAN", b"%d" % cursor, b"MATCH", pattern, b"COUNT", b"%d" % limit)
        reply = self.client.ask(nodes[number], *words)
        if not isinstance(reply, list) or len(reply) != 2:
            raise Unavailable(f"cannot list: {getattr(reply, 'text', 'no list')}", operation="scan")
        following, names = int(reply[0]), list(dict.fromkeys(reply[1]))
        part = names[skip : skip + limit]
        if skip + limit < len(names):
            then: str | None = f"{number}:{cursor}:{skip + limit}"
        elif following:
            then = f"{number}:{following}:0"
        else:
            then = f"{number + 1}:0:0" if number + 1 < len(nodes) else None
        values, foreign = [], []
        reached = self._reached(part)
        listed = [name for name in part if name not in reached]
        for name, nbytes in zip(listed, lengths(self.client, listed), strict=True):
            text = name.decode("utf-8", "backslashreplace")
            try:
                key = Key.parse(text.removeprefix(self.config.prefix))
            except ValueError:
                foreign.append(text)
                continue
            if isinstance(nbytes, int) and nbytes:
                values.append((key, Found(nbytes, promise=False)))
            elif not isinstance(nbytes, int):
                foreign.append(text)
        return ScanPage(values, then, foreign)

    def _reached(self, names: Sequence[bytes]) -> set[bytes]:
        """Names of all parts of the values that these may be parts of, and that are there."""
        owners = list({name.rpartition(MARK)[0] for name in names if MARK in name})
        return {
            part
            for owner, head in zip(owners, heads(self.client, owners), strict=True)
            if isinstance(head, Head)
            for part in head.names(owner)
        }


class ValkeyBackend(RedisBackend):
    """The same for Valkey, which speaks the same protocol."""

    servers = ("valkey-server", "redis-server")


def _literally(name: bytes) -> bytes:
    """A pattern that matches just this."""
    return b"".join(b"\\" + bytes([c]) if c in b"*?[]^\\" else bytes([c]) for c in name)
