"""Services that tests need: a promised one that is missing is a failure, any other is a skip that says how to start it.

CI promises with ``LMCACHE_TEST_SERVICES=redis,s3``, so a green run there cannot hide a service that never came up.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from unittest import SkipTest

PROMISE = "LMCACHE_TEST_SERVICES"


def need_service(
    name: str, problem: str | None, /, *, start: str, environment: Mapping[str, str] = os.environ
) -> None:
    """Go on where the service is there (``problem`` is None), else skip or fail the test.

    Args:
        problem: one line on why it cannot be used, None when it can.
        start: the command that starts it.
    """
    if problem is None:
        return
    if name in environment.get(PROMISE, "").replace(",", " ").split():
        raise AssertionError(f"{PROMISE} promises {name}, but {problem}; start it with: {start}")
    raise SkipTest(f"{name}: {problem}; start it with: {start}")
