"""Client processes of a history: what their threads do with the cache, and what they may expect of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from lmcache_server.session import Session

from lmcache_core import frame, ops
from lmcache_core.config import EngineConfig, VerifyHot
from lmcache_core.engine import CacheEngine, Forms
from lmcache_core.memory.leases import Leases
from lmcache_core.observers import Metrics, check_identities
from lmcache_core.spi import BackendError, Key, Refusal
from lmcache_core.storage.results import Reason
from lmcache_core.testing.simulation import EPOCH
from lmcache_core.testing.worlds import (
    PAGE,
    fill,
    frame_nbytes,
    key_of,
    payload_of,
    spec_of,
    verify_lease,
)
from lmcache_core.wire import records, replies
from lmcache_core.wire.client import DaemonClient
from tests.simulation.daemons import TOKEN
from tests.simulation.kv import CHUNK, Rows, space
from tests.simulation.threads import SimEvent, sleep, wait_for

if TYPE_CHECKING:
    from tests.simulation.histories import DaemonHistory

SLACK_S = 2e-3
TIMED = (
    "lookup", "load", "reserve", "commit_batch", "commit_parts", "delete", "dispatch", "adopt",
)  # fmt: skip
HALF = PAGE
FORM_ROOM = frame.header_nbytes(2)


class Client(DaemonClient):
    """A client of which every call must be back by its deadline."""

    history: DaemonHistory

    def _timed(self, name: str, *args: Any, **how: Any) -> Any:
        begun = self.now()
        deadline = how.get("deadline") or begun + self.timeout
        answer = getattr(super(), name)(*args, **how)
        late = self.now() - max(begun, deadline)
        assert late <= SLACK_S, f"{name} came back {late:.3f} s after its deadline"
        waited = self.now() - begun > 0.8 * self.timeout
        self.history.outcome.faults["late"] += waited and self.trouble is Reason.DEADLINE
        return answer


for name in TIMED:
    setattr(Client, name, lambda self, *a, _name=name, **how: self._timed(_name, *a, **how))


class Embedded:
    """``CacheClient`` of an engine in the manager's own process."""

    def __init__(self, history: DaemonHistory) -> None:
        manager = history.manager
        self.manager = manager
        self.reserve, self.commit_batch = manager.reserve, manager.commit_batch
        self.abort, self.release = manager.abort, manager.release
        self.report_prefill = manager.report_prefill
        self.home = None

    def lookup(self, keys: Sequence[Key], /, **how: Any) -> Any:
        return wait_for(self.manager.lookup(keys, **how))

    def load(self, keys: Sequence[Key], owner: object, /, **how: Any) -> Any:
        return wait_for(self.manager.load(keys, owner, **how))

    def delete(self, keys: Sequence[Key], /, **how: Any) -> int:
        with suppress(BackendError):
            return wait_for(self.manager.delete(keys, **how))
        return 0

    def close(self) -> None: ...


def connect(history: DaemonHistory, name: str, *, tcp: bool = False) -> Client:
    Client.history = history
    timeout = history.source.choice((0.05, 0.3, 1.0))
    if tcp:
        return Client("127.0.0.1:1", token=TOKEN, timeout=timeout, name=name, transfer="tcp")
    return Client("unix:///sim", timeout=timeout, name=name)


def work(history: DaemonHistory, name: str, place: str) -> None:
    """Serve requests of an engine, and move opaque values, until the history has done enough."""
    source = history.source
    client: Any = (
        Embedded(history) if place == "embedded" else connect(history, name, tcp=place == "tcp")
    )
    groups, metrics = source.choice((1, 1, 2)), Metrics()
    verify = VerifyHot.ALWAYS if place == "tcp" else source.choice(list(VerifyHot))
    options = EngineConfig(
        chunk_size=CHUNK, verify_hot=verify, save_partial=source.random() < 0.5,
        min_retrieve_tokens=0, min_store_tokens=0,
    )  # fmt: skip
    engine = CacheEngine(
        client, Forms(space(groups)), options, metrics=metrics, timer=history.loop.time,
        wall=lambda: EPOCH + history.loop.time(),
    )  # fmt: skip
    verbs: list[Any] = [partial(serve, engine, groups)] * 3 + [put, put, get, get, forget]
    while history.left > 0:
        history.left -= 1
        history.outcome.operations += 1
        verb = source.choice(verbs)
        verb(history, client)
        history.note(name, getattr(verb, "__name__", "serve"))
        sleep(source.choice((0.0, 0.001, 0.05, 0.3)))
    if place == "unix":
        settled(history, client)
    client.close()
    broken = check_identities(metrics.snapshot())
    assert not broken, broken


