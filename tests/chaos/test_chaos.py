"""One round of everything that can happen to a daemon, its stores and its clients; nightly for ten minutes."""

import pytest
from lmcache_backend_redis.serving import START, find_server

from lmcache_core.testing.services import need_service
from tests.chaos.run import FAULTS, play, table

pytestmark = pytest.mark.slow


def test_no_fault_costs_more_than_hits():
    need_service(
        "redis", None if find_server("redis-server") else "no redis-server here", start=START
    )
    rows = play(1.0, 0, 4)
    assert [row.wrong for row in rows if row.wrong] == [], table(rows)
    assert {row.kind for row in rows if row.times} == set(FAULTS)
    met = {row.kind: row.breaker for row in rows}
    assert "open" in met["redis_killed"]
