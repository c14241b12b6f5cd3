"""What the daemon does with requests of operators."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from typing import TYPE_CHECKING

from lmcache_core.spi import ConfigError, Key, Lease
from lmcache_core.storage.results import Reason
from lmcache_core.wire import records, replies
from lmcache_core.wire.codec import Reply, to_runs
from lmcache_server import spaces, tiers
from lmcache_server.session import Session
from lmcache_server.slices import MANY, Joined, counted, keys_in_slices, others
from lmcache_server.verbs import Answer, Verb

if TYPE_CHECKING:
    from lmcache_server.connection import Connection
    from lmcache_server.daemon import Daemon

MOST_JOBS = 64
"""Prefetches of one client under way at once; one more ends as full."""


def describe(daemon: Daemon, link: Connection, session: Session, ask: records.Describe) -> Answer:
    return replies.Document(ask.id, daemon.describe())


def stats(daemon: Daemon, link: Connection, session: Session, ask: records.Stats) -> Answer:
    daemon.manager.measure()
    spaces.gauges(daemon)
    return replies.Metered(
        ask.id,
        [
            records_sample(sample.name, sample.labels, sample.value, sample.buckets)
            for sample in daemon.manager.metrics.snapshot()
        ],
    )


def records_sample(
    name: str, labels: tuple[tuple[str, str], ...], value: float, buckets: tuple[int, ...]
) -> replies.Sample:
    return replies.Sample(name, list(labels), float(value), list(buckets))


def list_(daemon: Daemon, link: Connection, session: Session, ask: records.List) -> Answer:
    async def work() -> Reply:
        listing = await daemon.manager.list(
            ask.tier or daemon.manager.context.tier,
            space=ask.space or None,
            after=ask.after,
            limit=min(ask.limit, records.MOST_LISTED),
        )
        keys = [key for key, _ in listing.values]
        here = ask.tier in ("", daemon.manager.context.tier) and len(daemon.pins) > 0
        pinned = [at for at, key in enumerate(keys) if here and key in daemon.pins]
        lengths = [n for _, n in listing.values]
        return replies.Values(ask.id, [key.text for key in keys], lengths, listing.after, pinned)

    return work()


def follow(daemon: Daemon, link: Connection, session: Session, ask: records.Follow) -> Answer:
    feed, manager = daemon.feed, daemon.manager
    tiers = [manager.context.tier, *(t.name for t in manager.tiers if t.holdings is not None)]
    start = feed.next if ask.since is None else ask.since
    found = feed.since(start, ask.limit)
    if found is None:
        return replies.Changed(ask.id, feed.next, True, tiers, [])
    parts = groupby(found, key=lambda each: (each.tier, each.there, each.key is None))
    changes = [
        replies.Change(tier, there, to_runs([each.key for each in part if each.key is not None]))
        for (tier, there, _), part in parts
    ]
    return replies.Changed(ask.id, start + len(found), False, tiers, changes)


def clear(daemon: Daemon, link: Connection, session: Session, ask: records.Clear) -> Answer:
    def wanted(key: Key) -> bool:
        return not ask.space or key.space == ask.space

    async def work() -> Reply:
        deadline = daemon.now() + ask.seconds
        if ask.tag:
            count = await daemon.manager.invalidate(ask.tag, deadline=deadline)
        else:
            count = await daemon.manager.clear(wanted, tier=ask.tier or None, deadline=deadline)
        return replies.Count(ask.id, count)

    return work()


def flush(daemon: Daemon, link: Connection, session: Session, ask: records.Flush) -> Answer:
    async def work() -> Reply:
        left = await daemon.manager.flush(deadline=daemon.now() + ask.seconds)
        return replies.Count(ask.id, left.values, left.nbytes)

    return work()


def freeze(daemon: Daemon, link: Connection, session: Session, ask: records.Freeze) -> Answer:
    if ask.on:
        daemon.manager.freeze()
    else:
        daemon.manager.unfreeze()
    return replies.Done(ask.id)


def quota(daemon: Daemon, link: Connection, session: Session, ask: records.Quota) -> Answer:
    daemon.set_quota(ask.tenant, ask.nbytes)
    return replies.Done(ask.id)


def tier(daemon: Daemon, link: Connection, session: Session, ask: records.Tier) -> Answer:
    async def work() -> Reply:
        if ask.action == "limit":
            await daemon.manager.set_limit(ask.name, ask.nbytes)
        elif ask.action == "remove":
            await tiers.remove(daemon, ask.name, daemon.now() + ask.seconds)
        elif ask.action == "restore":
            await tiers.restore(daemon, ask.name)
        else:
            raise ConfigError(f"a tier cannot {ask.action!r}; it can: limit, remove, restore")
        return replies.Done(ask.id)

    return work()


def move(daemon: Daemon, link: Connection, session: Session, ask: records.Move) -> Answer:
    counted(ask.keys)
    deadline = daemon.now() + ask.seconds

    async def work() -> Reply:
        verb, count = daemon.manager.move if ask.forget else daemon.manager.copy, 0
        for keys in keys_in_slices(ask.keys, MANY):
            count += len(await verb(keys, ask.source, ask.target, deadline=deadline))
            await others(link)
        return replies.Count(ask.id, count)

    return work()


def prefetch(daemon: Daemon, link: Connection, session: Session, ask: records.Prefetch) -> Answer:
    counted(ask.keys)
    manager, deadline, job = daemon.manager, daemon.now() + ask.seconds, daemon.sessions.number()

    async def bring(held: list[Sequence[Lease | None]]) -> Reason:
        room = int(manager.pool.capacity * manager.config.manager.prefetch)
        for keys in keys_in_slices(ask.keys, MANY):
            absent = [nbytes is None for nbytes in manager.lookup_resident(keys)]
            loaded = await manager.prefetch(keys, session, deadline=deadline, tokens=ask.tokens)
            held.append(loaded.leases)
            if loaded.reason is not Reason.COMPLETE:
                return loaded.reason
            pairs = zip(loaded.leases, absent, strict=True)
            room -= sum(lease.extent.nbytes for lease, new in pairs if new)
            # What is leased for us is on its way no more, but it takes the same memory.
            if room < 0:
                return Reason.FULL
            await asyncio.sleep(0)
            if link.closed:
                return Reason.CLOSED
        return Reason.COMPLETE

    async def work() -> None:
        held: list[Sequence[Lease | None]] = []
        reason = Reason.FULL
        session.jobs += 1
        try:
            if session.jobs <= MOST_JOBS:
                reason = await bring(held)
        finally:
            session.jobs -= 1
            count = sum(map(len, held))
            Joined(held).end(manager.release)
        link.reply(replies.Ready(job, count, reason.value))

    daemon.work(work())
    return replies.Count(ask.id, job)


def pin(daemon: Daemon, link: Connection, session: Session, ask: records.Pin) -> Answer:
    counted(ask.keys)
    deadline, pins = daemon.now() + ask.seconds, daemon.pins

    async def work() -> Reply:
        count, every = 0, pins.keys() if not (ask.keys or ask.lasts) else []
        slices = (every[at : at + MANY] for at in range(0, len(every), MANY))
        try:
            await pins.tidy()
            for keys in chain(keys_in_slices(ask.keys, MANY), slices):
                if ask.lasts:
                    count += (await pins.pin(keys, ask.lasts, deadline=deadline))[0]
                else:
                    count += pins.unpin(keys)
                await others(link)
        finally:
            daemon.work(pins.watch())
        return replies.Count(ask.id, count, pins.nbytes)

    return work()


def reload(daemon: Daemon, link: Connection, session: Session, ask: records.Reload) -> Answer:
    async def work() -> Reply:
        await daemon.take_over()
        return replies.Done(ask.id)

    return work()


def log_level(daemon: Daemon, link: Connection, session: Session, ask: records.LogLevel) -> Answer:
    level = ask.level.upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"no log level {ask.level!r}; there are debug, info, warning, error")
    logging.getLogger("lmcache").setLevel(level)
    return replies.Done(ask.id)


ADMIN_VERBS: Mapping[type[records.Record], Verb] = {
    records.Describe: describe,
    records.Stats: stats,
    records.List: list_,
    records.Follow: follow,
    records.Clear: clear,
    records.Flush: flush,
    records.Freeze: freeze,
    records.Quota: quota,
    records.Tier: tier,
    records.Move: move,
    records.Prefetch: prefetch,
    records.Pin: pin,
    records.Reload: reload,
    records.LogLevel: log_level,
}
