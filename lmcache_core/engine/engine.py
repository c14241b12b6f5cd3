"""Tokens to chunks to the cache, for one engine instance."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from lmcache_core.config import EngineConfig, VerifyHot
from lmcache_core.engine.client import CacheClient, Surface
from lmcache_core.engine.forms import Forms
from lmcache_core.engine.request import Request, Saved
from lmcache_core.engine.reuse import Wanted
from lmcache_core.frame import TAGS_LIMIT
from lmcache_core.identity import Extra, KeyManager, KeySpace, Tokens, Unkeyable, with_manager
from lmcache_core.observers import Metrics
from lmcache_core.spi import Damaged, Event, Key

SPACES = 256
"""Key spaces of requests kept at hand."""
SAMPLE = 64
"""One hot load out of so many is verified under ``VerifyHot.SAMPLE``."""


class CacheEngine:
    """Requests of one key space against one cache.

    Args:
        client: the cache.
        forms: stored forms of the key space.
        options: chunk rules; ``chunk_size`` is already part of the key space.
        managers: key managers by name; their fields enter the key space of each request.
        emit: takes events (damage); may be called from any thread.
        metrics: counts tokens asked for, hit, missed, loaded and stored.
        wall: Unix seconds for the stamp in new frames.
        timer: seconds, for the time spent in the cache's own code.
    """

    def __init__(
        self,
        client: CacheClient,
        forms: Forms,
        options: EngineConfig | None = None,
        /,
        *,
        managers: Mapping[str, KeyManager] | None = None,
        emit: Callable[[Event], None] = lambda event: None,
        metrics: Metrics | None = None,
        wall: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.client = client
        self.forms = forms
        self.options = options or EngineConfig()
        self.metrics = metrics or Metrics()
        self.timer = timer
        self._managers = dict(managers or {})
        self._emit = emit
        self._wall = wall
        self._loads = 0
        self._space_of = lru_cache(SPACES)(self._make_space)

    def request(
        self,
        id: str,
        tokens: Tokens,
        /,
        *,
        extras: Iterable[Extra] = (),
        tags: Sequence[str] = (),
        skip_load: bool = False,
        skip_save: bool = False,
        cost: float = 1.0,
        tenant: str | None = None,
        ttl: float | None = None,
    ) -> Request:
        """Begin a request.

        Args:
            extras: inputs besides token ids, by position.
            tags: labels for later deletion, ``NAME`` or ``NAME=VALUE``; part of the key where the option
                ``tags_in_key`` names them or a key manager says so.
            skip_load, skip_save: leave the cache alone in one direction.
            cost: of computing one chunk, for policies that weigh it.
            tenant: salt instead of that of the key space.
            ttl: seconds after which what is stored may be forgotten.

        Raises:
            Unkeyable: an input that cannot be named, or a label no frame can carry; counted. The request must
                run without the cache.
        """
        space = self.space(tags, tenant)
        return Request(
            self, id, tokens, space=space, extras=extras, tags=tags, skip_load=skip_load,
            skip_save=skip_save, cost=cost, ttl=ttl,
        )  # fmt: skip

    def space(self, tags: Sequence[str] = (), tenant: str | None = None, /) -> KeySpace:
        """Key space of a request with these labels.

        Raises:
            Unkeyable: see ``request``.
        """
        try:
            if len(tags) > TAGS_LIMIT or not all(0 < len(tag.encode()) < 256 for tag in tags):
                raise Unkeyable(f"a request has up to {TAGS_LIMIT} tags of 1 to 255 bytes")
            plain = not self._managers and not self.options.tags_in_key
            return self._space_of(() if plain else tuple(tags), tenant)
        except ValueError as error:  # also text that is not Unicode
            self.metrics.add("lmcache_unkeyed_requests_total")
            raise Unkeyable(str(error)) from error

    def _make_space(self, tags: tuple[str, ...], tenant: str | None) -> KeySpace:
        given = {name: value for name, _, value in (tag.partition("=") for tag in tags)}
        space = self.forms.space
        named = tuple((name, given[name]) for name in self.options.tags_in_key if name in given)
        if named:
            space = replace(space, tags_in_key=(*space.tags_in_key, *named))
        if tenant is not None and tenant != space.tenant:
            space = replace(space, tenant=tenant)
        for name, manager in self._managers.items():
            space = with_manager(space, name, manager, given)
        return space

    def lookup(self, tokens: Tokens, /, *, deadline: float | None = None) -> int:
        """Tell how many leading tokens the cache could supply now, without keeping anything."""
        request = self.request("", tokens)
        try:
            return request.lookup(deadline=deadline)
        finally:
            request.end()

    def load(
        self, tokens: Tokens, surface: Surface, /, *, local: int = 0, deadline: float | None = None
    ) -> int:
        """Copy the known prefix into engine memory; returns the token position up to which it is good."""
        request = self.request("", tokens)
        try:
            request.lookup(local=local, deadline=deadline)
            return request.load(surface, local=local)
        finally:
            request.end()

    def store(self, tokens: Tokens, surface: Surface, /, *, tags: Sequence[str] = ()) -> Saved:
        """Keep the chunks of these tokens, all of which are good in engine memory."""
        request = self.request("", tokens, tags=tags)
        try:
            return request.store(surface, request.tokens)
        finally:
            request.end()

    def nbytes(self, want: Wanted, /) -> int:
        """Payload bytes of one value."""
        return self.forms.spec(want.group, want.tokens).nbytes

    def asked(self, tokens: int, hit: int, /) -> None:
        """Count one lookup: all tokens asked for, and those offered."""
        self.metrics.add("lmcache_lookups_total")
        self.metrics.add("lmcache_asked_tokens_total", tokens)
        self.metrics.add("lmcache_hit_tokens_total", hit)
        self.metrics.add("lmcache_missed_tokens_total", tokens - hit)

    def damaged(self, key: Key, reason: str, /) -> None:
        """Tell observers that a value in memory was not good."""
        self._emit(Damaged(tier="memory", key=key.text, reason=reason))

    def verify_next(self) -> bool:
        """Decide whether the next hot load is verified."""
        self._loads += 1
        rule = self.options.verify_hot
        return rule is VerifyHot.ALWAYS or (rule is VerifyHot.SAMPLE and self._loads % SAMPLE == 1)

    def wall(self) -> int:
        """Whole Unix seconds."""
        return int(self._wall())
