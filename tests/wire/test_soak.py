"""Half a minute of everything at once, and a few kills; ``make nightly-daemon`` runs the same for longer."""

import pytest

from tests.wire.soak import kill, soak

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
