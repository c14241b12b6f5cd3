"""Fewer tokens: the rows of the others are gone."""

from lmcache_serde_drop.config import DropOptions
from lmcache_serde_drop.serde import Drop

__all__ = ["Drop", "DropOptions"]
