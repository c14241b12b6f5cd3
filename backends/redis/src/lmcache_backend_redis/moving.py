"""Values over one connection, one after another, the next always under way before the last has arrived."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lmcache_backend_redis.client import HOPS, Address, Client, Flight
from lmcache_backend_redis.heads import HEAD_NBYTES
from lmcache_backend_redis.resp import Link, Said, command
from lmcache_core.spi import (
    MISSED,
    PRESENT,
    STORED,
    BackendError,
    BufferTooSmall,
    Corrupt,
    Load,
    Loaded,
    Store,
    Stored,
)

WINDOW = 2
"""Commands under way: the server prepares a reply while another is read. More only fill its buffers.

Loads over a unix socket go one at a time. It holds less than a reply, so the server would prepare the next one in the middle
of this one, whose rest then leaves the processor's cache.
"""
REFUSALS = {
    "OOM": "full",
    "READONLY": "read-only",
    "MISCONF": "the server cannot save",
    "NOREPLICAS": "too few replicas",
    "NOPERM": "not allowed",
}
"""First words of replies that decline a store."""

A_HEAD = object()
"""In place of a ``Loaded``: what is there is as long as a head, and was not taken."""
Item = tuple[int, bytes, Any]
"""Its place in the batch, its name in the store, and a ``Load`` or ``Store``."""
Tell = Callable[[int, Any], None]


@dataclass(frozen=True, slots=True)
class Verb:
    """How one verb is spoken.

    Attributes:
        send: put the command for an item on the connection.
        read: take the reply and make the result; an error reply is returned.
        failed: result of an item with an error.
        judge: result of an error reply.
    """

    operation: str
    send: Callable[[Link, bytes, Any], None]
    read: Callable[[Link, Any], Any]
    failed: Callable[[BackendError], Any]
    judge: Callable[[Said], Any]


def move(
    client: Client, verb: Verb, address: Address, items: Sequence[Item], tell: Tell, flight: Flight,
    hops: int = HOPS, asking: bool = False,
) -> None:  # fmt: skip
    """Move items on one node and tell each one's result; what the node redirects goes on elsewhere."""
    left = deque(items)
    elsewhere: dict[tuple[Address, bool], list[Item]] = defaultdict(list)
    try:
        with client.link(address, flight) as link:
            if verb is STORING and not asking:
                left = deque(_absent(link, left, tell))
            ahead = deque(left)
            window = 1 if asking or (link.unix and verb.operation == "load") else WINDOW
            while left:
                while ahead and len(left) - len(ahead) < window:
                    flight.board()
                    _, name, item = ahead.popleft()
                    if asking:
                        link.send(command(b"ASKING"))
                        link.reply()
                    verb.send(link, name, item)
                result = verb.read(link, left[0][2])
                if isinstance(result, Said):
                    if result.code in ("MOVED", "ASK") and hops:
                        there = client.redirected(result)
                        elsewhere[there, result.code == "ASK"].append(left.popleft())
                        continue
                    if result.code == "READONLY":  # a master that has become a replica
                        client.forget(address)
                        link.keep = False
                    result = verb.judge(result)
                tell(left.popleft()[0], result)
    except BackendError as error:
        for at, _, _ in left:
            tell(at, verb.failed(error))
        if not flight.abandoned:
            client.find_elsewhere(address)
    for (there, ask), group in elsewhere.items():
        move(client, verb, there, group, tell, flight, hops - 1, ask)


def _absent(link: Link, items: Sequence[Item], tell: Tell) -> list[Item]:
    """Items whose keys are not there: asking costs little beside sending a value for nothing."""
    link.send(b"".join(command(b"STRLEN", name) for _, name, _ in items))
    lengths = [link.reply() for _ in items]
    absent = []
    for item, nbytes in zip(items, lengths, strict=True):
        if isinstance(nbytes, int) and nbytes > 0:
            tell(item[0], PRESENT)
        else:
            absent.append(item)
    return absent


