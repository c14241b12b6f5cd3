"""What InfiniStore's own client gives over TCP: one value after another, each into an array that it makes and nobody keeps."""

from __future__ import annotations

import contextlib
import ctypes
import io
import sys
from collections.abc import Sequence

from lmcache_core.spi import Key
from lmcache_core.testing.services import UNPACKED

PACKAGES = "infinistore/venv/lib/python3.*/site-packages"


class Raw:
    """A bare loop; a ``Mover`` of ``benchmarks/tiers.py``. The client is the one that was installed with the server."""

    name, fills = "its own client", False

    def __init__(self, port: int) -> None:
        sys.path += [str(found) for found in UNPACKED.parent.glob(PACKAGES)]
        import infinistore  # type: ignore[import-not-found]

        config = infinistore.ClientConfig(
            host_addr="127.0.0.1", service_port=port, connection_type=infinistore.TYPE_TCP, log_level="error"
        )  # fmt: skip
        self._client = infinistore.InfinityConnection(config)
        with contextlib.redirect_stdout(io.StringIO()):  # it greets
            self._client.connect()

    def store(self, keys: Sequence[Key], values: Sequence[memoryview]) -> None:
        for key, value in zip(keys, values, strict=True):
            place = ctypes.addressof(ctypes.c_char.from_buffer(value))
            self._client.tcp_write_cache(key.text, place, value.nbytes)

    def load(self, keys: Sequence[Key], into: Sequence[memoryview]) -> None:
        for key, view in zip(keys, into, strict=True):
            assert self._client.tcp_read_cache(key.text).nbytes == view.nbytes

    def clear(self, keys: Sequence[Key]) -> None:
        assert self._client.delete_keys([key.text for key in keys]) == len(keys)

    def close(self) -> None:
        self._client.close()


class Copied(Raw):
    """The same, and each value copied to where a cache wants it."""

    name, fills = "its client, copied", True

    def load(self, keys: Sequence[Key], into: Sequence[memoryview]) -> None:
        for key, view in zip(keys, into, strict=True):
            view[:] = memoryview(self._client.tcp_read_cache(key.text))
