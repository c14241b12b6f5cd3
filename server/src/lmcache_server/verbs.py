"""What the daemon does with each request on values. Plain answers, or coroutines where other tiers are asked."""

from __future__ import annotations

import asyncio
import struct
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_core import frame
from lmcache_core.memory.leases import Held, Leases, State
from lmcache_core.spi import Closed, ConfigError, Key, Lease, Refusal
from lmcache_core.storage.results import Loaded, Reason
from lmcache_core.wire import records, replies
from lmcache_core.wire.codec import Reply, to_keys
from lmcache_server.engines import OLD, Joint
from lmcache_server.finding import find
from lmcache_server.session import Session
from lmcache_server.slices import MANY_WRITTEN, in_parts, in_turns

if TYPE_CHECKING:
    from lmcache_server.connection import Connection
    from lmcache_server.daemon import Daemon

Answer = Reply | Coroutine[Any, Any, Reply] | None
Verb = Callable[["Daemon", "Connection", Session, Any], Answer]
IDENTITY = 16
_EXTENT = struct.Struct("<4Q")
_TOUCH_S = 0.2
"""Longest a reservation waits for memory to be touched."""


def ping(daemon: Daemon, link: Connection, session: Session, ask: records.Ping) -> Answer:
    return replies.Done(ask.id)


def segments(daemon: Daemon, link: Connection, session: Session, ask: records.Segments) -> Answer:
    if not link.local:
        raise ConfigError("memory is handed out over the unix socket only")
    found, descriptors = daemon.segments(ask.first)
    link.reply(replies.Mapped(ask.id, found), descriptors=descriptors)
    return None


def load(daemon: Daemon, link: Connection, session: Session, ask: records.Load) -> Answer:
    keys, manager = to_keys(ask.keys), daemon.manager
    if daemon.crowded():
        return replies.Granted(ask.id, 0, b"", b"", Reason.FULL.value)
    leases = manager.lease(keys, session, tokens=ask.tokens)
    if leases.left == len(keys):
        return _grant(daemon, link, session, ask, Loaded(leases, Reason.COMPLETE))  # type: ignore[arg-type]
    if not manager.tiers and not manager.loader.flights:
        good = leases.leading()
        if not good:
            manager.release(leases)
            return replies.Granted(ask.id, 0, b"", b"", Reason.MISS.value)
        manager.release([leases[at] for at in range(good, len(keys))])
        return _grant(daemon, link, session, ask, Loaded(leases, Reason.MISS), good)  # type: ignore[arg-type]

    async def work() -> Reply | None:
        loaded = await manager.complete(
            keys, session, leases, deadline=daemon.now() + ask.seconds, tokens=ask.tokens,
            tenant=ask.tenant,
        )  # fmt: skip
        if link.closed:  # nobody would hear of the leases
            manager.release(loaded.leases)
            return replies.Granted(ask.id, 0, b"", b"", Reason.CLOSED.value)
        return _grant(daemon, link, session, ask, loaded)

    return work()  # type: ignore[return-value]


def _grant(
    daemon: Daemon,
    link: Connection,
    session: Session,
    ask: records.Load,
    loaded: Loaded,
    count: int | None = None,
) -> Reply | None:
    leases: Sequence[Lease | None] = loaded.leases
    packed, identities = packed_leases(leases, count)
    return hand_over(daemon, link, session, ask, leases, packed, identities, loaded.reason.value)


def packed_leases(leases: Sequence[Lease | None], count: int | None = None) -> tuple[bytes, bytes]:
    """Extents and identities, as ``Granted`` has them."""
    if isinstance(leases, Leases):
        return pack(leases, len(leases) if count is None else count)
    loans = [lease for lease in leases if lease is not None]
    extents = b"".join([_EXTENT.pack(*_words(lease.extent)) for lease in loans])
    return extents, b"".join([lease.identity for lease in loans])


