"""Records of the protocol; ``docs/reference/protocol.md`` describes them for other languages.

A frame is a length (u32, little-endian) and one msgpack array: the name of the record, its id, its fields.
A request with an id gets exactly one reply with the same id; requests without one (``ONE_WAY``) get none; what
the daemon says unasked (``NOTICES``) has none either. Decoding is strict: unknown names, wrong types and
lengths beyond the bounds below end the connection. Fields may be added at the end of a record, with a default.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

VERSION = 1
"""Of the protocol. Peers of different versions say so and part."""
CAPABILITIES = ("shm", "stream", "notices", "engines", "admin")
"""What this implementation speaks; both sides name theirs and use what both have."""
MOST_FRAME = 8 << 20
"""Longest frame in bytes, raw values not counted."""
MOST_KEYS = 1 << 16
MOST_VALUE = 1 << 32
MOST_LISTED = 128
"""Values in one reply to ``List``, so that nobody has to wait for a long one."""

Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Mac = Annotated[bytes, Meta(min_length=32, max_length=32)]
Token = Annotated[bytes, Meta(max_length=32)]
Text = Annotated[str, Meta(max_length=1024)]
Label = Annotated[str, Meta(max_length=255)]
Blob = Annotated[bytes, Meta(max_length=MOST_FRAME)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class Run(Struct, array_like=True, gc=False):
    """Neighbouring keys of one space and group: ``digests`` holds 32 bytes each."""

    space: Digest
    group: Annotated[int, Meta(ge=0, le=65535)]
    digests: Annotated[bytes, Meta(min_length=32, max_length=32 * MOST_KEYS)]


Runs = Annotated[list[Run], Meta(max_length=MOST_KEYS)]
Ids = Annotated[list[Number], Meta(max_length=MOST_KEYS)]
Labels = Annotated[list[Label], Meta(max_length=64)]


class Record(Struct, array_like=True, gc=False, tag=str.lower):
    """One msgpack array that begins with the name of its class in lower case."""


class Message(Record):
    """A request or a reply; ``id`` belongs to the connection."""

    id: Number


# ---- from a client: the connection ----------------------------------------------------------------------


class Hello(Message):
    """First record of a connection. On a unix socket the client's pidfd may ride along (SCM_RIGHTS).

    Attributes:
        probe: ``identity.probe_digest()``: peers that disagree share nothing.
        session: token of a session to join, or empty for a new one.
        held: grants the client still uses, when it joins with no other connection open and no call
            under way; None says nothing. Whatever else the session had is over.
    """

    version: Number
    probe: Digest
    pid: Number
    capabilities: Labels = []
    session: Token = b""
    held: Ids | None = None
    name: Label = ""


class Auth(Message):
    """HMAC-SHA256 of the welcome's challenge and boot id under the token; opens a TCP connection."""

    mac: Mac


class Ping(Message):
    pass


class Segments(Message):
    """Ask for the descriptors of all segments numbered ``first`` and up (unix socket only)."""

    first: Number = 0


class Register(Message):
    """A rank of an engine names its key space and the segments it writes; rank -1 only asks.

    Attributes:
        space: canonical bytes of the key space; all ranks of an engine must name the same.
        forms: for each group its header room and segments (layer, first head, last head, bytes), as
            ``Form``; equal for all ranks.
        writes: for each group the positions of the segments this rank writes.
    """

    engine: Label
    rank: Annotated[int, Meta(ge=-1, le=1 << 20)]
    ranks: Annotated[int, Meta(ge=1, le=1 << 20)]
    space: Blob = b""
    forms: list[Form] = []
    writes: list[Ids] = []


class Form(Struct, array_like=True):
    """``spi.KVSpec`` of a full chunk, and the room of its header."""

    room: Number
    dtype: Label
    tokens: Number
    planes: Number
    heads: Number
    head_dim: Number
    interior: Label
    segments: list[tuple[int, int, int, int]]


# ---- from a client: values -------------------------------------------------------------------------------


class Find(Message):
    """Tell where values are, without moving them. ``seconds`` is the time left for the answer."""

    keys: Runs
    seconds: Seconds
    tokens: Number = 0


class Load(Message):
    """Make values resident and lease them, the good leading ones.

    With ``stream`` the reply is followed by the values' bytes, back to back, and nothing stays leased.
    """

    keys: Runs
    seconds: Seconds
    tokens: Number = 0
    tenant: Label = ""
    stream: bool = False


