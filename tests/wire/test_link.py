"""A call on a connection ends by its deadline, as the kernel counts and as we do."""

import socket
import struct
import time

import pytest

from lmcache_core.spi.errors import DeadlineExceeded
from lmcache_core.wire import records
from lmcache_core.wire.address import Address
from lmcache_core.wire.link import Link


@pytest.fixture
def silent(tmp_path):
    """A connection to somebody who takes what comes, as far as the kernel keeps it, and says nothing."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/silent.sock")
        listener.listen()
        address = Address(path=f"{tmp_path}/silent.sock")
        link = Link(address, timeout=1.0, notify=lambda notice: None, late=lambda reply: None)
        yield link
        link.close()


def armed(link, option):
    found = socket.socket(fileno=link.fileno())
    seconds, micros = struct.unpack("@qq", found.getsockopt(socket.SOL_SOCKET, option, 16))
    found.detach()
    return seconds + micros / 1e6


@pytest.mark.parametrize("seconds", [0.02, 0.2])
def test_call_without_a_reply_ends_at_its_deadline(silent, seconds):
    late = []
    for _ in range(3):
        until = time.monotonic() + seconds
        with pytest.raises(DeadlineExceeded):
            silent.call(records.Ping, until)
        late.append(time.monotonic() - until)
    assert min(late) >= -0.003  # a little before it, as it takes time to say so
    assert min(late) < 0.005  # three in a row were held up by the machine otherwise


def test_kernel_is_asked_to_end_early_as_its_clock_is_coarse(silent):
    """Seen: timers of a second on sockets ended 32 ms late."""
    with pytest.raises(DeadlineExceeded):
        silent.call(records.Ping, time.monotonic() + 0.25)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        assert 0.18 < armed(silent, option) * 9 / 8 + 0.02 <= 0.25 + 0.005


def test_request_that_nobody_takes_ends_at_its_deadline(silent):
    until = time.monotonic() + 0.2
    with pytest.raises(DeadlineExceeded):
        silent.call(records.Ping, until, after=[memoryview(bytes(8 << 20))])
    assert -0.003 <= time.monotonic() - until < 1
    assert silent.failed  # half of it is out
