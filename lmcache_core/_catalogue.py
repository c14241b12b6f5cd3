"""GENERATED from plugins.toml by .ci/catalogue.py; edit that file and run `make catalogue`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One first-party name: what ships it, where it lies in a checkout, what it needs.

    ``kind`` is the end of the entry-point group ``lmcache_core.KIND``. ``status`` is ``experimental``,
    ``stable`` or ``retired``; a retired name has a ``reason``. Empty text means none.
    """

    kind: str
    name: str
    dist: str
    path: str
    object: str
    extra: str = ""
    status: str = "experimental"
    reason: str = ""
    needs: str = ""
    service: str = ""


CATALOGUE: tuple[Entry, ...] = ()
