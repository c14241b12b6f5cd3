"""The tier: a value under a name of its own, and a marker under the key that says where and how long."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from lmcache_backend_infinistore import rdma
from lmcache_backend_infinistore.config import InfiniStoreConfig
from lmcache_backend_infinistore.link import ABSENT, DONE, FULL, Broken, Link
from lmcache_backend_infinistore.marker import NBYTES, Marker, unpack
from lmcache_core.spi import (
    MISSED,
    PRESENT,
    STORED,
    BackendError,
    BlockingBackend,
    BufferTooSmall,
    Capabilities,
    Closed,
    Context,
    Durability,
    Found,
    Key,
    Load,
    Loaded,
    LoadStatus,
    Region,
    Store,
    Stored,
    StoreStatus,
    Unavailable,
)

R = TypeVar("R")
PROBE_NBYTES = 1 << 20
VALUE_MOST = 1 << 30
DELETED_AT_ONCE = 1000
TORN_MOST = 100
"""Names of stores that ended half-way, remembered."""


class InfiniStoreBackend(BlockingBackend):
    """Values in the memory of one InfiniStore server, which evicts by itself; nothing can be listed.

    Values move between the socket (or, with a device, the server's memory) and the caller's. A cancelled call over
    TCP ends by closing its connection, unless a value comes on it: then whoever uses it next takes the rest first.
    """

    config_type = InfiniStoreConfig
    config: InfiniStoreConfig

    def __init__(self, config: InfiniStoreConfig, context: Context, /) -> None:
        super().__init__(config, context)
        self._lock = threading.Lock()
        self._idle_links: list[Link] = []
        self._busy: set[Link] = set()
        self._torn: deque[bytes] = deque(maxlen=TORN_MOST)
        self._open = False
        self._way: rdma.Way | None = None
        self.capabilities = Capabilities(
            shared=True,
            persistent=True,
            hints=True,
            register=bool(config.rdma),
            durability=Durability.PROCESS,
            max_value=VALUE_MOST,
            iov_max=1 if config.rdma else 1024,
            quiescence_s=2 * config.timeout + 1.0,
        )

    @staticmethod
    def connect(config: InfiniStoreConfig) -> Any:
        """The library's connection over RDMA."""
        return rdma.connect(config)

    @classmethod
    def testing_config(cls) -> InfiniStoreConfig:
        """A server of this process, which ends with it."""
        from lmcache_backend_infinistore.serving import shared_server

        return InfiniStoreConfig(url=shared_server().url)

    # -- life ------------------------------------------------------------------------------------------------

    def open_blocking(self) -> None:
        self.close_blocking()  # of an attempt that failed
        self._open = True
        if self.config.rdma:
            self._way = rdma.Way(type(self).connect(self.config))
        self._probe()

    def _probe(self) -> None:
        """Send one value there and back."""
        random, now = self.context.random, self.context.clock.now
        key = Key(random.randbytes(32), random.randbytes(32))
        value, back = bytearray(random.randbytes(PROBE_NBYTES)), bytearray(PROBE_NBYTES)
        began = now()
        stored = self.store_blocking(Store(key, (memoryview(value),)))
        middle = now()
        if stored.error is not None:
            raise Unavailable(f"{self.config.url}: {stored.error}")
        if stored.status is StoreStatus.REFUSED:
            self.context.log.warning("%s takes no values: %s", self.context.tier, stored.reason)
            return
        loaded = self.load_blocking(Load(key, (memoryview(back),)))
        self.context.log.debug(
            "%s: a value of 1 MiB took %.1f ms there and %.1f ms back",
            self.context.tier, (middle - began) * 1e3, (now() - middle) * 1e3,
        )  # fmt: skip
        self.delete_blocking([key])
        if loaded.status is LoadStatus.FILLED and back != value:
            raise Unavailable(f"{self.config.url} gives back other bytes than it got")

    def close_blocking(self) -> None:
        with self._lock:
            links, self._idle_links, self._open = self._idle_links, [], False
        with suppress(OSError):  # they end all the same
            for link in links:
                link.settle()
        for link in links:
            link.close()
        if self._way is not None:
            self._way.close()
            self._way = None

    def interrupt_blocking(self) -> None:
        with self._lock:
            for link in self._busy:
                link.interrupt()

    @contextmanager
    def _link(self) -> Iterator[Link]:
        """A connection for one verb; dropped when it fails."""
        with self._lock:
            if not self._open:
                raise Closed("infinistore backend is not open")
            link = self._idle_links.pop() if self._idle_links else None
        if link is None:
            link = Link(self.config.place, float(self.config.timeout))
        with self._lock:
            self._busy.add(link)
        try:
            link.settle()
            yield link
        except BaseException as error:
            link.keep = link.owing
            if link.cut:
                raise Unavailable("ended, because nobody waits for it") from error
            raise
        finally:
            with self._lock:
                self._busy.discard(link)
                good = link.keep and not link.shut  # it may have been cut when all was done
                if good and self._open:
                    link.cut = False
                    self._idle_links.append(link)
                else:
                    link.close()

    def _try(self, operation: str, verb: Callable[[Link], R]) -> R:
        """Run a verb; once more on a new connection where an old one had been closed by the other side."""
        for last in (False, True):
            with self._lock:
                fresh = not self._idle_links
            try:
                with self._link() as link:
                    return verb(link)
            except TimeoutError as error:
                raise Unavailable(
                    f"no word from {self.config.url} for {self.config.timeout:g} s",
                    operation=operation,
                ) from error
            except OSError as error:
                if isinstance(error, BackendError):
                    raise
                with self._lock:
                    stale, self._idle_links = self._idle_links, []
                for link in stale:
                    link.close()
                if fresh or last:
                    raise Unavailable(f"{self.config.url}: {error}", operation=operation) from error
        raise AssertionError("the second round returns or raises")

    # -- values ----------------------------------------------------------------------------------------------

    def _name(self, key: Key) -> bytes:
        return f"{self.config.prefix}{key.text}".encode()

    def _marker(self, link: Link, name: bytes) -> Marker | None:
        nbytes = link.size(name)
        if nbytes is None:
            return None
        raw = bytearray(min(nbytes, NBYTES + 1))
        link.fill([memoryview(raw)])
        link.discard(nbytes - len(raw))
        return unpack(name, bytes(raw))

    def load_blocking(self, load: Load, /) -> Loaded:
        try:
            return self._try("load", lambda link: self._load(link, load))
        except BackendError as error:
            return Loaded.failed(error.with_traceback(None))  # its frames hold the caller's views

    def _load(self, link: Link, load: Load) -> Loaded:
        name = self._name(load.key)
        marker = self._marker(link, name)
        if marker is None:
            return MISSED
        if marker.nbytes > load.room:
            needs = f"{load.key!r} needs {marker.nbytes} bytes, the buffers have {load.room}"
            return Loaded.failed(BufferTooSmall(needs, operation="load"))
        own = marker.value_name(name)
        if self._way is not None:
            code = self._way.read(own, load.into[0][: marker.nbytes])
            if code not in (DONE, ABSENT):
                raise Unavailable(f"the server said {code}", operation="load")
            return Loaded.filled(marker.nbytes) if code == DONE else MISSED
        nbytes = link.size(own)
        if nbytes != marker.nbytes:
            return MISSED  # another one's, or gone since
        views, left = [], nbytes
        for view in load.into:
            views.append(view[:left])
            left -= views[-1].nbytes
        link.fill(views)
        return Loaded.filled(nbytes)

    def screen_store(self, store: Store, /) -> Stored | None:
        if not store.nbytes:
            return Stored.refused("empty: the server keeps no such value")
        return super().screen_store(store)

    def store_blocking(self, store: Store, /) -> Stored:
        try:
            return self._try("store", lambda link: self._store(link, store))
        except BackendError as error:
            return Stored.failed(error.with_traceback(None))

    def _store(self, link: Link, store: Store) -> Stored:
        name = self._name(store.key)
        marker = self._marker(link, name)
        if marker is not None and link.exists(marker.value_name(name)):
            return PRESENT
        marker = Marker(store.nbytes, self.context.random.randbytes(16))
        own = marker.value_name(name)
        if self._way is not None:
            code = self._way.write(own, store.parts[0])
        else:
            try:
                code = self._mend(link)
                if code == DONE:
                    code = link.put(own, store.parts)
            except OSError:
                self._torn.append(own)
                raise
        if code == DONE:
            code = link.put(name, [memoryview(marker.pack(name))])
        if code == FULL:
            return Stored.refused("full: the server has no memory for it")
        if code != DONE:
            raise Broken(f"the server said {code}")
        return STORED

    def _mend(self, link: Link) -> int:
        """Give back what stores that ended half-way hold: the server never evicts it, and dies when it is deleted.

        Returns the server's last code.
        """
        with self._lock:
            torn, self._torn = self._torn, deque(maxlen=TORN_MOST)
        code = DONE
        try:
            while torn and (code := link.put(torn[-1], [memoryview(b"-")])) == DONE:
                link.delete([torn.pop()])
        finally:
            self._torn.extend(torn)
        return code

    # -- keys ------------------------------------------------------------------------------------------------

    def lookup_blocking(self, keys: Sequence[Key], /) -> Sequence[Found | None]:
        return self._try("lookup", lambda link: [self._found(link, key) for key in keys])

    def _found(self, link: Link, key: Key) -> Found | None:
        name = self._name(key)
        marker = self._marker(link, name)
        if marker is None or not link.exists(marker.value_name(name)):
            return None
        return Found(marker.nbytes, promise=False)

    def delete_blocking(self, keys: Sequence[Key], /) -> int:
        return self._try("delete", lambda link: self._delete(link, keys))

    def _delete(self, link: Link, keys: Sequence[Key]) -> int:
        """Markers first, so that nobody finds a marker without a value."""
        names = [self._name(key) for key in dict.fromkeys(keys)]
        markers = [(name, self._marker(link, name)) for name in names]
        values = [marker.value_name(name) for name, marker in markers if marker is not None]
        count = 0
        for first in range(0, len(names), DELETED_AT_ONCE):
            count += link.delete(names[first : first + DELETED_AT_ONCE])
        for first in range(0, len(values), DELETED_AT_ONCE):
            link.delete(values[first : first + DELETED_AT_ONCE])
        return count

    # -- memory ----------------------------------------------------------------------------------------------

    async def register(self, region: Region, /) -> bool:
        way = self._registering("register")
        return await self.call("register", way.register, region.pointer, region.nbytes)

    async def unregister(self, region: Region, /) -> None:
        await self.call("unregister", self._registering("unregister").forget, region.pointer)

    def _registering(self, verb: str) -> rdma.Way:
        if self._way is None:
            raise self._unsupported(verb)
        return self._way
