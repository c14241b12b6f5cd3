"""Key managers: plugins that add identity, and can never take any away.

A key manager is chosen by name from the entry-point group ``lmcache_core.key_managers``. What it
returns lands in tagged fields of the key space, under its own name: two requests that differ
without it still differ with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from lmcache_core.identity.canonical import Scalar
from lmcache_core.identity.space import KeySpace

GROUP = "lmcache_core.key_managers"


class KeyManager(Protocol):
    """What a plugin of this kind offers, besides the class variables of all plugins.

    Those are ``plugin_api`` and ``config_type``; the class takes an instance of the latter.
    """

    def fields(self, tags: Mapping[str, str], /) -> Mapping[str, Scalar]:
        """Further identity of a request with these tags.

        Behaviour: pure; equal tags give equal fields in every process.
        """
        ...


def with_manager(
    space: KeySpace, name: str, manager: KeyManager, tags: Mapping[str, str]
) -> KeySpace:
    """Key space of one request: ``space`` with the fields of the manager called ``name`` added."""
    added = tuple((f"{name}.{field}", value) for field, value in manager.fields(tags).items())
    return replace(space, fields=space.fields + added) if added else space
