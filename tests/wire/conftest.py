"""One daemon for tests that leave it as it was."""

import pytest

from tests.wire.daemons import Daemon


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("d"), "--arena-mode", "shared-rw") as daemon:
        yield daemon


@pytest.fixture
def client(shared):
    found = shared.client()
    yield found
    found.close()
