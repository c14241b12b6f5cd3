"""One connection on the daemon's loop: frames in, replies out, values streamed straight from and to the arena.

Nothing here waits. What cannot be sent at once is kept and the connection is not read until it is gone; a
client that sends faster than it reads only stops itself.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_core.spi.errors import BackendError, Closed, ConfigError
from lmcache_core.wire import records, replies
from lmcache_core.wire.codec import LENGTH, DecodeError, Notice, Reply, decode_request, frame
from lmcache_core.wire.link import peer, tune
from lmcache_core.wire.tls import accept
from lmcache_server.greeting import greet
from lmcache_server.session import Session

if TYPE_CHECKING:
    from lmcache_server.daemon import Daemon

_ROOM = 1 << 16
_SLICE = 1 << 20
"""Most raw bytes moved before other connections get their turn."""
_TURN = 0.0003
"""Seconds after which other connections get theirs before the next request of this one."""
_MOST_WAITING = 64  # requests of one connection that wait for a tier at once
_HELLO_S = 10.0
_TLS_HELLO = 0x0316
"""How TLS begins, read as a length."""
_MOST_HELLO = 4096
"""Longest frame before the hello was accepted."""


class Connection:
    """See the module.

    Args:
        local: over the unix socket.
    """

    def __init__(self, daemon: Daemon, sock: Any, *, local: bool) -> None:
        self.daemon = daemon
        self.local = local
        self.session: Session | None = None
        self.peer = ""
        self.socket = sock
        self._loop = daemon.loop
        self.pid = 0
        self.pidfds: list[int] = []
        self.pending: Session | None = None
        self.challenge = b""
        self._buffer = bytearray(_ROOM)
        self._begin = self._end = 0
        self._out: deque[memoryview] = deque()
        self._sent: deque[tuple[int, Callable[[], None]]] = deque()
        self._queued = self._gone_out = 0
        self._into: memoryview | None = None
        self._later: Iterator[memoryview] = iter(())
        self._filled: Callable[[bool], None] | None = None
        self._waiting = 0
        self._reading = self._writing = self._resting = False
        self._pending: Callable[[], int] | None = None
        self.closed = False
        sock.setblocking(False)
        if local:
            self.pid, uid = peer(sock)
            self.peer = f"pid {self.pid}"
            if uid != os.geteuid():
                daemon.refuse(self.peer, f"user {uid} is not {os.geteuid()}")
                self.closed = True
                sock.close()
                return
        else:
            self.peer = sock.getpeername()[0]
            tune(sock)
            if daemon.tls is not None:
                self.socket = accept(daemon.tls, sock)
                self._pending = self.socket.pending
        daemon.connections.add(self)
        self.overdue = self._loop.call_later(_HELLO_S, self._overdue)
        self._read(True)

    # -- in ------------------------------------------------------------------------------------------------

    def _read(self, on: bool) -> None:
        if on != self._reading and not self.closed:
            self._reading = on
            if on:
                self._loop.add_reader(self.socket.fileno(), self._readable)
            else:
                self._loop.remove_reader(self.socket.fileno())

    def _readable(self) -> None:
        if self.closed or not self._reading:
            return
        self._guarded(self._fill if self._into else self._receive)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do something with what a peer has sent; a peer that breaks the protocol loses the connection."""
        try:
            work()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            if error.errno == errno.EPROTO:
                self.daemon.refuse(self.peer, str(error.strerror))
                self.socket.refuse()
            self.close()
        except (DecodeError, ValueError, struct.error) as error:
            self.daemon.refuse(self.peer, f"not understood: {error}")
            self.close()
        except Exception:
            self.daemon.log.exception("a request of %s failed", self.session or self.peer)
            self.close()
        if self._pending is not None and self._reading and self._pending():
            self._loop.call_soon(self._readable)  # the descriptor does not tell of it

    def _overdue(self) -> None:
        """Nobody keeps a connection without saying hello."""
        if self.session is None and not self.closed:
            self.daemon.refuse(self.peer, f"no hello within {_HELLO_S:g} s")
            self.close()

    def _receive(self) -> None:
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == len(self._buffer):
            left = self._end - self._begin
            self._buffer[:left] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, left
        with memoryview(self._buffer) as view, view[self._end :] as room:
            if self.session is None and self.local:
                space = socket.CMSG_SPACE(16)
                got, extra, _, _ = self.socket.recvmsg_into([room], space)
                for level, kind, data in extra:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        self.pidfds += struct.unpack(f"{len(data) // 4}i", data[: len(data) & ~3])
                while len(self.pidfds) > 1:  # it has one process
                    os.close(self.pidfds.pop())
            else:
                got = self.socket.recv_into(room)
        if not got:
            self.close()
            return
        self._end += got
        self._parse()

    def _parse(self) -> None:
        """Handle the whole frames that are there, as many as others can wait for."""
        until = time.perf_counter() + _TURN
        ended: list[records.Release] = []
        try:
            while not self.closed and not self._into and self._waiting < _MOST_WAITING:
                record = self._next()
                if record is None:
                    break
                more = self._begin < self._end
                if type(record) is records.Release and more and self.session is not None:
                    ended.append(record)  # nobody waits for its effect, but for the next answer
                    continue
                if ended and (type(record) is not records.Load or self.daemon.crowded()):
                    self._release(ended)
                self._handle(record)
                if more and time.perf_counter() > until:
                    self._rest()
                    break
        finally:
            self._release(ended)
        # Not read before its next turn: it would have two in each, then three.
        self._read(not self._resting and self._waiting < _MOST_WAITING and not self._queued_much())

    def _rest(self) -> None:
        """Go on in the next turn."""
        if not self._resting:
            self._resting = True
            self._loop.call_soon(self._guarded, self._parse_on)

    def _parse_on(self) -> None:
        self._resting = False
        self._parse()

    def _next(self) -> records.Record | None:
        """The next frame, if all of it is there."""
        have = self._end - self._begin
        if have < LENGTH.size:
            return None
        (nbytes,) = LENGTH.unpack_from(self._buffer, self._begin)
        if nbytes > (_MOST_HELLO if self.session is None else records.MOST_FRAME):
            tls = nbytes & 0xFFFF == _TLS_HELLO
            raise ValueError("TLS where none is served" if tls else f"a frame of {nbytes} bytes")
        if have < LENGTH.size + nbytes:
            if len(self._buffer) - self._begin < LENGTH.size + nbytes:
                self._buffer.extend(bytes(LENGTH.size + nbytes))
            return None
        begin = self._begin + LENGTH.size
        self._begin = begin + nbytes
        with memoryview(self._buffer) as view, view[begin : self._begin] as body:
            return decode_request(body)

    def _release(self, ended: list[records.Release]) -> None:
        while ended:
            self._handle(ended.pop(0))

    def _queued_much(self) -> bool:
        return self._queued - self._gone_out > _SLICE

    def _handle(self, record: records.Record) -> None:
        if self.session is None:
            greet(self, record)
            return
        try:
            answer = self.daemon.handle(self, self.session, record)
        except (ConfigError, BackendError) as error:
            assert isinstance(record, records.Message)
            self.reply(replies.Failed(record.id, kind_of(error), str(error)[:1000]))
            return
        if answer is None:
            return
        if isinstance(answer, records.Message):
            self.reply(answer)
            return
        assert isinstance(record, records.Message)
        self._waiting += 1
        self.daemon.work(self._answer(record.id, answer))

    async def _answer(self, id: int, answer: object) -> None:
        """Wait for a verb that needs other tiers, then reply."""
        try:
            reply = await answer  # type: ignore[misc]
        except (ConfigError, BackendError, ValueError) as error:
            reply = replies.Failed(id, kind_of(error), str(error)[:1000])
        except Exception as error:  # named boundary: nobody must wait for an answer in vain
            self.daemon.log.exception("a request of %s failed", self.session)
            reply = replies.Failed(id, "request", f"internal error: {type(error).__name__}")
        finally:
            self._waiting -= 1
        if reply is not None:
            self.reply(reply)
        if not self.closed and not self._reading:
            self._rest()

    def receive_values(self, into: Iterator[memoryview], done: Callable[[bool], None], /) -> None:
        """Read raw bytes that follow the record into memory, then go on; ``done(False)``: they never came.

        Args:
            into: asked for the next piece of memory when the one before is full.
        """
        self._later, self._filled = into, done
        self._next_value()
        while self._into and self._begin < self._end:
            take = min(self._into.nbytes, self._end - self._begin)
            self._into[:take] = memoryview(self._buffer)[self._begin : self._begin + take]
            self._begin += take
            self._advance(take)
        if not self._into:
            self._end_fill()

    def _fill(self) -> None:
        room = _SLICE
        while self._into and room > 0:
            try:
                got = self.socket.recv_into(self._into[:room])
            except (BlockingIOError, InterruptedError):
                return
            if not got:
                self.close()
                return
            room -= got
            self._advance(got)
        if not self._into:
            self._end_fill()
            self._parse()

    def _advance(self, nbytes: int) -> None:
        assert self._into is not None
        self._into = self._into[nbytes:]
        if not self._into:
            self._next_value()

    def _next_value(self) -> None:
        self._into = next((view for view in self._later if view.nbytes), None)

    def _end_fill(self) -> None:
        done, self._filled = self._filled, None
        if done is not None:
            done(True)

    # -- out -----------------------------------------------------------------------------------------------

    def reply(
        self,
        record: Reply | Notice,
        *,
        descriptors: Sequence[int] = (),
        values: Sequence[memoryview] = (),
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Send a record, raw bytes behind it; ``sent`` is called when all of it has left."""
        if self.closed:
            if sent is not None:
                sent()
            return
        data = memoryview(frame(record))
        if not self._out and not values:
            try:
                if descriptors:
                    rights = struct.pack(f"{len(descriptors)}i", *descriptors)
                    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                    data = data[self.socket.sendmsg([data], ancillary) :]
                else:
                    data = data[self.socket.send(data) :]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                self.close()
                return
            if not data:
                return
        for view in (data, *values):
            if view.nbytes:
                self._out.append(view)
                self._queued += view.nbytes
        if sent is not None:
            self._sent.append((self._queued, sent))
        if not self._writing:
            self._writing = True
            self._loop.add_writer(self.socket.fileno(), self._writable)

    def _left(self, count: int) -> None:
        """So many bytes have gone out."""
        self._gone_out += count
        view = self._out.popleft()
        if count < view.nbytes:
            self._out.appendleft(view[count:])

    def _writable(self) -> None:
        """Send until the kernel has enough, or others must have their turn."""
        room = _SLICE
        try:
            while self._out and room > 0:
                sent = self.socket.send(self._out[0][:room])
                room -= sent
                self._left(sent)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.close()
            return
        while self._sent and self._sent[0][0] <= self._gone_out:
            self._sent.popleft()[1]()
        if not self._out:
            self._writing = False
            self._loop.remove_writer(self.socket.fileno())
        if not self._reading and not self._resting and not self._queued_much():
            self._rest()

    def close(self) -> None:
        """End the connection; idempotent. What it holds is the session's business."""
        if self.closed:
            return
        self._read(False)
        if self._writing:
            self._loop.remove_writer(self.socket.fileno())
        self.closed = True
        self.overdue.cancel()
        self.socket.close()
        self._out.clear()
        self._into, self._later = None, iter(())
        if self._filled is not None:
            self._filled(False)
        while self._sent:
            self._sent.popleft()[1]()
        for descriptor in self.pidfds:
            os.close(descriptor)
        self.pidfds.clear()
        self.daemon.connections.discard(self)
        if self.session is not None:
            self.daemon.sessions.closed(self.session, self)


def kind_of(error: Exception) -> str:
    """What ``Failed.kind`` says of an error."""
    if isinstance(error, Closed):
        return "closed"
    return "config" if isinstance(error, ConfigError) else "request"
