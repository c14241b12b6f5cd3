"""Bugs drawn from what users met, one line each, planted into the product's own source: histories must find them all.

A line names the kind (as in the reports: COR wrong bytes, ORD reuse of memory, PAR ranks, MEM leaks, HANG, LIV
crashes, CAP limits, REM remote stores, LAY scheduling, OBS counters and events), where, what stands there and what the
bug makes of it.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from lmcache_backend_disk import backend as disk
from lmcache_backend_disk import opening
from lmcache_backend_disk.client import Root
from lmcache_server import verbs
from lmcache_server.connection import Connection
from lmcache_server.engines import Engines, Joint
from lmcache_server.session import Sessions

from lmcache_core import frame
from lmcache_core.engine.request import Request
from lmcache_core.memory.ledger import Ledger
from lmcache_core.memory.pool import Pool
from lmcache_core.storage import storing, upkeep
from lmcache_core.storage.holdings import Holdings
from lmcache_core.storage.loading import Loader
from lmcache_core.storage.serving import Serving
from lmcache_core.wire import client
from lmcache_core.wire.connection import Connections
from lmcache_core.wire.grants import Home
from lmcache_core.wire.link import Link
from lmcache_core.wrappers.metrics import Measured


@dataclass(frozen=True, slots=True)
class Bug:
    """One planted bug: in ``where.name`` the text ``old`` reads ``new``."""

    title: str
    kind: str
    where: Any
    name: str
    old: str
    new: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The product has this bug meanwhile."""
        found = getattr(self.where, self.name)
        source = textwrap.dedent(inspect.getsource(found))
        assert source.count(self.old) == 1, f"{self.title}: {self.old!r} is not there once"
        code = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        made: dict[str, Any] = {}
        exec(compile(code, f"<{self.title}>", "exec"), vars(sys.modules[found.__module__]), made)
        with patch.object(self.where, self.name, made[self.name]):
            yield


BUGS = (
    Bug("flipped byte accepted", "COR", frame, "verify_raw", "if have != want:", "if False:"),
    Bug("leases granted in another order", "COR", verbs, "pack", "leases.slots[:count]", "leases.slots[:count][::-1]"),
    Bug("early publish: one shard of two", "PAR", Joint, "fill", "len(self._filled) < self.engine.ranks or not all(self._digests)", "self._digests.__setitem__(slice(None), [each or digests[:DIGEST] for each in self._digests])"),
    Bug("torn stream committed", "COR", verbs, "_intact", "frame.intact(each.view, each.key, identity)", "True"),
    Bug("damaged reply is a hit", "COR", client, "take", "if not frame.intact(value, key, identity):", "if False:"),
    Bug("aborted reservation becomes visible", "COR", Ledger, "_show", "if held.state is not _RESERVED:", "if held.state is _DONE:"),
    Bug("wrong place in the engine's memory", "LAY", Request, "_copy", "surface.unpack(want.group, want.first,", "surface.unpack(want.group, max(0, want.first - 1),"),
    Bug("every token offered, none left to compute", "LAY", Request, "_reach", "min(self._offer.tokens, self.tokens - 1)", "self._offer.tokens"),
    Bug("hit with holes reported whole", "COR", Serving, "load", "if leases.left == len(keys) and done is None:", "if leases.left and done is None:"),
    Bug("memory handed on under a load in flight", "ORD", Pool, "quarantine", "self._isolate(", "self._end_held("),
    Bug("double release", "MEM", Ledger, "_end_leases", "left = leases[slot] - 1", "left = max(0, leases[slot] - 2)"),
    Bug("lease of a request never released", "MEM", Request, "end", "self._engine.client.release(offer.leases)", "pass"),
    Bug("session forgets to forget a lease", "MEM", Sessions, "release", "leases = session.leases.pop(grant, None)", "leases = session.leases.get(grant)"),
    Bug("aborted load keeps its memory", "MEM", Loader, "_land", "self._pool.abort(flight.reservation)", "pass"),
    Bug("lease ended by a lost connection", "LIV", Sessions, "closed", "proof=False", "proof=True"),
    Bug("memory of a dead process kept", "LIV", Sessions, "_end", "proof=True", "proof=False"),
    Bug("unfinished chunk outlives its ranks", "PAR", Engines, "ended", "Joint.drop", "id"),
    Bug("ended lease adopted by a rank", "ORD", Home, "adopt", "self.claimed or grant in self.over or grant <= self.floor", "False"),
    Bug("lease of a dead rank adopted by the next", "ORD", Home, "follow", "self.floor = granted", "pass"),
    Bug("leases for all ranks end when one has read", "ORD", Sessions, "undelivered", "max(1, ranks)", "1"),
    Bug("lease on its way to ranks reclaimed", "ORD", Sessions, "reclaim", "for grant, (owner, _) in self._unread.items() if owner is session", "for grant in ()"),
    Bug("stale boot id accepted", "ORD", Connections, "join", "(old.boot, old.session) == (welcome.boot, welcome.session)", "old.session"),
    Bug("lease of a dead daemon adopted in the next", "ORD", client.DaemonClient, "adopt", "each.boot == boot", "True"),
    Bug("recovery forgets a page", "PER", upkeep, "recover", "for key, found in page.values:", "for key, found in page.values[1:]:"),
    Bug("scan passes over what it cannot see at once", "PER", disk, "_status", "range(STUBBORN - 1)", "()"),
    Bug("name before its bytes are synced", "PER", Root, "_write", "if self._sync is not Sync.NONE:", "if False:"),
    Bug("acknowledged before the name is synced", "PER", Root, "_settle", "if self._sync is Sync.DURABLE:", "if False:"),
    Bug("leftovers of a dead writer kept", "PER", opening, "abandoned", "found.append(path)", "pass"),
    Bug("receive deadline not armed", "HANG", Link, "_arm", "micros = int(seconds * 1e6)", "micros = 0"),
    Bug("request without a reply", "HANG", Connection, "_answer", "if reply is not None:", "if reply is not None and id % 8:"),
    Bug("two replies to one request", "HANG", Connection, "_answer", "self.reply(reply)", "self.reply(reply), self.reply(reply)"),
    Bug("late reply taken for the next one's", "HANG", Link, "call", "elif said.id == self._id:", "elif said.id <= self._id:"),
    Bug("waiter forgotten when a load fails", "HANG", Loader, "_tell", "request.settle(at, reason)", "pass"),
    Bug("partial batch reported as whole", "REM", storing, "_settle", "if result.status in (StoreStatus.STORED, StoreStatus.PRESENT):", "if True:"),
    Bug("index keeps what was deleted", "PER", Holdings, "hide", "self._forget(slot, charge, evicted)", "evicted and self._forget(slot, charge, True)"),
    Bug("written before it is charged", "CAP", Holdings, "charge", "or self.used + need > self.limit", ""),
    Bug("event lost", "OBS", upkeep, "_tell", "tier.context.emit(", "str("),
    Bug("counter drifts", "OBS", Measured, "_judge", 's_total", 1, outcome=outcome)', 's_total", 1 + (outcome == "failed"), outcome=outcome)'),
)  # fmt: skip  # one line per bug reads as a table
