"""Which build of the byte operations runs here, under the module name engines ask for.

``BUILD`` is ``native: INSTRUCTIONS``, or ``python, because REASON``. Importing never fails for want of it.
"""

from lmcache_core.ops import implementation

BUILD: str = implementation()

__all__ = ["BUILD"]
