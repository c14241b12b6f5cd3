"""The tier: keys to object names, batches to requests, answers to results."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from http import HTTPStatus
from typing import ClassVar

from lmcache_backend_s3 import opening
from lmcache_backend_s3.bucket import FORBIDDEN, TOO_LONG, Bucket, Refused
from lmcache_backend_s3.capacity import Capacity, Room
from lmcache_backend_s3.config import ObjectConfig
from lmcache_backend_s3.parts import Piece, Upload, cut, joined
from lmcache_backend_s3.transport import Call, Transport
from lmcache_core.spi import (
    MISSED,
    PRESENT,
    STORED,
    BackendError,
    BlockingBackend,
    Capabilities,
    Closed,
    Context,
    Durability,
    Found,
    Key,
    Load,
    LoadDone,
    Loaded,
    ScanPage,
    Store,
    Stored,
    StoreDone,
    Usage,
    section,
)

VALUE_MOST = 5 << 30
"""Longest object that one request can write."""
TOO_LARGE = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
DROP_S = 1.0
SHARD = 3
"""Hexadecimal digits in front of a name."""


class ObjectBackend(BlockingBackend):
    """Values as objects, named by the key alone. Only the server says what is there.

    A call that nobody waits for any more, by its deadline or by cancellation, has its own connections cut;
    other calls go on.
    """

    config_type: ClassVar[type] = ObjectConfig
    in_parts: ClassVar[bool] = True
    """Whether long values can be written in parts."""
    config: ObjectConfig

    def __init__(self, config: ObjectConfig, context: Context, /) -> None:
        super().__init__(config, context)
        self._transport: Transport | None = None
        self._opened: Bucket | None = None
        self._abilities = opening.Abilities(only_new=False)
        self._capacity: Capacity | None = None
        self._room = Room(context.clock.now)
        self._counting = Call()
        self._current: ContextVar[Call] = ContextVar("call")
        self._calls: set[Call] = set()
        self.capabilities = Capabilities(
            ranges=True,
            scan=True,
            usage=True,
            shared=True,
            persistent=True,
            hints=True,
            durability=Durability.POWER,
            max_value=VALUE_MOST,
            iov_max=1024,
            quiescence_s=config.timeout + config.connect_timeout,
        )

    @abstractmethod
    def make_bucket(self) -> tuple[Transport, Bucket]:
        """Find credentials and prepare the connection.

        Raises:
            ConfigError: they cannot be.
        """

    @property
    def bucket(self) -> Bucket:
        if self._opened is None:
            raise Closed(f"{type(self).__name__} is not open")
        return self._opened

    # -- life ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        with self._calling(None) as call:
            await self.call("open", self._open, call)

    def _open(self, call: Call) -> None:
        self.close_blocking()  # of an attempt that failed
        self._transport, bucket = self.make_bucket()
        self._abilities = opening.probe(bucket, self.config, self.context, call)
        self._opened = bucket
        if self.config.max_capacity is not None:
            self._counting = counting = Call()
            self._capacity = Capacity(
                self.config.max_capacity, lambda: self._count(counting)[0], self.context
            )
            self._capacity.take(0)

    def close_blocking(self) -> None:
        self._counting.cut("closed")
        if self._transport is not None:
            self._transport.close()

    def interrupt_blocking(self) -> None:
        # Runs in the context of whoever was cancelled; outside of any call it is the end of the backend.
        call = self._current.get(None)
        for each in [call] if call is not None else list(self._calls):
            each.cut("cancelled")

    @contextmanager
    def _calling(self, deadline: float | None) -> Iterator[Call]:
        """What is asked inside belongs together, and is cut at the deadline."""
        call = Call()
        token, timer = self._current.set(call), None
        self._calls.add(call)
        if deadline is not None:
            left = max(0.0, deadline - self.context.clock.now())
            timer = asyncio.get_running_loop().call_later(
                left, call.cut, "no answer before the deadline"
            )
        try:
            yield call
        finally:
            if timer is not None:
                timer.cancel()
            self._calls.discard(call)
            self._current.reset(token)

    # -- verbs -----------------------------------------------------------------------------------------

    async def lookup(
        self, keys: Sequence[Key], /, *, deadline: float | None = None
    ) -> Sequence[Found | None]:
        self.check_open("lookup", keys)
        if not keys:
            return []
        with self._calling(deadline) as call:
            asked = (self.call("lookup", self.lookup_blocking, [key], call) for key in keys)
            results = await asyncio.gather(*asked, return_exceptions=True)
        failures = [one for one in results if isinstance(one, BaseException)]
        if len(failures) == len(keys):
            raise failures[0]
        if failures:
            self.context.log.debug("part of a lookup is treated as misses: %s", failures[0])
        return [None if isinstance(one, BaseException) else one[0] for one in results]

    async def load(
        self, batch: Sequence[Load], /, *, done: LoadDone = None, deadline: float | None = None
    ) -> Sequence[Loaded]:
        self.check_open("load", batch)
        size = self.config.part_size
        most = self.config.threads // max(1, len(batch))
        with self._calling(deadline) as call:
            groups = [cut(load, call, size, most) for load in batch]
            owners = [at for at, group in enumerate(groups) for _ in group]
            ended: list[list[Loaded]] = [[] for _ in batch]

            def piece_done(at: int, result: Loaded) -> None:
                mine = ended[owners[at]]
                mine.append(result)
                if done is not None and len(mine) == len(groups[owners[at]]):
                    done(owners[at], joined(mine))

            await super().load([piece for group in groups for piece in group], done=piece_done)
        return [joined(results) for results in ended]

    async def store(
        self, batch: Sequence[Store], /, *, done: StoreDone = None, deadline: float | None = None
    ) -> Sequence[Stored]:
        self.check_open("store", batch)
        long = self.config.multipart_above if self.in_parts else VALUE_MOST
        results: list[Stored | None] = [None] * len(batch)

        def ended(at: int, result: Stored) -> None:
            results[at] = result
            if done is not None:
                done(at, result)

        async def in_parts(at: int, call: Call) -> None:
            ended(at, self.screen_store(batch[at]) or await self._store_parts(batch[at], call))

        with self._calling(deadline) as call:
            short = [at for at, store in enumerate(batch) if store.nbytes <= long]
            uploads = [
                Upload(s.key, s.parts, s.ttl, call=call) for s in (batch[at] for at in short)
            ]
            work = [in_parts(at, call) for at, store in enumerate(batch) if store.nbytes > long]
            if uploads:
                work.append(self._store_short(uploads, lambda i, r: ended(short[i], r)))
            # Ends when all have ended, cancelled or not (law B5).
            for error in await asyncio.gather(*work, return_exceptions=True):
                if error is not None:
                    raise error
        return [result for result in results if result is not None]

    async def delete(self, keys: Sequence[Key], /) -> int:
        self.check_open("delete", keys)
        with self._calling(None) as call:
            gone = (
                self.call("delete", self.delete_blocking, [k], call) for k in dict.fromkeys(keys)
            )
            results = await asyncio.gather(*gone, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return sum(result for result in results if isinstance(result, int))

    async def scan(self, after: str | None = None, /, *, limit: int = 1000) -> ScanPage:
        with self._calling(None) as call:
            entries, more = await self.call(
                "scan", self.bucket.list, self.config.prefix, after, limit, call
            )
        values, foreign = [], []
        for entry in entries:
            key = self.key(entry.name)
            if key is None:
                foreign.append(entry.name)
            else:
                values.append((key, Found(entry.nbytes, etag=entry.etag, promise=False)))
        return ScanPage(values, more, foreign)

    async def usage(self) -> Usage:
        """Count by listing; slow where there is much."""
        with self._calling(None) as call:
            nbytes, values = await self.call("usage", self._count, call)
        return Usage(nbytes, values, self.config.max_capacity)

    # -- names -----------------------------------------------------------------------------------------

    def name(self, key: Key, /) -> str:
        """Name of an object; it begins with digits of the digest, so that a store can spread the load."""
        return f"{self.config.prefix}{key.digest.hex()[:SHARD]}/{key.text}"

    def key(self, name: str, /) -> Key | None:
        """Inverse of ``name``; None for what it never gives."""
        try:
            key = Key.parse(name.rpartition("/")[2])
        except ValueError:
            return None
        return key if self.name(key) == name else None

    # -- on threads ------------------------------------------------------------------------------------

    def lookup_blocking(
        self, keys: Sequence[Key], call: Call | None = None, /
    ) -> Sequence[Found | None]:
        return [self.bucket.head(self.name(key), call or Call()) for key in keys]

    def delete_blocking(self, keys: Sequence[Key], call: Call | None = None, /) -> int:
        return sum(self.bucket.delete(self.name(key), call or Call()) for key in keys)

    def load_blocking(self, load: Load, /) -> Loaded:
        assert isinstance(load, Piece), "load() makes pieces of what it is given"
        name = self.name(load.key)
        try:
            got = self.bucket.get(
                name, load.call, load.views, offset=load.offset, length=load.length
            )
        except BackendError as error:
            return Loaded.failed(error.with_traceback(None))  # its frames hold the caller's views
        return MISSED if got is None else Loaded.filled(got)

    def store_blocking(self, store: Store, /) -> Stored:
        assert isinstance(store, Upload), "store() makes uploads of what it is given"
        name, only_new = self.name(store.key), self._abilities.only_new
        if (declined := self._declined(store)) is not None:
            return declined
        kept = False
        try:
            if not only_new and self.bucket.head(name, store.call) is not None:
                return PRESENT
            kept = self.bucket.put(name, store.parts, store.call, only_new=only_new)
        except BackendError as error:
            return self._not_stored(error)
        finally:
            self._charged(store, kept)
        return STORED if kept else PRESENT

    async def _store_short(self, uploads: Sequence[Upload], done: StoreDone, /) -> None:
        await super().store(uploads, done=done)

    async def _store_parts(self, store: Store, call: Call, /) -> Stored:
        """Write a long value in parts; nobody sees it before all are there."""
        if (declined := self._declined(store)) is not None:
            return declined
        bucket, name, size = self.bucket, self.name(store.key), self.config.part_size
        only_new, upload, kept = self._abilities.only_new, "", False
        try:
            # Looked for first in any case: parts are sent in full before the server compares names.
            if await self.call("store", bucket.head, name, call) is not None:
                return PRESENT
            upload = await self.call("store", bucket.begin_parts, name, call)
            puts = (
                self.call(
                    "store",
                    bucket.put_part,
                    name,
                    upload,
                    number,
                    section(store.parts, at, size),
                    call,
                )
                for number, at in enumerate(range(0, store.nbytes, size), 1)
            )
            etags = []
            for etag in await asyncio.gather(*puts, return_exceptions=True):
                if isinstance(etag, BaseException):
                    raise etag
                etags.append(etag)
            joining = partial(bucket.join_parts, only_new=only_new)
            kept = await self.call("store", joining, name, upload, etags, call)
        except BackendError as error:
            return self._not_stored(error)
        finally:
            self._charged(store, kept)
            if not kept:
                await self._drop_parts(name, upload)
        return STORED if kept else PRESENT

    async def _drop_parts(self, name: str, upload: str) -> None:
        """Parts that nobody will join are paid for; what is left nevertheless is for a lifecycle rule."""
        if upload:
            with self._calling(self.context.clock.now() + DROP_S) as call, suppress(BackendError):
                await self.call("store", self.bucket.drop_parts, name, upload, call)

    def _declined(self, store: Store) -> Stored | None:
        """Charge a value, or say why it is not taken."""
        if self._abilities.read_only:
            return Stored.refused(f"read-only: {self._abilities.read_only}")
        if why := self._room.refusal():
            return Stored.refused(why)
        if self._capacity is not None and (why := self._capacity.take(store.nbytes)):
            return Stored.refused(why)
        return None

    def _charged(self, store: Store, kept: bool) -> None:
        if kept:
            self._room.kept()
        elif self._capacity is not None:
            self._capacity.give(store.nbytes)

    def _not_stored(self, error: BackendError, /) -> Stored:
        """The result of a store that the server declined, or did not answer."""
        if isinstance(error, Refused):
            if why := self._room.declined(error):
                return Stored.refused(why)
            if error.code in FORBIDDEN | TOO_LONG or error.status == TOO_LARGE:
                return Stored.refused(str(error))
        return Stored.failed(error.with_traceback(None))

    def _count(self, call: Call) -> tuple[int, int]:
        """Bytes under the prefix, and how many of its objects are values."""
        nbytes = values = 0
        after: str | None = None
        while True:
            entries, after = self.bucket.list(
                self.config.prefix, after, self.bucket.most_keys, call
            )
            nbytes += sum(entry.nbytes for entry in entries)
            values += sum(self.key(entry.name) is not None for entry in entries)
            if after is None:
                return nbytes, values