class Reserve(Message):
    """Promise memory for values of these lengths (u64 each), in order.

    With ``engine`` a chunk is filled by several ranks: who reserves what another rank of the same engine has
    reserved in the same ``turn`` gets the same memory. Turns count up; what an earlier one left is dropped, and a
    chunk that was given up in a turn stays given up in it. ``firsts``: position of each value's first token in its
    prefix (i64 each), for the frames that the daemon seals then; empty where nobody knows.
    """

    keys: Runs
    sizes: Blob
    tenant: Label = ""
    cost: float = 1.0
    tags: Labels = []
    engine: Label = ""
    turn: Number = 0
    firsts: Blob = b""


class Commit(Message):
    """Filled: make these reservations visible (identities: 16 bytes each).

    With ``nbytes`` the values' bytes follow the record, back to back, and the daemon fills the memory.
    """

    grants: Ids
    identities: Blob
    ttl: float | None = None
    nbytes: Annotated[int, Meta(ge=0, le=MOST_VALUE)] = 0


class Part(Message):
    """A rank has filled its segments of shared reservations: 16-byte digests, segment after segment.

    Attributes:
        grants: one per value; ``digests`` of all of them back to back.
    """

    grants: Ids
    digests: Blob
    ttl: float | None = None


class Delete(Message):
    keys: Runs
    seconds: Seconds
    tier: Label = ""


class Dispatch(Record):
    """The ranks of an engine read under these leases from now on; each releases them by itself.

    Attributes:
        ranks: how many; where they are away, or new to the daemon, so many may come for it.
    """

    engine: Label
    grants: Ids
    ranks: Number = 1


class Release(Record):
    """Leases are over: whole batches, and single positions of others as (grant, positions)."""

    grants: Ids
    parts: Annotated[list[tuple[Number, Ids]], Meta(max_length=MOST_KEYS)] = []


class Abort(Record):
    """Nothing will be written into these reservations any more."""

    grants: Ids


class Prefill(Record):
    """Computing so many tokens took so long."""

    tokens: Number
    seconds: Seconds


# ---- from a client: administration -----------------------------------------------------------------------


class Describe(Message):
    """Ask for a document about the daemon: version, settings, tiers, engines (JSON)."""


class Stats(Message):
    """Ask for all metrics."""


class List(Message):
    """One page of the values of a tier (empty: the resident one), optionally of one key space.

    A page may be shorter than ``limit``, even empty, and not be the last: ``after`` in the reply tells.
    """

    tier: Label = ""
    space: bytes = b""
    after: Text | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000


class Follow(Message):
    """What came and went since change number ``since``, or (None) only the number of the next one."""

    since: Number | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000


class Clear(Message):
    """Forget values: all, those of a space, or those under a tag; in one tier or everywhere."""

    seconds: Seconds
    tier: Label = ""
    space: bytes = b""
    tag: Label = ""


class Flush(Message):
    """Write what is only in memory to the tiers that want it."""

    seconds: Seconds


class Freeze(Message):
    """Accept no new values (``on``), or do again."""

    on: bool


class Quota(Message):
    """Set (``nbytes``) or remove (None) a tenant's quota in memory; ``default`` is everybody unnamed."""

    tenant: Label
    nbytes: Number | None = None


class Tier(Message):
    """Change a configured tier: ``limit`` (with ``nbytes``), ``remove`` or ``restore`` after that."""

    name: Label
    action: Label
    nbytes: Number = 0
    seconds: Seconds = 10.0


class Move(Message):
    """Copy values from one tier to another, and with ``forget`` delete them in the first."""

    keys: Runs
    source: Label
    target: Label
    seconds: Seconds
    forget: bool = False


class Prefetch(Message):
    """Bring values up in the background; ``Ready`` with the number in the reply tells the end."""

    keys: Runs
    seconds: Seconds
    tokens: Number = 0


class Pin(Message):
    """Keep values in memory for ``lasts`` seconds from now; 0: no longer, and with no key at all, none of them."""

    keys: Runs
    seconds: Seconds
    lasts: Seconds


class Reload(Message):
    """Take over from the configuration file what may change while the daemon runs."""


class LogLevel(Message):
    level: Label
