"""What the daemon answers, and what it says unasked."""

from __future__ import annotations

from msgspec import Struct, field

from lmcache_core.wire.records import (
    Blob,
    Digest,
    Ids,
    Label,
    Labels,
    Message,
    Number,
    Record,
    Runs,
    Text,
    Token,
)


class Welcome(Message):
    """Answer to ``Hello``.

    Attributes:
        boot: random, new at every start of the daemon.
        session: token to join with; empty where only ``Hello`` is served.
        path: the unix socket, for clients of TCP on the same node.
        challenge: for ``Auth``; empty where none is needed.
        uid: of the daemon.
        writable: clients may map segments for writing.
        segments: (number, data bytes, bytes known to be backed); their descriptors ride along.
        chunk_size, fidelity: of the daemon's configuration.
        over: leases that this hello has ended, as ``held`` does not name them.
        granted: number of the last grant.
    """

    version: Number
    probe: Digest
    boot: Token
    pid: Number
    uid: Number
    capabilities: Labels = field(default_factory=list)
    session: Token = b""
    path: Text = ""
    challenge: Token = b""
    writable: bool = False
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    chunk_size: Number = 256
    fidelity: Label = "exact"
    release: Label = ""
    over: Ids = field(default_factory=list)
    granted: Number = 0


class Mapped(Message):
    """Answer to ``Segments``; descriptors ride along in the same order."""

    segments: list[tuple[int, int, int]]


class Registered(Message):
    """Answer to ``Register``: digest and root of the key space, empty until all ranks are there.

    Attributes:
        chunk: tokens of one, as the ranks keep them; 0 where that is not known.
    """

    space: Token
    root: Token
    missing: Ids
    chunk: Number = 0


class Found(Message):
    """Answer to ``Find``: per key a tier's position in ``tiers`` and length, or -1."""

    tiers: Labels
    where: list[int]
    nbytes: list[int]
    unanswered: Labels


class Granted(Message):
    """Answer to ``Load``: ``reason`` is why there are no more.

    Attributes:
        grant: names the leases until ``Release``; 0 when there is none.
        extents: per value segment, base, length, generation (u64 each); of a stream, lengths count.
        identities: 16 bytes per value.
    """

    grant: Number
    extents: Blob
    identities: Blob
    reason: Label


class Reserved(Message):
    """Answer to ``Reserve``: per value a grant, or 0 and the reason in ``refusals``; extents of the granted."""

    grants: Ids
    refusals: list[Label]
    extents: Blob


class Committed(Message):
    """Answer to ``Commit`` and ``Part``: whether each value is (for ``Part``: will be) visible."""

    good: list[bool]


class Count(Message):
    """Values concerned; answer to ``Delete``, ``Clear``, ``Move``, ``Pin``, ``Prefetch`` (the number of the job)."""

    count: Number
    nbytes: Number = 0


class Document(Message):
    """Answer to ``Describe``."""

    json: Blob


class Values(Message):
    """Answer to ``List``: keys as text, lengths, where to go on, and positions of those that are pinned."""

    keys: list[Text]
    nbytes: list[Number]
    after: Text | None = None
    pinned: Ids = field(default_factory=list)


class Change(Struct, array_like=True):
    """Values that came to a tier (``there``) or left it, in order; no runs: everything left it."""

    tier: Label
    there: bool
    runs: Runs


class Changed(Message):
    """Answer to ``Follow``.

    Attributes:
        next: the number to ask from next; numbers belong to one boot of the daemon.
        lost: changes since the number are not kept any more: list the tiers, then go on from ``next``.
        tiers: the tiers that are followed; others are shared with others, who change them too.
    """

    next: Number
    lost: bool
    tiers: Labels
    changes: list[Change]


class Sample(Struct, array_like=True):
    """One metric value: name, labels, value, histogram buckets."""

    name: str
    labels: list[tuple[str, str]]
    value: float
    buckets: list[int]


class Metered(Message):
    """Answer to ``Stats``."""

    samples: list[Sample]


class Done(Message):
    """Answer to ``Ping``, ``Auth``, ``Freeze``, ``Quota``, ``Tier``, ``Reload``, ``LogLevel``."""


class Failed(Message):
    """Answer instead of any other: why not. ``kind`` is ``config``, ``denied``, ``closed`` or ``request``."""

    kind: Label
    message: Text


class Ready(Record):
    """A prefetch has ended with so many values resident."""

    job: Number
    count: Number
    reason: Label


class Revoke(Record):
    """The daemon wants its memory back: release what is not in use (all grants when none is named)."""

    grants: Ids = field(default_factory=list)


class Boot(Record):
    """The daemon is about to end; a successor has another boot id."""

    boot: Token
    reason: Label
