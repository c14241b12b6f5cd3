"""Telling a daemon whose chunks these are, so that people can ask it about prompts (``lmcache query --tokens``)."""

from __future__ import annotations

import logging
import os

from lmcache_core.engine import Cache, Forms
from lmcache_core.identity import canonical
from lmcache_core.spi import BackendError, ConfigError
from lmcache_core.wire import records, replies
from lmcache_core.wire.client import DaemonClient

LOG = logging.getLogger(__name__)


def register(cache: Cache, forms: Forms, known: object) -> object:
    """Register a key space with the session there is, once.

    Args:
        known: what an earlier call returned, None at first.

    Returns the session it is registered with; None without a daemon. A daemon that refuses or does not answer
    serves this engine all the same.
    """
    client = cache.storage
    home = client.home if isinstance(client, DaemonClient) else None
    if home is None or home is known or not isinstance(client, DaemonClient):
        return home
    space = forms.space
    name = f"{space.model}-{os.getpid()}-{space.digest.hex()[:8]}"
    groups = [_form(forms, group) for group in range(forms.groups)]
    writes: list[list[int]] = [[] for _ in groups]
    try:
        client.ask(
            replies.Registered,
            lambda id: records.Register(id, name, 0, 1, canonical(space), groups, writes),
        )
    except (BackendError, ConfigError) as error:
        LOG.warning("not registered with the daemon: %s", error)
    return home


def _form(forms: Forms, group: int) -> records.Form:
    spec = forms.spec(group, forms.chunk_tokens)
    segments = [(s.layer, s.head_begin, s.head_end, s.nbytes) for s in spec.segments]
    return records.Form(
        forms.header_nbytes(group), spec.dtype, spec.tokens, spec.planes, spec.heads, spec.head_dim,
        spec.interior.value, segments,
    )  # fmt: skip
