"""The tier: keys to names, values to parts on rails, parts to results."""

from __future__ import annotations

import asyncio
import atexit
import select
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

from lmcache_backend_nixl.agent import bindings, plugin_problem
from lmcache_backend_nixl.config import FILES, OBJECTS, PLUGINS, NixlConfig
from lmcache_backend_nixl.driver import Call, Driver, News, Operation, Task, Together
from lmcache_backend_nixl.files import PAGE, FileRail
from lmcache_backend_nixl.rail import Rail, wanted
from lmcache_core.spi import (
    MISSED,
    PRESENT,
    BackendError,
    Capabilities,
    ConfigError,
    Context,
    Durability,
    Found,
    Key,
    Load,
    Loaded,
    LoadStatus,
    MemoryKind,
    PolledBackend,
    Region,
    ScanPage,
    Store,
    Stored,
    Unavailable,
    Usage,
    section,
)

R = TypeVar("R")
ENTRY_NBYTES = 512
"""What a folder entry takes, with the slack of half-full folder blocks."""
QUIET_S = {"OBJ": 30.0, "AZURE_BLOB": 90.0, "DOCA_MEMOS": 90.0}
"""How long a plugin tries by itself; it cannot be stopped meanwhile. Of ``OBJ`` measured (two tries), of others a guess."""


