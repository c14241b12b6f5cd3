"""Values longer than one string may be: their bytes in parts, and in the value's own place a head that names these.

Every writing names its parts by a random tag of its own, so parts of two writers or of two generations never meet. The
head is written last, and only where nothing is; before that nobody can reach the parts, and they expire by themselves. A
reader takes all parts that a head names, in the lengths that it says, or none. A value that looks like a head is
kept in parts, too, so nothing that is stored is ever taken for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lmcache_backend_redis.client import Address, Client, Flight
from lmcache_backend_redis.heads import HEAD_NBYTES, MOST_PARTS, Head
from lmcache_backend_redis.moving import (
    A_HEAD,
    LOADING,
    PLAIN,
    STORING,
    VERBS,
    Item,
    Tell,
    judge_store,
    move,
)
from lmcache_backend_redis.resp import Reply, Said
from lmcache_core.spi import (
    MISSED,
    PRESENT,
    BackendError,
    BufferTooSmall,
    Corrupt,
    Load,
    Loaded,
    Store,
    Stored,
    StoreStatus,
    Unavailable,
    section,
)

UNREACHED_S = 600.0
"""How long parts stay that no head names (yet); the longest that writing one value may take."""


def carry(
    client: Client, operation: str, address: Address, items: Sequence[Item], tell: Tell, flight: Flight
) -> None:  # fmt: skip
    """Move items that one node should have, and tell each one's result; parts go where they belong."""
    whole: Callable[..., Any] = _load if operation == "load" else _store
    later: list[Item] = []
    if operation == "store":
        at_once: list[Item] = []
        for item in items:
            (later if _in_parts(client, item[2]) else at_once).append(item)
        move(client, STORING, address, at_once, tell, flight)
    else:
        by_place = {item[0]: item for item in items}

        def told(at: int, result: Any) -> None:
            if result is A_HEAD:
                later.append(by_place[at])
            else:
                tell(at, result)

        move(client, LOADING, address, items, told, flight)
    for at, name, item in later:
        try:
            result = whole(client, name, item, flight)
        except BackendError as error:
            result = VERBS[operation].failed(error)
        tell(at, result)


def heads(client: Client, names: Sequence[bytes], flight: Flight | None = None) -> list[Any]:
    """What is in the place of each value, if it is a head or an error; None if it is a value, or nothing."""
    # One byte more than a head has tells it from the beginning of a value.
    answers = client.each(b"GETRANGE", names, b"0", b"%d" % HEAD_NBYTES, flight=flight)
    return [Head.read(said) if isinstance(said, bytes) else said for said in answers]


def lengths(client: Client, names: Sequence[bytes]) -> list[Reply | BackendError]:
    """The length of every value, 0 where there is none, or why that is not known."""
    answers = client.each(b"STRLEN", names)
    suspects = [at for at, nbytes in enumerate(answers) if nbytes == HEAD_NBYTES]
    if suspects:
        for at, head in zip(suspects, heads(client, [names[at] for at in suspects]), strict=True):
            if isinstance(head, Head):
                answers[at] = head.nbytes
    return answers


def remove(
    client: Client, names: Sequence[bytes], flight: Flight | None = None
) -> list[Reply | BackendError]:
    """Unlink values and their parts; the answers for the values themselves."""
    found = heads(client, names, flight)
    answers = client.each(b"UNLINK", names, flight=flight)
    parts = [
        part
        for name, head in zip(names, found, strict=True)
        if isinstance(head, Head)
        for part in head.names(name)
    ]
    if parts:
        client.each(b"UNLINK", parts, flight=flight)
    return answers


def _in_parts(client: Client, store: Store) -> bool:
    if store.nbytes == HEAD_NBYTES and Head.read(b"".join(store.parts)) is not None:
        return True
    return store.nbytes > client.part_nbytes


def _one(client: Client, verb: Any, name: bytes, item: Load | Store, flight: Flight) -> Any:
    results: list[Any] = []
    move(client, verb, client.place(name), [(0, name, item)], lambda _, it: results.append(it), flight)  # fmt: skip
    return results[0]


