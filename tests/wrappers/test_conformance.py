"""Every wrapper around a backend is a backend: the whole kit passes."""

from __future__ import annotations

from dataclasses import replace
from unittest import SkipTest

from lmcache_core import frame
from lmcache_core.memory.backend import MemoryBackend, MemoryConfig
from lmcache_core.observers import Metrics
from lmcache_core.spi import (
    BufferTooSmall,
    ByteSize,
    Interior,
    KVSpec,
    Load,
    Loaded,
    LoadStatus,
    SegmentSpec,
    Wrapper,
)
from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import simulated_context
from lmcache_core.wrappers import (
    Breaker,
    BreakerOptions,
    Chain,
    Chaos,
    ChaosOptions,
    Check,
    CheckOptions,
    Encoded,
    Ladder,
    LadderOptions,
    Limit,
    LimitOptions,
    Measured,
    Retry,
    RetryOptions,
)
from tests.wrappers.serdes import Squeeze


class Wrapped(BackendTests):
    """The kit on a wrapper around ``MemoryBackend``."""

    simulated = True

    def wrap(self, context, inner):
        raise NotImplementedError

    def make_backend(self):
        return self.make_small_backend(1 << 26)

    def make_small_backend(self, nbytes):
        context = simulated_context()
        self.store = MemoryBackend(MemoryConfig(ByteSize(nbytes)), context)
        return self.wrap(context, self.store)

    def peek(self, key):
        value = self.store._values.get(key)
        return value.content if value else None


class TestMeasured(Wrapped):
    def wrap(self, context, inner):
        return Measured(Metrics(), context, inner)


class TestLimit(Wrapped):
    def wrap(self, context, inner):
        options = LimitOptions(max_batch=2, max_value=1 << 22, concurrency=3)
        return Limit(options, context, inner)


class TestBreaker(Wrapped):
    def wrap(self, context, inner):
        return Breaker(BreakerOptions(), context, inner)


class TestRetry(Wrapped):
    def wrap(self, context, inner):
        return Retry(RetryOptions(), context, inner)


class TestChaosThatIsOff(Wrapped):
    def wrap(self, context, inner):
        return Chaos(ChaosOptions(), context, inner)


class TestChaosThatDelays(Wrapped):
    def wrap(self, context, inner):
        return Chaos(ChaosOptions(delay=0.5, delay_s=0.003), context, inner)


ROOM = frame.header_nbytes(1)


def spec(nbytes):
    return KVSpec("uint8", 1, 1, 0, 0, Interior.PAGE, (SegmentSpec(0, 0, 0, nbytes),))


class Framing(Wrapper):
    """Outermost: makes any value the payload of a frame, as an engine does, so that the kit fits."""

    async def lookup(self, keys, /, *, deadline=None):
        found = await self.inner.lookup(keys, deadline=deadline)
        if isinstance(self.inner, Encoded):
            lengths = await self.inner.frame_lengths(keys, deadline)
        else:
            lengths = [each and each.nbytes for each in found]
        pairs = zip(found, lengths, strict=True)
        return [each and replace(each, nbytes=(nbytes or ROOM) - ROOM) for each, nbytes in pairs]

    async def scan(self, after=None, /, *, limit=1000):
        page = await self.inner.scan(after, limit=limit)
        keys = [key for key, _ in page.values]
        return replace(page, values=list(zip(keys, await self.lookup(keys), strict=True)))

    async def usage(self):
        usage = await self.inner.usage()
        return replace(usage, nbytes=usage.nbytes - ROOM * usage.values)

    async def store(self, batch, /, *, done=None, deadline=None):
        items = []
        for item in batch:
            whole = memoryview(bytearray(bytes(ROOM) + b"".join(item.parts)))
            frame.seal_value(whole[:ROOM], whole[ROOM:], item.key, spec=spec(item.nbytes))
            items.append(replace(item, parts=(whole,)))
        return await self.inner.store(items, done=done, deadline=deadline)

    async def load(self, batch, /, *, done=None, deadline=None):
        results = {}
        rooms = []

        def finish(index, result):
            load, room = batch[index], rooms[index]
            if result.status is LoadStatus.FILLED:
                skip = 0 if part(load) else ROOM
                content = room[skip : result.nbytes]
                result = Loaded.filled(content.nbytes)
                if content.nbytes > load.room:
                    result = Loaded.failed(BufferTooSmall("short"))
                at = 0
                for view in load.into if result.error is None else ():
                    piece = content[at : at + view.nbytes]
                    view[: piece.nbytes] = piece
                    at += piece.nbytes
            results[index] = result
            if done is not None:
                done(index, result)

        def part(load):
            return load.offset > 0 or load.length is not None

        loads = []
        for load, found in zip(batch, await self.lookup([load.key for load in batch]), strict=True):
            rooms.append(
                memoryview(
                    bytearray(load.room if part(load) else ROOM + (found.nbytes if found else 0))
                )
            )
            offset = load.offset + ROOM if part(load) else 0
            loads.append(Load(load.key, (rooms[-1],), offset, load.length))
        await self.inner.load(loads, done=finish, deadline=deadline)
        return [results[index] for index in range(len(batch))]


class Framed(Wrapped):
    """Wrappers that know frames are given frames."""

    def make_small_backend(self, nbytes):
        backend = super().make_small_backend(nbytes)
        return Framing(None, backend.context, backend)

    def peek(self, key):
        whole = super().peek(key)
        return whole and whole[ROOM:]


class TestCheck(Framed):
    def wrap(self, context, inner):
        return Check(CheckOptions(), context, inner)


class TestEncoded(Framed):
    def peek(self, key):
        raise SkipTest("stored bytes are encoded")

    def wrap(self, context, inner):
        return Encoded(Chain(serdes=(Squeeze(), Squeeze())), context, inner)


class TestLadder(TestEncoded):
    def wrap(self, context, inner):
        levels = (Chain(serdes=()), Chain(serdes=(Squeeze(),)))
        return Ladder(LadderOptions(levels=levels), context, inner)
