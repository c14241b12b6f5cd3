"""Taking a bucket into use: reach it, prove the credentials, learn what the server can, by real round trips."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from itertools import pairwise
from urllib.parse import urlsplit

from lmcache_backend_s3 import proxy
from lmcache_backend_s3.bucket import FORBIDDEN, HOPELESS, Bucket, Refused
from lmcache_backend_s3.capacity import lacks_room
from lmcache_backend_s3.config import Conditional, ObjectConfig
from lmcache_backend_s3.transport import Call, Transport
from lmcache_core.spi import ConfigError, Context, Unavailable

PROBE_NBYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a server can; ``read_only`` says why nothing can be stored, where that is so."""

    only_new: bool
    read_only: str = ""


def connect(config: ObjectConfig, endpoint: str, context: Context, /) -> Transport:
    """A transport to ``http[s]://HOST[:PORT]``; nothing is sent yet.

    Raises:
        ConfigError: the certificates cannot be read, or the environment names an impossible proxy.
    """
    place = urlsplit(endpoint)
    tls: ssl.SSLContext | None = None
    if place.scheme == "https":
        try:
            tls = ssl.create_default_context(cafile=config.ca_file or None)
        except OSError as error:
            raise ConfigError(f"ca_file {config.ca_file}: {error}") from error
    return Transport(
        place.hostname or "",
        place.port or (443 if tls else 80),
        tls=tls,
        timeout=config.timeout,
        connect_timeout=config.connect_timeout,
        idle=config.threads,
        now=context.clock.now,
        proxy=proxy.find(config, place),
    )


def probe(bucket: Bucket, config: ObjectConfig, context: Context, call: Call, /) -> Abilities:
    """Write, read in part, and remove an object of its own.

    Raises:
        ConfigError: bucket, region, credentials or rights are wrong, or what is required is not there.
        Unavailable: no answer, or not the right one.
    """
    try:
        abilities = _try(bucket, config, context, call)
    except Refused as error:
        if error.code not in HOPELESS:
            raise
        hint = f"; the bucket is in {error.region}" if error.region else ""
        where = f"{config.url} of tier {context.tier}"
        raise ConfigError(f"{where}: {HOPELESS[error.code]}{hint} ({error})") from error
    if abilities.read_only:
        context.log.warning("tier %s cannot store: %s", context.tier, abilities.read_only)
    elif not abilities.only_new and config.conditional is Conditional.REQUIRED:
        raise ConfigError(
            f"tier {context.tier}: the server ignores If-None-Match; set conditional to auto"
        )
    elif not abilities.only_new and config.conditional is Conditional.AUTO:
        context.log.warning(
            "tier %s: the server ignores If-None-Match; a lookup goes before every store",
            context.tier,
        )
    return abilities


def _try(bucket: Bucket, config: ObjectConfig, context: Context, call: Call) -> Abilities:
    name = f"{config.prefix}probe-{context.pid:x}-{context.random.getrandbits(64):016x}"
    view = memoryview(context.random.randbytes(PROBE_NBYTES))
    into = memoryview(bytearray(PROBE_NBYTES - 1))
    ask = config.conditional is not Conditional.OFF
    now, times = context.clock.now, [context.clock.now()]
    bucket.list(config.prefix, None, 1, call)  # first: some servers make a bucket that is put into
    times.append(now())
    try:
        if not bucket.put(name, [view], call, only_new=ask):
            raise Unavailable(f"the server says that {name}, a name drawn by lot, is taken")
    except Refused as error:
        if error.code in FORBIDDEN:
            return Abilities(only_new=False, read_only=str(error))
        if not lacks_room(error):
            raise
        # What is there can be loaded nevertheless. An object without bytes needs no room.
        context.log.warning("tier %s takes no values now: %s", context.tier, error)
        bucket.put(name, [], call, only_new=ask)
        return Abilities(_only_new(bucket, name, ask, call))
    times.append(now())
    bucket.get(name, call, lambda total, etag: [into], offset=1, length=into.nbytes)
    times.append(now())
    only_new = _only_new(bucket, name, ask, call)
    if into != view[1:]:
        raise Unavailable("the server does not give back what it was given")
    trip, up, down = (max(1e-9, end - begin) for begin, end in pairwise(times))
    context.log.info(
        "tier %s: %s answers in %.1f ms, one stream %.0f MB/s up, %.0f MB/s down",
        context.tier, config.url, trip * 1e3, PROBE_NBYTES / up / 1e6, PROBE_NBYTES / down / 1e6,
    )  # fmt: skip
    return Abilities(only_new)


def _only_new(bucket: Bucket, name: str, ask: bool, call: Call) -> bool:
    """Whether the server refuses a name that is taken; removes it."""
    refuses = ask and not bucket.put(name, [], call, only_new=True)
    bucket.delete(name, call)
    return refuses
