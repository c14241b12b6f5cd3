"""The way over RDMA, by the project's own client: values only, the rest stays on TCP."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from lmcache_backend_infinistore.config import InfiniStoreConfig
from lmcache_core.spi import ConfigError, Unavailable

DONE, ABSENT, FULL = 200, 404, 507


def problem() -> str | None:
    """Why RDMA cannot be used here; None when the library is there."""
    try:
        import infinistore  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError:
        return "no package infinistore here: pip install infinistore"
    except ImportError as error:
        return f"infinistore does not load: {error}; apt-get install libibverbs1"
    return None


def connect(config: InfiniStoreConfig) -> Any:
    """A connection of the library.

    Raises:
        ConfigError: the library is not here.
        Unavailable: no device, or no answer.
    """
    if (trouble := problem()) is not None:
        raise ConfigError(trouble)
    import infinistore

    host, port = config.place
    made = infinistore.InfinityConnection(
        infinistore.ClientConfig(
            host_addr=host, service_port=port, connection_type=infinistore.TYPE_RDMA,
            dev_name=config.rdma, ib_port=config.ib_port, link_type=config.link_type, log_level="error",
        )
    )  # fmt: skip
    try:
        made.connect()
    except Exception as error:  # the library raises nothing narrower
        raise Unavailable(f"no RDMA to {host}:{port} by {config.rdma}: {error}") from error
    return made


class Way:
    """Moves values between the server and memory, in calls that end when the device has.

    The library has one event for an end, its callback; without it the memory is never given back. What is not
    registered goes through memory that is.
    """

    def __init__(self, connection: Any) -> None:
        self._made = connection
        self._posting, self._bouncing = threading.Lock(), threading.Lock()
        self._regions: dict[int, int] = {}
        self._bounce: Any = None

    def register(self, place: int, nbytes: int) -> bool:
        """Make memory known to the device; it stays so while the connection does."""
        with self._posting:
            if self._made.conn.register_mr(place, nbytes) < 0:
                return False
            self._regions[place] = nbytes
        return True

    def forget(self, place: int) -> None:
        with self._posting:
            self._regions.pop(place, None)

    def write(self, name: bytes, view: memoryview) -> int:
        """Send a value; returns the code."""
        post = self._made.conn.w_rdma_async
        if (place := self._place(view)) is not None:
            return self._move(post, name, place, view.nbytes)
        with self._bouncing:
            place, own = self._own(view.nbytes)
            own[:] = view
            return self._move(post, name, place, view.nbytes)

    def read(self, name: bytes, view: memoryview) -> int:
        """Fetch a value of just this length; returns the code."""
        post = self._made.conn.r_rdma_async
        if (place := self._place(view)) is not None:
            return self._move(post, name, place, view.nbytes)
        with self._bouncing:
            place, own = self._own(view.nbytes)
            code = self._move(post, name, place, view.nbytes)
            if code == DONE:
                view[:] = own
            return code

    def close(self) -> None:
        self._made.close()

    def _place(self, view: memoryview) -> int | None:
        """Where a view lies, if that is registered."""
        if view.readonly or not view.nbytes:
            return None
        place = ctypes.addressof(ctypes.c_char.from_buffer(view))
        regions = self._regions.copy().items()
        inside = any(a <= place and place + view.nbytes <= a + n for a, n in regions)
        return place if inside else None

    def _own(self, nbytes: int) -> tuple[int, memoryview]:
        if self._bounce is None or len(self._bounce) < nbytes:
            self._bounce = ctypes.create_string_buffer(nbytes)
            if not self.register(ctypes.addressof(self._bounce), nbytes):
                self._bounce = None
                raise Unavailable(f"cannot register {nbytes} bytes for RDMA")
        return ctypes.addressof(self._bounce), memoryview(self._bounce).cast("B")[:nbytes]

    def _move(self, call: Callable[..., int], name: bytes, place: int, nbytes: int) -> int:
        ended = threading.Event()
        codes: list[int] = []

        def done(code: int) -> None:
            codes.append(code)
            ended.set()

        with self._posting:
            posted = call((name.decode(),), (0,), nbytes, place, done)
        if posted < 0:
            raise Unavailable("the RDMA connection takes no request")
        ended.wait()
        return int(codes[0])
