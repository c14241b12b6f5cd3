"""Engines of several ranks: one key space, chunks filled together, leases that belong to the ranks."""

import hashlib

import pytest

from lmcache_core import frame, ops
from lmcache_core.identity.space import ROOT_TAG, SPACE_TAG
from lmcache_core.spi import ConfigError, Refusal
from lmcache_core.wire import records, replies
from lmcache_core.wire.codec import frame as frame_of
from lmcache_core.wire.codec import to_runs
from lmcache_core.wire.link import Link
from tests.wire.daemons import Daemon, describe, key, wait_for

HALF = 8192
FORM = records.Form(
    room=frame.header_nbytes(2), dtype="uint8", tokens=256, planes=1, heads=2, head_dim=0,
    interior="page", segments=[(0, 0, 1, HALF), (0, 1, 2, HALF)],
)  # fmt: skip
WHOLE = FORM.room + 2 * HALF


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("d"), "--arena-mode", "shared-rw") as found:
        yield found


@pytest.fixture
def ranks(daemon):
    clients = [daemon.client(name=f"rank {n}") for n in range(2)]
    yield clients
    for client in clients:
        client.close()


def register(client, rank, *, engine="e", ranks=2, space=b"space", form=FORM):
    return client.ask(
        replies.Registered,
        lambda id: records.Register(
            id, engine, rank, ranks, space, [form] if rank >= 0 else [], [[rank]] if rank >= 0 else []
        ),
    )  # fmt: skip


def half(client, reservation, rank):
    """Fill this rank's segment; its digest."""
    begin = FORM.room + rank * HALF
    part = reservation.view[begin : begin + HALF]
    part[:] = bytes([65 + rank]) * HALF
    return ops.digest(part, frame.seed_of(reservation.key))


def reserve(client, number, engine="e", firsts=()):
    (held,) = client.reserve([(key(number), WHOLE)], None, engine=engine, firsts=firsts)
    return held


def test_root_is_told_when_all_ranks_agree(daemon, ranks):
    """Seen in LMCache#1739."""
    scheduler = daemon.client(name="scheduler")
    assert register(scheduler, -1).root == b""
    assert register(ranks[0], 0).missing == [1]
    with pytest.raises(ConfigError, match="layouts differ"):
        register(ranks[1], 1, space=b"other")
    told = register(ranks[1], 1)
    assert told.root == hashlib.sha256(ROOT_TAG + b"space").digest()
    assert told.space == hashlib.sha256(SPACE_TAG + b"space").digest()
    assert register(scheduler, -1).root == told.root
    with pytest.raises(ConfigError, match="has 2 ranks"):
        register(scheduler, -1, ranks=4)
    scheduler.close()


def test_engine_that_a_restarted_daemon_does_not_know_is_refused_and_raises_nothing(ranks, caplog):
    """Seen in LMCache#5270, LMCache#4642."""
    for _ in range(3):
        assert reserve(ranks[0], 49, engine="unknown") is Refusal.UNWANTED
    said = [each.getMessage() for each in caplog.records if "refuses" in each.getMessage()]
    assert said == ["the daemon refuses: engine 'unknown' is not registered with all its ranks"]


def test_what_is_refused_in_part_leaves_no_memory_behind(daemon, ranks):
    """Seen in LMCache#5344."""
    for rank, client in enumerate(ranks):
        register(client, rank)
    assert ranks[0].reserve([(key(50), WHOLE), (key(51), WHOLE + 1)], None, engine="e") == [
        Refusal.UNWANTED, Refusal.UNWANTED,
    ]  # fmt: skip
    assert describe(ranks[0])["memory"]["reserved"] == 0
    held = reserve(ranks[0], 52)
    with pytest.raises(ConfigError, match="are not the digests"):
        ranks[0].ask(replies.Committed, lambda id: records.Part(id, [held.grant], b"short"))
    ranks[0].abort(held)
    wait_for(lambda: describe(ranks[0])["memory"]["reserved"] == 0)


def test_chunk_is_visible_when_its_last_shard_is_filled(daemon, ranks):
    """Seen in LMCache#1770."""
    for rank, client in enumerate(ranks):
        register(client, rank)
    held = [reserve(client, 1, firsts=[512]) for client in ranks]
    assert held[0].extent == held[1].extent
    assert ranks[0].commit_parts([held[0]], [half(ranks[0], held[0], 0)]) == [True]
    assert ranks[0].lookup([key(1)]).leading == 0
    assert ranks[1].commit_parts([held[1]], [half(ranks[1], held[1], 1)]) == [True]
    loaded = ranks[0].load([key(1)], None)
    (lease,) = loaded.leases
    header = frame.open_header(lease.view, key(1))
    frame.verify(header, lease.view[header.nbytes :])
    assert header.first == 512
    assert lease.view[header.nbytes :] == b"A" * HALF + b"B" * HALF
    ranks[0].release(loaded.leases)


