"""For every test of the tree: property tests are judged by what they find, not by how busy the machine is."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "house",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(
        os.environ.get("CI")
    ),  # one commit, one verdict; new examples are found by hand
)
settings.load_profile("house")
