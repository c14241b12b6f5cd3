"""A target: memory of this node that tiers of other nodes keep values in.

Values live in one registered block, in order of their last use; the oldest that nobody reads leave for new ones. A value
appears when its writer commits it, after this side has read it from the writer's memory. What a reader was told stays in place
until it says that it has finished, or its connection ends; nobody ever writes into this memory but this process.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_backend_nixl.agent import Agent, Piece
from lmcache_backend_nixl.memory import Staging
from lmcache_backend_nixl.wire import VERSION, Unpacker, pack
from lmcache_core import ops
from lmcache_core.spi import BackendError, MemoryKind, Region, Unavailable

log = logging.getLogger("lmcache.nixl-target")
PIECE = 1 << 18
AT_ONCE = 32
"""Most transfers that run at the same time."""
TOGETHER = 4 << 20
"""Longest transfer that is made of several reads."""
TURN_S = 0.002
"""How long reads are begun, which may be all of a read, before others are heard; what they hear goes out together."""
BUSY_S, IDLE_S = 0.0001, 0.02
EAGER = 2000
"""So many looks at reads under way before each further one waits."""


@dataclass(slots=True, eq=False)
class Value:
    """Bytes ``[room[0], room[0] + nbytes)`` of the block."""

    room: Piece
    nbytes: int
    readers: int = 0
    gone: bool = False


@dataclass(slots=True, eq=False)
class Ticket:
    """A value on its way: kept by the connection that writes it, and by reads that run."""

    name: str
    first: bool
    value: Value
    reads: int = 0
    dropped: bool = False


@dataclass(slots=True, eq=False)
class Tier:
    """The other side of one connection."""

    writer: asyncio.StreamWriter
    agent: str = ""
    leases: dict[int, Value] = field(default_factory=dict)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    answers: list[Any] = field(default_factory=list)
    reads: int = 0
    ended: bool = False

    def answer(self, number: int, *answer: Any) -> None:
        """Send an answer, together with those of the same turn of the loop."""
        if not self.answers:
            asyncio.get_running_loop().call_soon(self._flush)
        self.answers.append([number, *answer])

    def _flush(self) -> None:
        answers, self.answers = self.answers, []
        if answers and not self.ended:
            self.writer.write(pack(answers))


@dataclass(slots=True, eq=False)
class Read:
    """Something to read from the memory of a tier."""

    tier: Tier
    number: int
    ticket: Ticket
    pieces: Sequence[Piece]
    at: int
    answer: tuple[Any, ...] = ("",)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.pieces)


class Target:
    """The memory, and who uses it. One event loop does everything.

    Args:
        plugin: the NIXL plugin, and ``params`` for it.
        token: what a tier must show; empty for none.
    """

    def __init__(
        self,
        nbytes: int,
        plugin: str = "UCX",
        params: dict[str, str] | None = None,
        /,
        *,
        token: str = "",
    ) -> None:
        self.plugin, self._token = plugin, token
        self._block = Staging(nbytes)
        self._values: OrderedDict[str, Value] = OrderedDict()
        self._used = 0
        self._numbers = 0
        self._leases = 0
        self._agents: set[str] = set()
        self._waiting: deque[Read] = deque()
        self._reading: asyncio.Task[None] | None = None
        name = f"target-{os.getpid():x}-{secrets.token_hex(8)}"
        self.agent = Agent(name, plugin, params or {})
        self.agent.add(Region(MemoryKind.HOST, 0, self._block.at, self._block.nbytes))

    async def serve(self, host: str, port: int, /) -> asyncio.Server:
        self._going = asyncio.create_task(self._go_on())
        self._populating = asyncio.create_task(asyncio.to_thread(ops.populate, self._block.view))
        return await asyncio.start_server(self._tier, host, port)

    async def _go_on(self) -> None:
        """Let tiers go on with what they read; often while somebody reads, else to keep connections."""
        while True:
            self.agent.progress()
            await asyncio.sleep(BUSY_S if self._leases else IDLE_S)

    async def _tier(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tier, unpacker = Tier(writer), Unpacker()
        try:
            while data := await reader.read(PIECE):
                for number, verb, *arguments in unpacker.feed(data):
                    if verb != "hello" and not tier.agent:
                        raise ValueError("no hello")
                    getattr(self, f"_on_{verb}")(tier, number, *arguments)
                await writer.drain()
        except OSError:
            pass  # gone
        except (ValueError, TypeError, AttributeError, KeyError, BackendError) as error:
            log.warning("a tier that does not speak our language is sent away: %r", error)
        finally:
            self._end(tier)
            writer.close()

    def _end(self, tier: Tier) -> None:
        tier.ended = True
        for value in tier.leases.values():
            self._free(value)
            self._leases -= 1
        for ticket in tier.tickets.values():
            self._drop(ticket)
        tier.leases.clear()
        tier.tickets.clear()
        self._part(tier)

    def _part(self, tier: Tier) -> None:
        if tier.ended and not tier.reads and tier.agent in self._agents:
            self._agents.discard(tier.agent)
            self.agent.part(tier.agent)

    # -- memory --------------------------------------------------------------------------------------------

    def _take(self, nbytes: int) -> Piece | None:
        """Room, for which the oldest values that nobody reads leave."""
        while (room := self._block.take(nbytes)) is None:
            oldest = next((n for n, value in self._values.items() if not value.readers), None)
            if oldest is None:
                return None
            self._forget(oldest)
        self._used += room[1]
        return room

    def _forget(self, name: str) -> bool:
        value = self._values.pop(name, None)
        if value is None:
            return False
        value.gone = True
        if not value.readers:
            self._give(value)
        return True

    def _give(self, value: Value) -> None:
        self._used -= value.room[1]
        self._block.give(value.room)

    def _free(self, value: Value) -> None:
        value.readers -= 1
        if value.gone and not value.readers:
            self._give(value)

    def _drop(self, ticket: Ticket) -> None:
        ticket.dropped = True
        if not ticket.reads:
            self._give(ticket.value)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    # -- what tiers say ------------------------------------------------------------------------------------

    def _on_hello(
        self,
        tier: Tier,
        number: int,
        version: int,
        token: str,
        agent: str,
        plugin: str,
        about: bytes,
    ) -> None:
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            tier.answer(number, "refused", "wrong token")
        elif version != VERSION:
            tier.answer(number, "refused", f"it speaks version {VERSION}, this tier {version}")
        elif plugin not in ("", self.plugin):
            tier.answer(number, "refused", f"it lends memory by {self.plugin}, not by {plugin}")
        elif agent in self._agents:
            tier.answer(number, "refused", f"an agent of this name is here already: {agent}")
        else:
            if agent:
                self._agents.add(agent)
                self.agent.meet(about)
            tier.agent = agent or "-"
            tier.answer(number, "welcome", self.agent.name, self.agent.describe() if agent else b"")

    def _on_memory(self, tier: Tier, number: int, about: bytes) -> None:
        self.agent.meet(about)

    def _on_look(self, tier: Tier, number: int, names: list[str]) -> None:
        found = [self._values.get(name) for name in names]
        tier.answer(number, [None if value is None else value.nbytes for value in found])

    def _on_load(self, tier: Tier, number: int, name: str) -> None:
        value = self._values.get(name)
        if value is None:
            tier.answer(number, None, 0, 0)
            return
        self._values.move_to_end(name)
        value.readers += 1
        self._leases += 1
        lease = self._number()
        tier.leases[lease] = value
        tier.answer(number, value.nbytes, self._block.at + value.room[0], lease)

    def _on_free(self, tier: Tier, number: int, lease: int) -> None:
        value = tier.leases.pop(lease, None)
        if value is not None:
            self._free(value)
            self._leases -= 1
        tier.answer(number, value is not None)

    def _on_store(
        self, tier: Tier, number: int, name: str, nbytes: int, first: bool, pieces: list[Piece]
    ) -> None:
        if first and name in self._values:
            tier.answer(number, "present", 0)
        elif nbytes > self._block.nbytes:
            tier.answer(number, "refused", f"too large: it lends {self._block.nbytes} bytes")
        elif (room := self._take(nbytes)) is None:
            tier.answer(number, "refused", "full: nothing may leave")
        else:
            ticket = self._number()
            tier.tickets[ticket] = found = Ticket(name, first, Value(room, nbytes))
            if pieces:  # answered when they have been read
                self._pull(Read(tier, number, found, pieces, 0, ("ticket", ticket)))
            else:
                tier.answer(number, "ticket", ticket)

    def _on_pull(self, tier: Tier, number: int, ticket: int, at: int, pieces: list[Piece]) -> None:
        self._pull(Read(tier, number, tier.tickets[ticket], pieces, at))

    def _pull(self, read: Read) -> None:
        end = read.at + read.nbytes
        if not 0 <= read.at <= end <= read.ticket.value.nbytes:
            raise ValueError("past the end of the value")
        read.ticket.reads += 1
        read.tier.reads += 1
        self._waiting.append(read)
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())

    def _on_commit(self, tier: Tier, number: int, ticket: int) -> None:
        found = tier.tickets.pop(ticket)
        if found.reads:
            raise ValueError("committed before it was read")
        if found.first and found.name in self._values:
            self._give(found.value)
            tier.answer(number, False)
            return
        self._forget(found.name)
        self._values[found.name] = found.value
        tier.answer(number, True)

    def _on_drop(self, tier: Tier, number: int, ticket: int) -> None:
        if (found := tier.tickets.pop(ticket, None)) is not None:
            self._drop(found)

    def _on_delete(self, tier: Tier, number: int, names: list[str]) -> None:
        tier.answer(number, [self._forget(name) for name in names])

    def _on_list(self, tier: Tier, number: int, after: str, limit: int) -> None:
        names = sorted(name for name in self._values if name > after)[:limit]
        tier.answer(number, [(name, self._values[name].nbytes) for name in names])

    def _on_usage(self, tier: Tier, number: int) -> None:
        tier.answer(number, self._used, len(self._values), self._block.nbytes)

    # -- reads ---------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        running: list[tuple[list[Read], Any]] = []
        looks = 0
        while self._waiting or running:
            turn = time.monotonic() + TURN_S
            while self._waiting and len(running) < AT_ONCE:
                reads, looks = self._next(), 0
                handle = self._begin(reads)
                if handle is not None and not self._look(reads, handle):
                    running.append((reads, handle))
                if time.monotonic() > turn:
                    break
            count = len(running)
            running = [each for each in running if not self._look(*each)]
            if running:
                self.agent.progress()
            looks = 0 if len(running) < count else looks + 1
            await asyncio.sleep(0 if looks < EAGER else 0.0005)
        self._reading = None

    def _next(self) -> list[Read]:
        """Reads from one tier that begin together, because each transfer has its cost."""
        waiting = self._waiting
        reads = [waiting.popleft()]
        nbytes = reads[0].nbytes
        while waiting and waiting[0].tier is reads[0].tier:
            nbytes += waiting[0].nbytes
            if nbytes > TOGETHER:
                break
            reads.append(waiting.popleft())
        return reads

    def _begin(self, reads: list[Read]) -> Any:
        if reads[0].tier.ended:
            return self._end_all(reads, "the tier is gone")
        own: list[Piece] = []
        for read in reads:
            at = self._block.at + read.ticket.value.room[0] + read.at
            for _, nbytes in read.pieces:
                own.append((at, nbytes))
                at += nbytes
        places = [(start, nbytes, 0) for read in reads for start, nbytes in read.pieces]
        try:
            return self.agent.post("READ", own, "DRAM", places, reads[0].tier.agent)
        except Unavailable as error:
            return self._end_all(reads, str(error))

    def _look(self, reads: list[Read], handle: Any) -> bool:
        problem = ""
        try:
            if not self.agent.ended(handle):
                return False
        except Unavailable as error:
            problem = str(error)
        self._end_all(reads, problem)
        return True

    def _end_all(self, reads: list[Read], problem: str) -> None:
        for read in reads:
            self._finish(read, problem)

    def _finish(self, read: Read, problem: str) -> None:
        tier, ticket = read.tier, read.ticket
        ticket.reads -= 1
        tier.reads -= 1
        if ticket.dropped and not ticket.reads:
            self._give(ticket.value)
        if tier.ended:
            self._part(tier)
        elif not problem:
            tier.answer(read.number, *read.answer)
        elif len(read.answer) == 1:
            tier.answer(read.number, problem)
        else:
            self._on_drop(tier, 0, read.answer[1])
            tier.answer(read.number, "refused", problem)
