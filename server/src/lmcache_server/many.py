"""The verbs on values where a request names many: the same answers, made in slices (``slices``)."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from lmcache_core.spi import ConfigError, Key, Lease, Refusal
from lmcache_core.storage.results import Loaded, Lookup, Reason
from lmcache_core.wire import records, replies
from lmcache_core.wire.codec import Reply
from lmcache_server import verbs
from lmcache_server.finding import find as find_few
from lmcache_server.finding import found, in_memory
from lmcache_server.session import Session
from lmcache_server.slices import MANY, MANY_WRITTEN, Joined, keys_in_slices, many, others
from lmcache_server.verbs import IDENTITY, Answer, Verb

if TYPE_CHECKING:
    from lmcache_server.connection import Connection
    from lmcache_server.daemon import Daemon


def find(daemon: Daemon, link: Connection, session: Session, ask: records.Find) -> Answer:
    if not many(ask.keys):
        return find_few(daemon, link, session, ask)
    manager, deadline = daemon.manager, daemon.now() + ask.seconds

    async def work() -> Reply:
        tiers: dict[str, int] = {}
        whole = replies.Found(ask.id, [], [], [], [])
        for keys in keys_in_slices(ask.keys, MANY):
            lookup = in_memory(manager, keys)
            if daemon.now() > deadline:
                lookup = Lookup((None,) * len(keys), (manager.context.tier,))
            elif lookup is None:
                lookup = await manager.lookup(keys, deadline=deadline, tokens=ask.tokens)
            part = found(0, lookup)
            known = [tiers.setdefault(name, len(tiers)) for name in part.tiers]
            whole.where += [known[at] if at >= 0 else -1 for at in part.where]
            whole.nbytes += part.nbytes
            whole.unanswered += [name for name in part.unanswered if name not in whole.unanswered]
            await others(link)
        whole.tiers = [*tiers]
        return whole

    return work()


def load(daemon: Daemon, link: Connection, session: Session, ask: records.Load) -> Answer:
    if not many(ask.keys) or daemon.crowded():
        return verbs.load(daemon, link, session, ask)
    manager, deadline = daemon.manager, daemon.now() + ask.seconds

    async def work() -> Reply | None:
        held: list[Sequence[Lease | None]] = []
        packed: list[tuple[bytes, bytes]] = []
        reason = Reason.COMPLETE
        try:
            used = []
            for keys in keys_in_slices(ask.keys, MANY):
                if held and daemon.now() > deadline:
                    reason = Reason.DEADLINE
                    break
                leases = manager.lease(keys, session, tokens=ask.tokens)
                loaded = Loaded(leases, reason)  # type: ignore[arg-type]  # when none of them is None
                if leases.left < len(keys):
                    loaded = await manager.complete(
                        keys, session, leases, deadline=deadline, tokens=ask.tokens,
                        tenant=ask.tenant,
                    )  # fmt: skip
                held += [loaded.leases] if loaded.leases else []
                packed.append(verbs.packed_leases(loaded.leases))
                used.append(keys[: len(loaded.leases)])
                await others(link)
                reason = loaded.reason
                if reason is not Reason.COMPLETE:
                    break
            for keys in used[-2::-1]:  # the root of a prefix is what was used last
                manager.pool.touch(keys)
                await others(link)
        except BaseException:
            Joined(held).end(manager.release)
            raise
        extents, identities = map(b"".join, zip(*packed, strict=True))
        whole = Joined(held) if held else ()
        return verbs.hand_over(daemon, link, session, ask, whole, extents, identities, reason.value)

    return work()  # type: ignore[return-value]


def reserve(daemon: Daemon, link: Connection, session: Session, ask: records.Reserve) -> Answer:
    if not many(ask.keys, MANY_WRITTEN):
        return verbs.reserve(daemon, link, session, ask)
    count = sum(len(run.digests) for run in ask.keys) // 32
    if len(ask.sizes) != 8 * count or len(ask.firsts) not in (0, 8 * count):
        raise ConfigError(f"not the sizes and positions of {count} values")
    sizes, pool = array("Q", ask.sizes), daemon.manager.pool
    if not link.local and sum(sizes) > records.MOST_VALUE:
        raise ConfigError(f"more than {records.MOST_VALUE} bytes in one request")

    async def work() -> Reply:
        await verbs.touched(daemon, link, sum(sizes))
        present: list[Sequence[Lease | None]] = []
        whole = replies.Reserved(ask.id, [], [], b"")
        extents: list[bytes] = []
        full = False
        try:
            for keys in keys_in_slices(ask.keys, MANY):  # no eviction of this very prefix
                present.append(pool.lease(keys, session, touch=False))
                await others(link)
            for keys in keys_in_slices(ask.keys, MANY_WRITTEN):
                at = len(whole.grants)
                if full:  # nothing later is granted
                    part = _full(daemon, keys)
                else:
                    wants = [*zip(keys, sizes[at:], strict=False)]
                    firsts = ask.firsts[8 * at : 8 * (at + len(keys))]
                    mine = msgspec.structs.replace(ask, firsts=firsts)
                    part = verbs.reserved(daemon, session, mine, wants)
                full = full or Refusal.FULL.value in part.refusals
                whole.grants += part.grants
                whole.refusals += part.refusals
                extents.append(part.extents)
                await others(link)
        except BaseException:
            daemon.sessions.abort(session, [grant for grant in whole.grants if grant])
            raise
        finally:
            Joined(present).end(daemon.manager.release)
        whole.extents = b"".join(extents)
        return whole

    return work()


def _full(daemon: Daemon, keys: Sequence[Key]) -> replies.Reserved:
    there = daemon.manager.lookup_resident(keys)
    answers = [Refusal.FULL if nbytes is None else Refusal.PRESENT for nbytes in there]
    return replies.Reserved(0, [0] * len(keys), [answer.value for answer in answers], b"")


def commit(daemon: Daemon, link: Connection, session: Session, ask: records.Commit) -> Answer:
    count = len(ask.grants)
    if count <= MANY_WRITTEN or ask.nbytes or len(ask.identities) != IDENTITY * count:
        return verbs.commit(daemon, link, session, ask)

    async def work() -> Reply:
        good = [False] * count
        for at in range((count - 1) // MANY_WRITTEN * MANY_WRITTEN, -1, -MANY_WRITTEN):
            end = at + MANY_WRITTEN  # leaves first: the root of a prefix is the youngest
            identities = ask.identities[IDENTITY * at : IDENTITY * end]
            part = records.Commit(ask.id, ask.grants[at:end], identities, ask.ttl)
            done = verbs.commit(daemon, link, session, part)
            assert isinstance(done, replies.Committed)
            good[at:end] = done.good
            await asyncio.sleep(0)  # what is filled becomes visible, whoever hears of it
        return replies.Committed(ask.id, good)

    return work()


def part(daemon: Daemon, link: Connection, session: Session, ask: records.Part) -> Answer:
    if len(ask.grants) <= MANY_WRITTEN:
        return verbs.part(daemon, link, session, ask)

    async def work() -> Reply:
        good: list[bool] = []
        at = 0
        while len(good) < len(ask.grants):
            grants = ask.grants[len(good) : len(good) + MANY_WRITTEN]
            done, at = verbs.fill_parts(session, ask, grants, at)
            good += done
            await asyncio.sleep(0)  # other ranks wait for it, whoever hears of it
        return replies.Committed(ask.id, good)

    return work()


def delete(daemon: Daemon, link: Connection, session: Session, ask: records.Delete) -> Answer:
    if not many(ask.keys):
        return verbs.delete(daemon, link, session, ask)
    deadline = daemon.now() + ask.seconds

    async def work() -> Reply:
        count = 0
        for keys in keys_in_slices(ask.keys, MANY):
            tier = ask.tier or None
            count += await daemon.manager.delete(keys, tier=tier, deadline=deadline)
            await others(link)
        return replies.Count(ask.id, count)

    return work()


MANY_VERBS: Mapping[type[records.Record], Verb] = {
    records.Find: find,
    records.Load: load,
    records.Reserve: reserve,
    records.Commit: commit,
    records.Part: part,
    records.Delete: delete,
}
