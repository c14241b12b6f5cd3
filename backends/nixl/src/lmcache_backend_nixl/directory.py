"""Where targets are found by name: records in etcd, by its JSON gateway.

A target keeps one record there, with a lease that ends soon after the target has: its address, its agent, and the agent's
metadata. NIXL's own exchange through etcd is not used, because a silent etcd must cost no more than the timeout.
"""

from __future__ import annotations

import asyncio
import logging
import time
from http.client import HTTPConnection, HTTPException
from typing import Any

import msgspec

from lmcache_backend_nixl.config import ADDRESS, ETCD
from lmcache_core.spi import Unavailable

log = logging.getLogger("lmcache.nixl-target")
PREFIX = "lmcache/nixl-target/"
TTL_S = 15
LONGEST = 4 << 20
PIECE = 1 << 16


class Record(msgspec.Struct, frozen=True):
    """What a target says of itself: ``HOST:PORT``, the name of its agent, and what that gives to reach its memory."""

    address: str
    agent: str
    about: bytes

    @property
    def host(self) -> tuple[str, int]:
        match = ADDRESS.fullmatch(self.address)
        assert match is not None, "checked when it was found"
        return match[2].strip("[]"), int(match[3])


class _Pair(msgspec.Struct):
    value: bytes = b""
    lease: str = "0"


class _Kept(msgspec.Struct):
    TTL: str = "0"


class _Answer(msgspec.Struct):
    """Of any verb; bytes are in base 64 on the wire, and numbers text."""

    kvs: list[_Pair] = []
    ID: str = ""
    result: _Kept = msgspec.field(default_factory=_Kept)


class Directory:
    """One name in etcd. A call ends within ``timeout`` seconds, over all members that it asks.

    Args:
        url: ``etcd://HOST:PORT[,HOST:PORT...]/NAME``.

    Raises (from the methods):
        Unavailable: no member answers, or not as etcd does; one line.
    """

    def __init__(self, url: str, timeout: float) -> None:
        match = ETCD.fullmatch(url)
        assert match is not None, "checked before"
        self.name = match[2]
        self._members = match[1].split(",")
        self._key = f"{PREFIX}{match[2]}".encode()
        self._timeout = timeout

    def find(self) -> Record:
        """The record of the target.

        Raises:
            Unavailable: there is none, too, or it is nothing that a target writes.
        """
        found = self._ask("kv/range", key=self._key).kvs
        if not found:
            raise Unavailable(f"etcd {self._members[0]} knows no target {self.name}")
        try:
            record = msgspec.msgpack.decode(found[0].value, type=Record)
        except msgspec.DecodeError:
            record = Record("", "", b"")
        if not ADDRESS.fullmatch(record.address):
            raise Unavailable(f"etcd {self._members[0]} has no target's record at {self.name}")
        return record

    def announce(self, record: Record, lease: str) -> str:
        """Keep the record for another ``TTL_S``; call it again well before that, with the lease that it gave.

        A name belongs to who took it last: the first call (with an empty lease) takes it.

        Raises:
            Unavailable: another target has taken the name, too.
        """
        if lease:
            kept = self._ask("lease/keepalive", ID=lease).result.TTL != "0"
            found = self._ask("kv/range", key=self._key).kvs
            if found and found[0].lease != lease:
                raise Unavailable(f"etcd: another target is called {self.name} now")
            if kept and found:
                return lease
        lease = self._ask("lease/grant", TTL=TTL_S).ID
        value = msgspec.msgpack.encode(record)
        self._ask("kv/put", key=self._key, value=value, lease=lease)
        return lease

    async def keep(self, record: Record) -> None:
        """Keep the record for as long as this runs; what is in the way, and its end, is told once."""
        lease = before = ""
        while True:
            problem = ""
            try:
                lease = await asyncio.to_thread(self.announce, record, lease)
            except Unavailable as error:
                problem = str(error)
            if problem != before:
                log.warning("%s", problem or f"announced again as {self.name}")
            before = problem
            await asyncio.sleep(1.0 if problem else TTL_S / 3)

    def _ask(self, verb: str, **said: Any) -> _Answer:
        problem, end = "", time.monotonic() + self._timeout
        for number, member in enumerate(self._members):
            share = (end - time.monotonic()) / (len(self._members) - number)
            try:
                body = self._post(member, f"/v3/{verb}", msgspec.json.encode(said), share)
                return msgspec.json.decode(body, type=_Answer)
            except (OSError, HTTPException, msgspec.DecodeError) as error:
                problem = " ".join(f"etcd {member}: {str(error) or type(error).__name__}".split())[
                    :200
                ]
        raise Unavailable(problem)

    def _post(self, member: str, path: str, body: bytes, timeout: float) -> bytes:
        end = time.monotonic() + timeout
        host, _, port = member.rpartition(":")
        connection = HTTPConnection(host.strip("[]"), int(port), timeout=max(timeout, 0.001))
        try:
            connection.request("POST", path, body)
            line = connection.sock
            response = connection.getresponse()
            answer = b""
            while piece := response.read1(PIECE):
                answer += piece
                if len(answer) > LONGEST or time.monotonic() > end:
                    raise TimeoutError("its answer does not end")
                line.settimeout(max(end - time.monotonic(), 0.001))
            if response.status != 200:
                raise OSError(f"{response.status} {answer[:100].decode(errors='replace')}")
            return answer
        finally:
            connection.close()