def test_abort_by_one_rank_kills_the_chunk_and_frees_it_after_the_other(daemon, ranks):
    """Seen in LMCache#1467."""
    for rank, client in enumerate(ranks):
        register(client, rank)
    held = [reserve(client, 2) for client in ranks]
    assert ranks[0].commit_parts([held[0]], [half(ranks[0], held[0], 0)]) == [True]
    ranks[1].abort(held[1])
    wait_for(lambda: describe(ranks[1])["memory"]["reserved"] == 0)
    assert ranks[0].lookup([key(2)]).leading == 0
    memory = describe(ranks[0])["memory"]
    assert memory["quarantined"] == memory["reserved"] == 0
    again = reserve(ranks[0], 2)
    assert not isinstance(again, Refusal)
    ranks[0].abort(again)


def test_memory_of_a_dead_chunk_waits_for_every_writer(daemon, ranks):
    for rank, client in enumerate(ranks):
        register(client, rank)
    held = [reserve(client, 3) for client in ranks]
    ranks[0].abort(held[0])
    wait_for(lambda: describe(ranks[0])["memory"]["quarantined"])
    assert ranks[1].commit_parts([held[1]], [half(ranks[1], held[1], 1)]) == [False]
    assert describe(ranks[0])["memory"]["quarantined"] == 0


def test_dispatched_leases_belong_to_the_ranks(daemon, ranks):
    for rank, client in enumerate(ranks):
        register(client, rank)
    for rank, client in enumerate(ranks):
        held = reserve(client, 4)
        client.commit_parts([held], [half(client, held, rank)])
    scheduler = daemon.client()
    loaded = scheduler.load([key(4)], None)
    handle = scheduler.dispatch("e", loaded.leases, 2)
    described = wait_for(lambda: _leases(scheduler) == {"rank 0": 1, "rank 1": 1} and True)
    assert described
    scheduler.close()
    leases = [client.adopt(handle) for client in ranks]
    for client, each in zip(ranks, leases, strict=True):
        assert each[0].view[FORM.room :] == b"A" * HALF + b"B" * HALF
        client.release(each)
        client.flush()
    wait_for(lambda: describe(ranks[0])["memory"]["leased"] == 0)


def _leases(client):
    return {c["name"]: c["leases"] for c in describe(client)["clients"] if c["leases"]}


def test_engine_is_forgotten_with_its_ranks(daemon, ranks):
    """Seen in LMCache#4554."""
    register(ranks[0], 0, engine="short")
    assert "short" in describe(ranks[1])["engines"]
    ranks[0].close()
    wait_for(lambda: "short" not in describe(ranks[1])["engines"])


def test_dispatched_leases_are_read_after_the_daemon_has_gone(tmp_path):
    with Daemon(tmp_path, "--arena-mode", "shared-rw") as daemon:
        rank, scheduler = daemon.client(), daemon.client()
        register(rank, 0, ranks=1)
        (plain,) = rank.reserve([(key(10), WHOLE)], None)
        plain.view[:] = b"x" * WHOLE
        assert rank.commit_batch([plain], [bytes(16)]) == [True]
        handle = scheduler.dispatch("e", scheduler.load([key(10)], None).leases, 1)
        daemon.kill()
        wait_for(lambda: rank.home is None)
        (lease,) = rank.adopt(handle)
        assert lease.current and bytes(lease.view) == b"x" * WHOLE
        assert rank.adopt((b"another boot", *handle[1:])) is None
        rank.close()
        scheduler.close()


def test_leases_dispatched_while_a_rank_is_away_end_when_it_has_read(daemon):
    scheduler, rank = daemon.client(), daemon.client(name="rank")
    register(rank, 0, engine="away", ranks=1)
    (held,) = scheduler.reserve([(key(11), WHOLE)], None)
    held.view[:] = b"y" * WHOLE
    assert scheduler.commit_batch([held], [bytes(16)]) == [True]
    leases = scheduler.load([key(11)], None).leases
    rank._lost(rank.home)
    wait_for(lambda: rank.home is not None and "away" not in describe(scheduler)["engines"])
    read = rank.adopt(scheduler.dispatch("away", leases, 1))
    assert bytes(read[0].view) == b"y" * WHOLE
    assert describe(scheduler)["memory"]["leased"] == WHOLE
    rank.release(read)
    wait_for(lambda: describe(scheduler)["memory"]["leased"] == 0)
    rank.close()
    scheduler.close()


def test_leases_dispatched_to_ranks_that_a_new_daemon_does_not_know_end_when_all_have_read(
    daemon, ranks
):
    """The scheduler may find its way back to it before they do."""
    scheduler = daemon.client()
    (held,) = scheduler.reserve([(key(13), WHOLE)], None)
    held.view[:] = b"z" * WHOLE
    assert scheduler.commit_batch([held], [bytes(16)]) == [True]
    handle = scheduler.dispatch("unheard of", scheduler.load([key(13)], None).leases, 2)
    for left, rank in zip((WHOLE, 0), ranks, strict=True):
        (lease,) = rank.adopt(handle)
        assert lease.current and bytes(lease.view) == b"z" * WHOLE
        rank.release([lease])
        rank.flush()
        wait_for(lambda left=left: describe(scheduler)["memory"]["leased"] == left)
    scheduler.close()