class NixlBackend(PolledBackend):
    """Values through NIXL plugins. One thread moves everything; the event loop only looks at what has ended.

    A short value is one part on the rail that its digest chooses. A value of two stripes or more has a part on every
    rail, named ``NAME.I-K``; part 0 is written last and deleted first. A transfer is never given up while NIXL may
    still touch the memory.
    """

    config_type: ClassVar[type] = NixlConfig
    poll_s = poll_max_s = 0.05  # the mover tells; more looks would cost its thread time
    config: NixlConfig

    def __init__(self, config: NixlConfig, context: Context, /) -> None:
        super().__init__(config, context)
        self._rails = [self._rail(rail) for rail in config.all]
        self._news = News()
        self._driver = Driver(context.executor, self._flush, self._wait, self._news.tell)
        kinds = {rail.backend for rail in config.all}
        local = kinds <= set(FILES) and not config.shared
        # Finding a target, connecting, and being let in take a timeout each.
        patience = (3 if any(rail.named for rail in config.all) else 2) * config.timeout + 1
        limits = [rail.most for rail in self._rails if rail.most is not None]
        self.capabilities = Capabilities(
            ranges=True,
            scan=all(rail.listing for rail in self._rails),
            usage=all(rail.listing for rail in self._rails),
            register=any(rail.register for rail in self._rails),
            shared=not local,
            hints=not local,
            persistent=True,
            durability=Durability.POWER
            if config.sync and kinds <= set(FILES)
            else Durability.PROCESS,
            max_value=min(limits, default=None),
            alignment=PAGE if config.direct and kinds & set(FILES) else 1,
            iov_max=64,
            quiescence_s=max(QUIET_S.get(kind, patience) for kind in kinds),
        )

    def _rail(self, rail: Any) -> Rail:
        if rail.backend in FILES:
            return FileRail(rail, self.config, self.context)
        if rail.backend in OBJECTS:
            from lmcache_backend_nixl.objects import ObjectRail

            return ObjectRail(rail, self.config, self.context)
        from lmcache_backend_nixl.peers import PeerRail

        return PeerRail(rail, self.config, self.context)

    @classmethod
    def unavailable(cls) -> str | None:
        try:
            bindings()
        except ConfigError as error:
            return str(error)
        return None

    @classmethod
    def remark(cls) -> str:
        """Which of NIXL's plugins load here, and what the others lack; one line."""
        problems = {plugin: plugin_problem(plugin) for plugin in PLUGINS}
        loads = [plugin for plugin, problem in problems.items() if problem is None]
        lacks = [f"{plugin}: {problem}" for plugin, problem in problems.items() if problem]
        return "; ".join([f"loads {', '.join(loads) or 'no plugin'}", *lacks])

    @classmethod
    def testing_config(cls) -> NixlConfig:
        """A folder of its own, removed when the process ends."""
        path = tempfile.mkdtemp(prefix="lmcache-nixl-")
        atexit.register(shutil.rmtree, path, ignore_errors=True)
        return NixlConfig(path=path)

    # -- life ----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        await self._call("open", self._open)

    def _open(self) -> None:
        for rail in self._rails:
            rail.open()

    async def close_transport(self) -> None:
        await self._threaded("close", self._close)

    def _close(self) -> None:
        for rail in self._rails:
            rail.close()

    async def _threaded(self, verb: str, function: Callable[..., R], *arguments: Any) -> R:
        """Run what blocks on a thread; ends when it has ended, cancelled or not."""
        try:
            future = self.context.executor.submit(function, *arguments)
        except RuntimeError as error:
            raise Unavailable(f"no thread: {error}", operation=verb) from error
        waiting, cancelled = asyncio.wrap_future(future), False
        while not waiting.done():
            try:
                await asyncio.wait([waiting])
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            waiting.exception()
            raise asyncio.CancelledError
        try:
            return waiting.result()
        except OSError as error:
            if isinstance(error, BackendError):
                raise
            raise Unavailable(f"{verb} failed: {error}", operation=verb) from error

    async def _call(self, verb: str, function: Callable[..., R], *arguments: Any) -> R:
        self.check_open(verb)
        self._active += 1
        self._idle.clear()
        try:
            return await self._threaded(verb, function, *arguments)
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def register(self, region: Region, /) -> bool:
        if not self.capabilities.register:
            return await super().register(region)
        if region.kind is not MemoryKind.HOST:
            return False
        return any(await self._call("register", lambda: [r.add(region) for r in self._rails]))

    async def unregister(self, region: Region, /) -> None:
        if not self.capabilities.register:
            return await super().unregister(region)
        await self._call("unregister", self._unregister, region)
        return None

    def _unregister(self, region: Region) -> None:
        for rail in self._rails:
            rail.remove(region)

    # -- names and parts -----------------------------------------------------------------------------------

    def _order(self, key: Key) -> list[Rail]:
        """Rails, the one that has the value or its part 0 first."""
        start = int.from_bytes(key.digest[:4], "little") % len(self._rails)
        return [*self._rails[start:], *self._rails[:start]]

    def _shares(self, nbytes: int) -> list[int]:
        """Lengths of the parts of a value, whole pages but the last; one part when it is short."""
        count = len(self._rails)
        if count == 1 or nbytes < 2 * self.config.stripe:
            return [nbytes]
        each = -(-nbytes // count // PAGE) * PAGE
        return [max(0, min(each, nbytes - at)) for at in range(0, each * count, each)]

    def _names(self, key: Key) -> list[str]:
        """Of the parts of a long value, by rail."""
        count = len(self._rails)
        return [f"{key.text}.{number}-{count}" for number in range(count)]

    def _lengths(self, keys: Sequence[Key]) -> list[int | None]:
        """Of whole values: a part that is missing or has another length than it should makes a value absent."""
        short: dict[Key, int | None] = {}
        long: dict[Key, list[int | None]] = {key: [None] * len(self._rails) for key in keys}
        for rail in self._rails:
            asked: list[tuple[Key, int, str]] = []
            for key in long:
                number = self._order(key).index(rail)
                if number == 0:
                    asked.append((key, -1, key.text))
                if len(self._rails) > 1:
                    asked.append((key, number, self._names(key)[number]))
            if asked:
                found = rail.lengths([name for _, _, name in asked])
                for (key, number, _), nbytes in zip(asked, found, strict=True):
                    if number < 0:
                        short[key] = nbytes
                    else:
                        long[key][number] = nbytes
        return [short[key] if short[key] is not None else self._sum(long[key]) for key in keys]

    def _sum(self, parts: Sequence[int | None]) -> int | None:
        nbytes = sum(part or 0 for part in parts)
        return nbytes if len(parts) > 1 and list(parts) == self._shares(nbytes) else None

    # -- verbs ---------------------------------------------------------------------------------------------

    async def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None
    ) -> Sequence[Found | None]:
        self.check_open("lookup", keys)
        if not keys:
            return []
        promise = not self.capabilities.hints
        found = await self._call("lookup", self._lengths, keys)
        return [None if nbytes is None else Found(nbytes, promise=promise) for nbytes in found]

    async def delete(self, keys: Sequence[Key], /) -> int:
        self.check_open("delete", keys)
        return await self._call("delete", self._delete, list(dict.fromkeys(keys))) if keys else 0

    def _delete(self, keys: Sequence[Key]) -> int:
        there: set[Key] = set()
        for number in range(len(self._rails)):  # part 0 of every value first
            for rail in self._rails:
                mine = [key for key in keys if self._order(key)[number] is rail]
                names = [(key, self._names(key)[number]) for key in mine if len(self._rails) > 1]
                names += [(key, key.text) for key in mine if number == 0]
                gone = rail.delete([name for _, name in names]) if names else []
                there |= {
                    key for (key, _), was in zip(names, gone, strict=True) if was and not number
                }
        return len(there)

    def footprint(self, nbytes: int, /) -> int:
        return sum(-(-part // PAGE) * PAGE + ENTRY_NBYTES for part in self._shares(nbytes))

    async def scan(self, after: str | None = None, /, *, limit: int = 1000) -> ScanPage:
        if not self.capabilities.scan:
            raise self._unsupported("scan")
        return await self._call("scan", self._scan, after, limit)

    def _scan(self, after: str | None, limit: int) -> ScanPage:
        start, _, last = (after or "0/").partition("/")
        values: list[tuple[Key, Found]] = []
        foreign: list[str] = []
        for number, rail in enumerate(self._rails):
            assert isinstance(rail, FileRail)
            if number < int(start):
                continue
            for place, nbytes, _ in rail.names(last if number == int(start) else ""):
                name, _, part = place[3:].partition(".")
                key = None
                with suppress(ValueError):
                    key = Key.parse(name)
                home = key is not None and self._order(key)[0] is rail and place[:2] == name[-2:]
                if key is not None and home and not part:
                    values.append((key, Found(nbytes)))
                elif key is not None and part == f"0-{len(self._rails)}" and home:
                    if (total := self._lengths([key])[0]) is not None:
                        values.append((key, Found(total)))
                elif key is None or not part.endswith(f"-{len(self._rails)}"):
                    foreign.append(f"{rail.path}/{place}")
                if len(values) + len(foreign) >= limit:
                    return ScanPage(values, f"{number}/{place}", foreign)
        return ScanPage(values, None, foreign)

    async def usage(self) -> Usage:
        if not self.capabilities.usage:
            raise self._unsupported("usage")
        return await self._call("usage", self._usage)

    def _usage(self) -> Usage:
        nbytes = values = 0
        for rail in self._rails:
            assert isinstance(rail, FileRail)
            for place, _, allocated in rail.names(""):
                nbytes += allocated + ENTRY_NBYTES
                part = place[3:].partition(".")[2]
                values += not part or part.startswith("0-")
        return Usage(nbytes, values)

    # -- transfers -----------------------------------------------------------------------------------------

    def post_load(self, load: Load, /) -> Task:
        return self._driver.start(self._load(load), Loaded.failed)

    def post_store(self, store: Store, /) -> Task:
        return self._driver.start(self._store(store), Stored.failed)

    def check_load(self, handle: Task, /) -> Loaded | None:
        result: Loaded | None = handle.result
        return result

    def check_store(self, handle: Task, /) -> Stored | None:
        result: Stored | None = handle.result
        return result

    def abort(self, handle: Task, /) -> None:
        handle.aborted = True
        for rail in self._rails:
            rail.hurry()

    async def pause(self, seconds: float, /) -> None:
        await self._news.wait(seconds)

    def _wait(self, seconds: float) -> None:
        sockets = [each for rail in self._rails if (each := rail.socket) is not None]
        if sockets and seconds:
            with suppress(OSError, ValueError):  # closed meanwhile, or a descriptor above 1023
                select.select(sockets, [], [], seconds)
                return
        time.sleep(seconds)

    def _flush(self) -> bool:
        return sum(rail.flush() for rail in self._rails) > 0  # all of them

    def _load(self, load: Load) -> Operation:
        order = self._order(load.key)
        loaded = yield from order[0].load(load.key.text, load)
        if loaded.status is not LoadStatus.MISSED or len(order) == 1:
            return loaded
        nbytes = (yield Call(self._lengths, [load.key]))[0]
        if nbytes is None:
            return MISSED
        length, at, views = wanted(load, nbytes), 0, load.into
        parts = []
        for rail, name, share in zip(
            order, self._names(load.key), self._shares(nbytes), strict=True
        ):
            first, end = max(at, load.offset), min(at + share, load.offset + length)
            if first < end:
                into = section(views, first - load.offset, end - first)
                part = Load(load.key, into, first - at, end - first)
                parts.append(rail.load(name, part))
            at += share
        for result in (yield Together(self._driver, parts, Loaded.failed)):
            if result.status is not LoadStatus.FILLED:
                return result
        return Loaded.filled(length)

    def _store(self, store: Store) -> Operation:
        order, shares = self._order(store.key), self._shares(store.nbytes)
        if len(order) > 1 and (yield Call(self._lengths, [store.key]))[0] is not None:
            return PRESENT
        if len(shares) == 1:
            return (yield from order[0].store(store.key.text, store.parts, first=True, others=None))
        at, operations = shares[0], []
        names = self._names(store.key)
        for rail, name, share in zip(order[1:], names[1:], shares[1:], strict=True):
            views = section(store.parts, at, share)
            operations.append(rail.store(name, views, first=False, others=None))
            at += share
        others = Together(self._driver, operations, Stored.failed)
        views = section(store.parts, 0, shares[0])
        try:
            return (yield from order[0].store(names[0], views, first=True, others=others))
        finally:
            yield others  # they borrow memory, too