def _store(client: Client, name: bytes, store: Store, flight: Flight) -> Stored:
    if store.nbytes > client.part_nbytes * MOST_PARTS:
        return Stored.refused(f"{store.nbytes} bytes are more than {MOST_PARTS} parts")
    (there,) = client.each(b"STRLEN", [name], flight=flight)
    if isinstance(there, int) and there:
        return PRESENT  # asked first: the parts would be sent for nothing
    head = Head(client.random.randbytes(16), client.part_nbytes, store.nbytes)
    written: list[bytes] = []
    result = _write(client, name, store, head, written, flight)
    if result.status is not StoreStatus.STORED and written and not flight.abandoned:
        client.each(b"UNLINK", written, flight=flight)
    return result


def _write(
    client: Client, name: bytes, store: Store, head: Head, written: list[bytes], flight: Flight
) -> Stored:
    """Put parts and head there; what ``written`` names in the end is of no use without the head."""
    start = 0
    for part, nbytes in zip(head.names(name), head.lengths, strict=True):
        piece = Store(store.key, section(store.parts, start, nbytes), UNREACHED_S)
        result: Stored = _one(client, STORING, part, piece, flight)
        if result.status is StoreStatus.PRESENT:
            return Stored.failed(Unavailable(f"{part!r} is somebody else's", operation="store"))
        if result.status is not StoreStatus.STORED:
            return result
        written.append(part)
        start += nbytes
    place = Store(store.key, (memoryview(head.encoded),), store.ttl)
    result = _one(client, STORING, name, place, flight)
    if result.status is not StoreStatus.STORED:
        return result
    # Now they can be reached, and stay as long as the head, which began a moment earlier.
    stay: tuple[bytes, ...] = (b"PERSIST",)
    if store.ttl is not None:
        stay = b"PEXPIRE", b"%d" % max(1, round(store.ttl * 1000))
    kept = client.each(stay[0], written, *stay[1:], flight=flight)
    lost = [answer for answer in kept if answer != 1]
    if not lost:
        return result
    client.each(b"UNLINK", [name], flight=flight)
    if isinstance(lost[0], BackendError):
        return Stored.failed(lost[0])
    if isinstance(lost[0], Said):
        return judge_store(lost[0])
    return Stored.refused("full: the server evicted a part before the last one had come")


def _load(client: Client, name: bytes, load: Load, flight: Flight) -> Loaded:
    (head,) = heads(client, [name], flight)
    if isinstance(head, BackendError):
        return Loaded.failed(head)
    if not isinstance(head, Head):  # a value as long as a head, or gone meanwhile
        result: Loaded = _one(client, PLAIN, name, load, flight)
        return result
    wanted = head.nbytes - load.offset if load.length is None else load.length
    if not 0 <= load.offset <= load.offset + wanted <= head.nbytes:
        asked = f"{wanted} bytes from {load.offset}"
        return Loaded.failed(Corrupt(f"{load.key!r} has {head.nbytes} bytes, asked for {asked}"))
    if wanted > load.room:
        needs = f"{load.key!r} needs {wanted} bytes, the buffers have {load.room}"
        return Loaded.failed(BufferTooSmall(needs, operation="load"))
    names = head.names(name)
    there = client.each(b"STRLEN", names, flight=flight)
    for answer in there:
        if isinstance(answer, BackendError):
            return Loaded.failed(answer)
        if isinstance(answer, Said) and answer.code != "WRONGTYPE":
            return Loaded.failed(answer.unavailable("load"))
    if there != head.lengths:  # evicted, or not ours: the rest is of no use to anybody
        remove(client, [name], flight)
        return MISSED
    return _read(client, load, wanted, head, names, flight)


def _read(
    client: Client, load: Load, wanted: int, head: Head, names: Sequence[bytes], flight: Flight
) -> Loaded:
    start, end, done = load.offset, load.offset + wanted, 0
    for number, (part, nbytes) in enumerate(zip(names, head.lengths, strict=True)):
        before = number * head.part_nbytes
        first, last = max(start, before), min(end, before + nbytes)
        if first >= last:
            continue
        views = section(load.into, done, last - first)
        span = (0, None) if last - first == nbytes else (first - before, last - first)
        result: Loaded = _one(client, PLAIN, part, Load(load.key, views, *span), flight)
        if isinstance(result.error, Unavailable):
            return result
        if result.nbytes != last - first:
            gone = Unavailable(f"{load.key!r}: a part went meanwhile", operation="load")
            return Loaded.failed(gone)
        done += last - first
    return Loaded.filled(wanted)