def test_a_rank_that_asks_twice_for_one_chunk_fills_it_once(daemon, ranks):
    """Seen in sglang#26670."""
    for rank, client in enumerate(ranks):
        register(client, rank)
    wants = [(key(112), WHOLE)] * 2
    held = [client.reserve(wants, None, engine="e", turn=1) for client in ranks]
    assert [answers[1] for answers in held] == [Refusal.PENDING] * 2
    for rank, client in enumerate(ranks):
        assert client.commit_parts([held[rank][0]], [half(client, held[rank][0], rank)]) == [True]
    assert ranks[0].lookup([key(112)]).leading == 1
    assert describe(ranks[0])["memory"]["reserved"] == 0


def test_leases_that_ended_when_a_rank_joined_anew_are_not_adopted(daemon):
    """They may be another value's memory by now."""
    scheduler, rank = daemon.client(), daemon.client(name="rank")
    register(rank, 0, engine="anew", ranks=1)
    (held,) = scheduler.reserve([(key(212), WHOLE)], None)
    assert scheduler.commit_batch([held], [bytes(16)]) == [True]
    handle = scheduler.dispatch("anew", scheduler.load([key(212)], None).leases, 1)
    wait_for(lambda: _leases(scheduler).get("rank") == 1)
    rank._lost(rank.home)
    wait_for(lambda: rank.home is not None and describe(scheduler)["memory"]["leased"] == 0)
    assert rank.adopt(handle) is None
    for client in (rank, scheduler):
        client.close()


def test_process_in_the_place_of_a_rank_that_died_adopts_nothing_that_was_for_that_one(daemon):
    """The leases ended with the rank they were dispatched to."""
    scheduler, rank = daemon.client(), daemon.client(name="rank")
    register(rank, 0, engine="next", ranks=1)
    (held,) = scheduler.reserve([(key(114), WHOLE)], None)
    assert scheduler.commit_batch([held], [bytes(16)]) == [True]
    handle = scheduler.dispatch("next", scheduler.load([key(114)], None).leases, 1)
    after = daemon.client(name="after")
    assert after.adopt(handle) is None
    for client in (rank, after, scheduler):
        client.close()


def test_dispatch_that_was_lost_with_its_connection_is_said_again(daemon, monkeypatch):
    """Ranks read what was dispatched although the daemon has not heard of it."""
    scheduler, rank = daemon.client(name="scheduler"), daemon.client(name="again")
    register(rank, 0, engine="again", ranks=1)
    (held,) = scheduler.reserve([(key(115), WHOLE)], None)
    assert scheduler.commit_batch([held], [bytes(16)]) == [True]
    leases = scheduler.load([key(115)], None).leases
    with monkeypatch.context() as lost:
        lost.setattr(Link, "post", lambda *_: None)
        handle = scheduler.dispatch("again", leases, 1)
        scheduler._lost(scheduler.home)
    (lease,) = rank.adopt(handle)
    wait_for(lambda: _leases(rank).get("again") == 1 and not scheduler.home.dispatched)
    rank.delete([key(115)])
    assert lease.current
    rank.release([lease])
    wait_for(lambda: "again" not in _leases(scheduler))
    rank.close()
    scheduler.close()


def test_client_that_joins_alone_ends_what_was_granted_on_connections_it_has_left(daemon):
    """The daemon may not have seen their end yet, and the answer to a reservation was under way on one."""
    client, watcher = daemon.client(), daemon.client()
    before = describe(watcher)["memory"]["reserved"]
    until = client.now() + 5
    left = client.join(client.home, until)  # never closed at this end
    sizes = WHOLE.to_bytes(8, "little")
    left.send([frame_of(records.Reserve(1, to_runs([key(116)]), sizes))], until)
    wait_for(lambda: describe(watcher)["memory"]["reserved"] > before)
    client._lost(client.home)
    wait_for(lambda: describe(watcher)["memory"]["reserved"] == before)
    left.close()
    client.close()
    watcher.close()


def test_chunk_that_only_some_ranks_filled_goes_with_the_last_of_them(daemon, ranks):
    watcher = daemon.client()
    for rank, client in enumerate(ranks):
        register(client, rank, engine="half")
    held = reserve(ranks[0], 113, engine="half")
    assert ranks[0].commit_parts([held], [half(ranks[0], held, 0)]) == [True]
    assert describe(watcher)["memory"]["reserved"]
    for client in ranks:
        client.close()
    wait_for(lambda: not describe(watcher)["memory"]["reserved"])
    watcher.close()
