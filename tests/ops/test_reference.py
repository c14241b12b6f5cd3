"""The reference obeys the laws of the byte operations."""

from __future__ import annotations

from lmcache_core.ops import Reference
from lmcache_core.testing.ops import OpsTests


class TestReference(OpsTests):
    ops = Reference