def hand_over(
    daemon: Daemon,
    link: Connection,
    session: Session,
    ask: records.Load,
    leases: Sequence[Lease | None],
    packed: bytes,
    identities: bytes,
    reason: str,
) -> Reply | None:
    """The answer to a load: a grant, or the values themselves."""
    if not leases:
        return replies.Granted(ask.id, 0, b"", b"", reason)
    if ask.stream:
        values = [leases[at].view for at in range(len(packed) // 32)]  # type: ignore[union-attr]
        link.reply(
            replies.Granted(ask.id, 0, packed, identities, reason),
            values=values,
            sent=lambda: daemon.sessions.end(leases),
        )
        return None
    grant = daemon.sessions.number()
    session.leases[grant] = leases
    return replies.Granted(ask.id, grant, packed, identities, reason)


def _words(extent: Any) -> tuple[int, int, int, int]:
    return extent.segment, extent.base, extent.nbytes, extent.generation


def pack(leases: Leases, count: int) -> tuple[bytes, bytes]:
    """Extents and identities of the first ``count`` leases, straight from the index's columns."""
    index, slots = leases.columns, leases.slots[:count]
    generations = [segment.generations for segment in leases.arena.segments]
    places, positions, lengths = index.places, index.positions, index.nbytes
    parts: list[bytes] = []
    append, extent = parts.append, _EXTENT.pack
    for slot in slots:
        slab = places[slot]
        number, base = slab.segment, slab.base + positions[slot] * slab.size
        append(extent(number, base, lengths[slot], generations[number][base >> 12]))
    return b"".join(parts), index.identities(slots)


def reserve(daemon: Daemon, link: Connection, session: Session, ask: records.Reserve) -> Answer:
    keys = to_keys(ask.keys)
    if len(ask.sizes) != 8 * len(keys):
        raise ConfigError(f"{len(ask.sizes)} bytes are not the sizes of {len(keys)} values")
    sizes = array("Q", ask.sizes)
    if not link.local and sum(sizes) > records.MOST_VALUE:
        raise ConfigError(f"more than {records.MOST_VALUE} bytes in one request")
    wants = list(zip(keys, sizes, strict=True))
    if not daemon.touching(sum(sizes)):
        return reserved(daemon, session, ask, wants)

    async def work() -> Reply:
        await touched(daemon, link, sum(sizes))
        return reserved(daemon, session, ask, wants)

    return work()


async def touched(daemon: Daemon, link: Connection, nbytes: int) -> None:
    """Wait until so much memory is touched: the kernel would hold up everybody while it makes it.

    Raises:
        Closed: nobody would hear of the memory any more.
    """
    end = daemon.now() + _TOUCH_S
    while daemon.touching(nbytes) and daemon.now() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    if link.closed:
        raise Closed("the client has gone")


def reserved(
    daemon: Daemon, session: Session, ask: records.Reserve, wants: list[tuple[Key, int]]
) -> replies.Reserved:
    manager = daemon.manager
    grants: list[int] = []
    refusals: list[str] = []
    words: list[int] = []
    if ask.engine:
        answers = _joint(daemon, session, ask, wants)
    else:
        answers = list(
            manager.reserve(wants, session, tenant=ask.tenant, cost=ask.cost, tags=ask.tags)
        )
    for answer in answers:
        if isinstance(answer, Refusal):
            grants.append(0)
            refusals.append(answer.value)
            continue
        held = answer.held if isinstance(answer, Joint) else answer
        grants.append(daemon.sessions.number())
        session.reservations[grants[-1]] = answer
        words += _words(held.extent)
    return replies.Reserved(ask.id, grants, refusals, array("Q", words).tobytes())


def _joint(
    daemon: Daemon, session: Session, ask: records.Reserve, wants: list[tuple[Key, int]]
) -> list[Any]:
    """Reservations that all ranks of an engine fill."""
    engine = daemon.engines.find(ask.engine)
    engine.rank_of(session)
    for key, nbytes in wants:  # before anything is granted
        if key.group >= len(engine.specs):
            raise ConfigError(f"engine {engine.name!r} has no group {key.group}")
        spec, room = engine.specs[key.group]
        if nbytes != room + spec.nbytes:
            raise ConfigError(f"a full chunk has {room + spec.nbytes} bytes, not {nbytes}")
    answers: list[Any] = []
    if len(ask.firsts) not in (0, 8 * len(wants)):
        raise ConfigError(f"{len(ask.firsts)} bytes are not the positions of {len(wants)} values")
    firsts = array("q", ask.firsts) or [-1] * len(wants)
    for old in [each for each in engine.joints.values() if each.turn < ask.turn - OLD]:
        old.drop()
    for (key, nbytes), first in zip(wants, firsts, strict=True):
        joint = engine.joint(key, ask.turn)
        if joint is not None and not isinstance(joint, Refusal) and session in joint.joined:
            joint = Refusal.PENDING  # a rank fills its part once
        if isinstance(joint, Refusal):
            answers.append(joint)
            continue
        if joint is None:
            joint = Joint(engine, key, ask.tags, daemon.manager, ask.turn, first)
            (held,) = daemon.manager.reserve(
                [(key, nbytes)], joint, tenant=ask.tenant, cost=ask.cost, tags=ask.tags
            )
            if isinstance(held, Refusal):
                engine.give_up(key, ask.turn)
                answers.append(held)
                continue
            assert isinstance(held, Held)
            joint.held = held
            engine.joints[key] = joint
        joint.join(session)
        answers.append(joint)
    return answers


def commit(daemon: Daemon, link: Connection, session: Session, ask: records.Commit) -> Answer:
    count = len(ask.grants)
    if len(ask.identities) != IDENTITY * count:
        raise ValueError(f"{len(ask.identities)} bytes are not the identities of {count} values")
    good = [False] * count
    held: list[tuple[int, Held]] = []
    for at, grant in enumerate(ask.grants):
        if isinstance(session.reservations.get(grant), Held):
            found = session.reservations.pop(grant)  # from now on no abort reaches it
            assert isinstance(found, Held)
            held.append((at, found))

    def finish(first: int = 0, end: int = count) -> None:
        part = held[first:end]
        identities = [ask.identities[IDENTITY * at : IDENTITY * (at + 1)] for at, _ in part]
        done = daemon.manager.commit_batch([each for _, each in part], identities, ttl=ask.ttl)
        for (at, _), visible in zip(part, done, strict=True):
            good[at] = visible

    if not ask.nbytes:
        if not link.local and any(each.nbytes for _, each in held):
            raise ValueError("a commit without its values")
        finish()
        return replies.Committed(ask.id, good)
    trusted = link.local or daemon.tls is not None

    def give_up() -> None:
        in_turns(in_parts(daemon.manager.abort, [each for _, each in held], MANY_WRITTEN))

    if len(held) != count or ask.nbytes != sum(each.nbytes for _, each in held):
        give_up()
        raise ValueError(f"{ask.nbytes} bytes are not those of the reservations")

    async def show() -> None:
        if not trusted:
            await verify()
        for at in range((count - 1) // MANY_WRITTEN * MANY_WRITTEN, -1, -MANY_WRITTEN):
            finish(at, at + MANY_WRITTEN)  # leaves first, as in one turn
            await asyncio.sleep(0)
        link.reply(replies.Committed(ask.id, good))

    async def verify() -> None:
        """Verified before it is visible: what TCP adds up lets too much pass."""
        parts = [ask.identities[at : at + IDENTITY] for at in range(0, IDENTITY * count, IDENTITY)]
        work = daemon.manager.context.executor.submit(_intact, [each for _, each in held], parts)
        intact = await asyncio.wrap_future(work)
        for (_, each), whole in zip(held, intact, strict=True):
            if not whole:
                daemon.refuse(link.peer, "a value was damaged on its way")
                daemon.manager.abort(each)

    def filled(whole: bool) -> None:
        if not whole:
            give_up()
        elif trusted and count <= MANY_WRITTEN:
            finish()
            link.reply(replies.Committed(ask.id, good))
        else:
            daemon.work(show())

    link.receive_values((each.view for _, each in held), filled)
    return None


def _intact(held: Sequence[Held], identities: Sequence[bytes]) -> list[bool]:
    return [
        each.state is State.RESERVED and frame.intact(each.view, each.key, identity)
        for each, identity in zip(held, identities, strict=True)
    ]


def part(daemon: Daemon, link: Connection, session: Session, ask: records.Part) -> Answer:
    return replies.Committed(ask.id, fill_parts(session, ask, ask.grants)[0])


def fill_parts(
    session: Session, ask: records.Part, grants: Sequence[int], at: int = 0
) -> tuple[list[bool], int]:
    """Fill some of a request's reservations, whose digests begin ``at``; tells where those of the next do."""
    good = []
    for grant in grants:
        joint = session.reservations.get(grant)
        if not isinstance(joint, Joint):
            raise ValueError("a part of what is no shared reservation")
        mine = joint.engine.writes[joint.engine.rank_of(session)][joint.key.group]
        nbytes = IDENTITY * len(mine)
        good.append(joint.fill(session, ask.digests[at : at + nbytes], ask.ttl))
        del session.reservations[
            grant
        ]  # not before: what is refused is still the client's to abort
        at += nbytes
    return good, at


def release(daemon: Daemon, link: Connection, session: Session, said: records.Release) -> Answer:
    daemon.sessions.release(session, said.grants, said.parts)
    return None


def abort(daemon: Daemon, link: Connection, session: Session, said: records.Abort) -> Answer:
    daemon.sessions.abort(session, said.grants)
    return None


def dispatch(daemon: Daemon, link: Connection, session: Session, said: records.Dispatch) -> Answer:
    """Every rank holds the leases from now on, under the same numbers; who dispatched is free of them."""
    engine = daemon.engines.by_name.get(said.engine)
    ranks = (
        [] if engine is None or engine.missing else list(dict.fromkeys(engine.sessions.values()))
    )
    for grant in said.grants:
        leases = session.leases.get(grant)
        if leases is None or daemon.sessions.waits(grant):  # said again, as nobody had answered
            continue
        if not ranks:
            daemon.sessions.undelivered(session, grant, said.ranks)
            continue
        left = [rank for rank in ranks if grant not in rank.early]
        shared = {rank: daemon.sessions.share(leases, rank) for rank in left}
        daemon.sessions.end(session.leases.pop(grant))
        for rank, each in shared.items():
            rank.leases[grant] = each
    return None


def prefill(daemon: Daemon, link: Connection, session: Session, said: records.Prefill) -> Answer:
    daemon.manager.report_prefill(said.tokens, said.seconds)
    return None


def register(daemon: Daemon, link: Connection, session: Session, ask: records.Register) -> Answer:
    engine = daemon.engines.register(session, ask)
    chunk = engine.forms[0].tokens if engine.forms else 0
    return replies.Registered(ask.id, *engine.digests(), engine.missing, chunk)


def delete(daemon: Daemon, link: Connection, session: Session, ask: records.Delete) -> Answer:
    keys = to_keys(ask.keys)

    async def work() -> Reply:
        deadline = daemon.now() + ask.seconds
        count = await daemon.manager.delete(keys, tier=ask.tier or None, deadline=deadline)
        return replies.Count(ask.id, count)

    return work()


VALUE_VERBS: Mapping[type[records.Record], Verb] = {
    records.Ping: ping,
    records.Segments: segments,
    records.Find: find,
    records.Load: load,
    records.Reserve: reserve,
    records.Commit: commit,
    records.Part: part,
    records.Release: release,
    records.Abort: abort,
    records.Dispatch: dispatch,
    records.Prefill: prefill,
    records.Register: register,
    records.Delete: delete,
}
