"""The names that engines import. Redirects only; the code is in ``lmcache_core`` and the plugins."""

from lmcache_core import __version__

__all__ = ["__version__"]