def settled(history: DaemonHistory, client: Client) -> None:
    """A client that uses nothing is soon known to use nothing, whatever was lost on the way."""
    for _ in range(40):
        sleep(0.5)
        home, sessions = client.home, history.daemon.sessions.by_token
        session = None if home is None else sessions.get(home.session)
        if home is None or session is None or session.empty:
            return
    raise AssertionError(f"{session} still holds {session.leases} {session.reservations}")


def serve(engine: CacheEngine, groups: int, history: DaemonHistory, client: Any) -> None:
    """One request: offered, loaded, computed, stored, ended; some are given up half way."""
    source = history.source
    tokens = list(range(source.choice((3, 9, 13, 18, 21))))
    if source.random() < 0.3:
        tokens[source.randrange(len(tokens))] = 99
    request = engine.request("a", tokens)
    try:
        reach = request.lookup()
        assert reach < len(tokens)
        sleep(source.choice((0.0, 0.0, 0.01, 1.0)))
        if source.random() < 0.1:
            return  # aborted
        memory = Rows(groups, tokens)
        good = request.load(memory)
        history.note("served", reach, good)
        assert not (wrong := memory.wrong(good)), f"wrong KV at {wrong} of {good} positions"
        history.outcome.verified += good // CHUNK
        memory.compute(good)
        saved = request.store(memory, len(tokens))
        assert saved.stored + saved.present + saved.left <= len(tokens)
    finally:
        request.end()


