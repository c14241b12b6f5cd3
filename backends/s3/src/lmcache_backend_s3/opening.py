"""Taking a bucket into use: reach it, prove the credentials, learn what the server can, by real round trips."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from lmcache_backend_s3.bucket import FORBIDDEN, HOPELESS, Bucket, Refused
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
        ConfigError: the certificates cannot be read.
    """
    scheme, _, place = endpoint.rstrip("/").partition("://")
    host, _, port = place.partition(":")
    tls: ssl.SSLContext | None = None
    if scheme == "https":
        try:
            tls = ssl.create_default_context(cafile=config.ca_file or None)
        except OSError as error:
            raise ConfigError(f"ca_file {config.ca_file}: {error}") from error
    return Transport(
        host,
        int(port) if port else (443 if tls else 80),
        tls=tls,
        timeout=config.timeout,
        connect_timeout=config.connect_timeout,
        idle=config.threads,
        now=context.clock.now,
    )


def probe(bucket: Bucket, config: ObjectConfig, context: Context, call: Call, /) -> Abilities:
    """Write, read in part, and remove an object of its own.

    Raises:
        ConfigError: bucket, region, credentials or rights are wrong, or what is required is not there.
        Unavailable: no answer.
    """
    name = f"{config.prefix}probe-{context.pid:x}-{context.random.getrandbits(64):016x}"
    value = context.random.randbytes(PROBE_NBYTES)
    view, tier = memoryview(value), context.tier
    now = context.clock.now
    try:
        began = now()
        bucket.list(
            config.prefix, None, 1, call
        )  # first: some servers make a bucket that is put into
        reached = now()
        try:
            only_new = bucket.put(
                name, [view], call, only_new=config.conditional is not Conditional.OFF
            )
            stored = now()
        except Refused as error:
            if error.code in FORBIDDEN:
                context.log.warning("tier %s cannot store: %s", tier, error)
                return Abilities(False, str(error))
            raise
        if not only_new:
            raise Unavailable(f"the server says that {name}, a name drawn by lot, is taken")
        if config.conditional is Conditional.OFF:
            only_new = False
        else:
            only_new = not bucket.put(name, [view], call, only_new=True)
        into = memoryview(bytearray(PROBE_NBYTES - 1))
        asked = now()
        bucket.get(name, call, lambda total, etag: [into], offset=1, length=into.nbytes)
        read = now()
        bucket.delete(name, call)
    except Refused as error:
        if error.code in HOPELESS:
            hint = f"; the bucket is in {error.region}" if error.region else ""
            where = f"{config.url} of tier {tier}"
            raise ConfigError(f"{where}: {HOPELESS[error.code]}{hint} ({error})") from error
        raise
    if into != view[1:]:
        raise Unavailable("the server does not give back what it was given")
    if not only_new and config.conditional is Conditional.REQUIRED:
        raise ConfigError(f"tier {tier}: the server ignores If-None-Match; set conditional to auto")
    if not only_new and config.conditional is Conditional.AUTO:
        context.log.warning(
            "tier %s: the server ignores If-None-Match; a lookup goes before every store", tier
        )
    up, down = (
        PROBE_NBYTES / max(1e-9, end - begin) / 1e6
        for begin, end in ((reached, stored), (asked, read))
    )
    context.log.info(
        "tier %s: %s answers in %.1f ms, one stream %.0f MB/s up, %.0f MB/s down",
        tier, config.url, (reached - began) * 1e3, up, down,
    )  # fmt: skip
    return Abilities(only_new)