def _send_load(link: Link, name: bytes, load: Load) -> None:
    if not load.offset and load.length is None:
        link.send(command(b"GET", name))
        return
    # The length tells what the range alone cannot: absent, or shorter than the reader thinks.
    room = load.room if load.length is None else min(load.length, load.room)
    first, last = (load.offset, load.offset + room - 1) if room else (1, 0)
    part = command(b"GETRANGE", name, b"%d" % first, b"%d" % last)
    link.send(command(b"STRLEN", name) + part)


def _read_load(link: Link, load: Load, head: int = HEAD_NBYTES) -> Any:
    if load.offset or load.length is not None:
        return _read_part(link, load, head)
    nbytes = link.bulk()
    if isinstance(nbytes, Said):
        return nbytes
    if not nbytes:
        if nbytes == 0:
            link.discard(0)
        return MISSED
    if nbytes == head:
        link.discard(nbytes)
        return A_HEAD
    return _take(link, load, nbytes, nbytes)


def _read_part(link: Link, load: Load, head: int) -> Any:
    whole, nbytes = link.reply(), link.bulk()
    if isinstance(whole, Said) or isinstance(nbytes, Said):
        if not isinstance(nbytes, Said):
            link.discard(nbytes or 0)
        return whole if isinstance(whole, Said) else nbytes
    nbytes = nbytes or 0
    if not isinstance(whole, int) or not whole:
        link.discard(nbytes)
        return MISSED
    if whole == head:
        link.discard(nbytes)
        return A_HEAD
    wanted = whole - load.offset if load.length is None else load.length
    if not 0 <= load.offset <= load.offset + wanted <= whole:
        link.discard(nbytes)
        asked = f"{wanted} bytes from {load.offset}"
        return Loaded.failed(Corrupt(f"{load.key!r} has {whole} bytes, asked for {asked}"))
    return _take(link, load, nbytes, wanted)


def _take(link: Link, load: Load, nbytes: int, wanted: int) -> Loaded:
    """Put a bulk of ``nbytes`` into the buffers if it is what was asked for and fits."""
    if wanted > load.room:
        link.discard(nbytes)
        needs = f"{load.key!r} needs {wanted} bytes, the buffers have {load.room}"
        return Loaded.failed(BufferTooSmall(needs, operation="load"))
    if nbytes != wanted:  # it was replaced or removed between the two replies
        link.discard(nbytes)
        return MISSED
    views, left = [], nbytes
    for view in load.into:
        views.append(view[:left])
        left -= views[-1].nbytes
    link.fill(views)
    return Loaded.filled(nbytes)


def _judge_load(said: Said) -> Loaded:
    if said.code == "WRONGTYPE":
        return Loaded.failed(Corrupt(f"what is there is no value: {said.text}", operation="load"))
    return Loaded.failed(said.unavailable("load"))


def _send_store(link: Link, name: bytes, store: Store) -> None:
    how = [b"NX"]
    if store.ttl is not None:
        how += [b"PX", b"%d" % max(1, round(store.ttl * 1000))]
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (
        3 + len(how), len(name), name, store.nbytes,
    )  # fmt: skip
    tail = b"\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in how)
    link.send(head, *store.parts, tail)


def _read_store(link: Link, store: Store) -> Stored | Said:
    reply = link.reply()
    if isinstance(reply, Said):
        return reply
    return PRESENT if reply is None else STORED


def judge_store(said: Said) -> Stored:
    if said.code in REFUSALS:
        return Stored.refused(f"{REFUSALS[said.code]}: {said.text}")
    return Stored.failed(said.unavailable("store"))


LOADING = Verb("load", _send_load, _read_load, Loaded.failed, _judge_load)
STORING = Verb("store", _send_store, _read_store, Stored.failed, judge_store)
PLAIN = replace(LOADING, read=partial(_read_load, head=-1))
"""Loads what is there, also where that is as long as a head."""
VERBS = {"load": LOADING, "store": STORING}
