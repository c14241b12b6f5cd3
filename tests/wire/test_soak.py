"""Half a minute of everything at once, and a few kills; ``make nightly-daemon`` runs the same for longer."""

import pytest

from tests.wire.soak import kill, soak
from tests.wire.stopped import stop

pytestmark = pytest.mark.slow


def test_half_a_minute_of_load_leaves_nothing_behind():
    """Seen in sglang#28902, LMCache#3187."""
    found = soak(30, 0, 2)
    assert found["wrong"] == [], found
    assert found["operations"] > 1000, found


def test_clients_outlive_a_daemon_that_is_killed_again_and_again():
    """Seen in LMCache#3206."""
    found = kill(3, 2)
    assert found["wrong"] == [], found


def test_no_call_outlasts_its_deadline_while_the_daemon_is_stopped():
    """Five seconds of it, in which every kind of client waits; the nightly run stops it for thirty."""
    found = stop(5, 1)
    assert found["wrong"] == [], found
    assert sum(row["waited"] for row in found["calls"].values()) > 10, found
