"""The thread that moves, and who waits for it."""

import asyncio
import threading
import time

from lmcache_backend_nixl.driver import Call, Driver, News, Together

from lmcache_core.spi import Unavailable
from lmcache_core.threads import DaemonExecutor


def driver(news):
    executor = DaemonExecutor("mover", 4)
    return Driver(executor, lambda: False, time.sleep, news.tell)


def test_who_waits_is_woken_when_an_operation_ends_and_misses_none(drive):
    async def main():
        news = News()
        mover = driver(news)

        def operation(number):
            yield Call(lambda: None)
            return number

        loop = asyncio.get_running_loop()
        began = loop.time()
        for number in range(100):
            task = mover.start(operation(number), str)
            while task.result is None:
                await news.wait(30.0)
            assert task.result == number
        assert loop.time() - began < 30.0, "an end was missed, and found by the clock"

    drive(main())


def test_nothing_further_begins_of_what_nobody_wants(drive):
    async def main():
        news = News()
        mover = driver(news)
        go, said = threading.Event(), []

        def part(name):
            try:
                yield Call(go.wait, 10.0)
                said.append(f"{name} has waited")
                yield Call(said.append, f"{name} goes on")
            finally:
                yield Call(said.append, f"{name} tidies up")

        def whole():
            together = Together(mover, [part("one"), part("two")], str)
            return (yield together)

        task = mover.start(whole(), str)
        await asyncio.sleep(0.02)
        task.aborted = True
        await asyncio.sleep(0.02)
        assert task.result is None, "parts that run are waited for"
        go.set()
        while task.result is None:
            await news.wait(5.0)
        assert sorted(said) == sorted(
            f"{name} {what}" for name in ("one", "two") for what in ("has waited", "tidies up")
        )
        assert task.result == [str(Unavailable("given up"))] * 2

    drive(main())