def put(history: DaemonHistory, client: Any) -> None:
    """Store opaque values: reserved, filled in two steps, committed or given up."""
    source = history.source
    keys = history.keys()
    room = frame_nbytes(history.nbytes(keys))
    held = [
        each
        for each in client.reserve([(key, room) for key in keys], history)
        if not isinstance(each, Refusal)
    ]
    if held and source.random() < 0.3:
        half = held[0].view[: room // 2]
        half[:] = b"\xee" * len(half)
        sleep(source.choice((0.001, 0.1, 3.0)))
    if held and source.random() < 0.1:
        client.abort(held.pop())
    if source.random() < 0.1:
        for each in held:
            client.abort(each)
        return
    client.commit_batch(held, [fill(each) for each in held])


def get(history: DaemonHistory, client: Any) -> None:
    """Load opaque values, look at them now and after a while."""
    source = history.source
    keys = history.keys()
    loaded = client.load(keys, history)
    assert [lease.key for lease in loaded.leases] == keys[: len(loaded.leases)]
    history.outcome.reasons[f"get {loaded.reason.value}"] += 1
    try:
        for pause in (0.0, source.choice((0.0, 0.01, 2.0))):
            sleep(pause)
            for lease in loaded.leases:
                verify_lease(lease)
                history.outcome.verified += 1
    finally:
        client.release(loaded.leases)


def forget(history: DaemonHistory, client: Any) -> None:
    client.delete(history.keys())


# -- an engine of several ranks --------------------------------------------------------------------------


class Orders:
    """What the scheduler tells a rank."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Any, ...]] = []
        self.busy = self.over = False
        self.come = SimEvent()

    def give(self, *order: Any) -> None:
        self.waiting.append(order)
        self.come.set()

    def take(self) -> tuple[Any, ...] | None:
        self.come.clear()
        if not self.waiting:
            self.come.wait(1.0)
        self.busy = bool(self.waiting)
        return self.waiting.pop(0) if self.waiting else None


FORM = records.Form(
    FORM_ROOM, "uint8", 256, 1, 0, 0, "page", [(0, 0, 0, HALF), (1, 0, 0, HALF)]
)  # fmt: skip


def registered(client: Client, rank: int) -> bool:
    """Make ourselves known to this life of the daemon."""
    try:
        client.ask(
            replies.Registered,
            lambda id: records.Register(
                id, "ranked", rank, 2, b"space", [FORM] if rank >= 0 else [],
                [[rank]] if rank >= 0 else [],
            ),
        )  # fmt: skip
    except Exception:  # noqa: BLE001  # no daemon now; tried again
        return False
    return True


def ranked_keys(history: DaemonHistory) -> list[Key]:
    chain = history.source.randrange(2)
    return [key_of(7000 + chain * 100 + at) for at in range(history.source.randint(1, 5))]


def schedule(history: DaemonHistory, orders: Sequence[Orders]) -> None:
    """The scheduler: leases for the ranks, then has them store."""
    source, turn = history.source, 0
    client = connect(history, "scheduler")
    while history.left > 0:
        history.left -= 1
        history.outcome.operations += 1
        keys = ranked_keys(history)
        loaded = client.load(keys, None)
        handle = None
        if loaded.leases and source.random() < 0.9:
            handle = client.dispatch("ranked", loaded.leases, len(orders))  # type: ignore[arg-type]
        if handle is None:
            client.release(loaded.leases)
        else:
            for each in orders:
                each.give("read", handle)
        turn += 1
        for each in orders:
            each.give("store", turn, keys)
        history.note("scheduler", len(loaded.leases), handle is not None)
        sleep(source.choice((0.001, 0.05, 0.3)))
    for _ in range(20):  # its leases are being read, where ranks are left
        if not any(each.waiting or each.busy for each in orders):
            break
        sleep(0.5)
    for each in orders:
        each.over = True
    client.close()


def rank(history: DaemonHistory, number: int, orders: Orders) -> None:
    """A rank: reads what was leased for it, fills its half of what is stored."""
    source, home = history.source, None
    client = connect(history, f"rank {number}")
    while history.left > 0 or orders.waiting or orders.busy:
        if client.home is not home and registered(client, number):
            home = client.home
        order = orders.take()
        if order is None:
            continue
        if order[0] == "read":
            sleep(source.choice((0.0, 0.0, 0.0, 3.0)))  # steps before it take their time
            leases = client.adopt(order[1])
            if leases is not None:
                check_leased(history, leases, orders)
                sleep(source.choice((0.0, 0.01, 0.5)))
                check_leased(history, leases, orders)
                for lease in leases:
                    verify_lease(lease)
                    history.outcome.verified += 1
                client.release(leases)
            continue
        _, turn, keys = order
        if source.random() < 0.05:
            continue  # this rank never comes for it
        size = FORM_ROOM + 2 * HALF
        wants = [(key, size) for key in keys]
        held: list[Any] = [
            each
            for each in client.reserve(wants, None, engine="ranked", turn=turn)
            if not isinstance(each, Refusal)
        ]
        if held and source.random() < 0.1:
            client.abort(held.pop())
        if source.random() < 0.2:
            sleep(source.choice((0.01, 0.5)))
        client.commit_parts(held, [half(each, number) for each in held])
        history.note("rank", number, len(held))
    client.close()


def check_leased(history: DaemonHistory, leases: Any, orders: Orders) -> None:
    """What a rank reads is leased to it, or still to the scheduler, as long as that and the daemon live."""
    home = leases.home
    if orders.over or not history.serving or home.boot != history.daemon.boot:
        return
    places = {
        (loan.extent.segment, loan.extent.base)
        for owner, books in history.manager.pool.owners.items()
        if isinstance(owner, Session) and (owner.token == home.session or owner.name == "scheduler")
        for right in books.rights
        if isinstance(right, Leases)
        for loan in right
        if loan is not None
    }
    for lease in leases:
        place = (lease.extent.segment, lease.extent.base)
        assert place in places, f"{lease.key!r} is read by a rank, and not leased for it"


def half(reservation: Any, number: int) -> bytes:
    """Fill one half; its digest."""
    begin = FORM_ROOM + number * HALF
    part = reservation.view[begin : begin + HALF]
    part[:] = payload_of(reservation.key, 2 * HALF)[number * HALF : (number + 1) * HALF]
    return bytes(ops.digest(part, frame.seed_of(reservation.key)))


assert spec_of(2 * HALF).nbytes == 2 * HALF
