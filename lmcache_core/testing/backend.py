"""``BackendTests``: the laws B1-B16 of ``lmcache_core.spi.backend`` as tests.

An author writes a subclass with ``make_backend`` and whatever other hook of ``BackendHarness`` applies::

    class TestMine(BackendTests):
        def make_backend(self):
            return MyBackend(MyConfig(), test_context())

To run one class on a fake and on the real service, give it an autouse fixture with two parameters.
"""

from __future__ import annotations

from lmcache_core.testing.capability_laws import CapabilityLaws
from lmcache_core.testing.data_laws import DataLaws
from lmcache_core.testing.life_laws import LifeLaws


class BackendTests(DataLaws, LifeLaws, CapabilityLaws):
    """Every law, each test selected by the capabilities of the instance it runs on."""
