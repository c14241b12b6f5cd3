"""A pretended store in this process, by the library's method names: for tests that must run without it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from lmcache_backend_mooncake.backend import MooncakeBackend
from lmcache_backend_mooncake.config import MooncakeConfig


class FakeStore:
    """What ``MooncakeDistributedStore`` does with memory and names; no segments, no leases.

    Args:
        values: what is shared by the clients of one store.
        limit: bytes after which it is full.
    """

    def __init__(self, values: dict[str, bytes], config: MooncakeConfig, limit: int | None = None):
        self.values, self.limit = values, limit
        self.must_register = config.over != "tcp"
        self.registered: dict[int, int] = {}
        self._lock = threading.Lock()

    def close(self) -> int:
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.values) for key in keys]

    def get_size(self, key: str) -> int:
        value = self.values.get(key)
        return -704 if value is None else len(value)

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]:
        return {key: [Replica(len(self.values[key]))] for key in keys if key in self.values}

    def batch_get_into(self, keys: list[str], places: list[int], sizes: list[int]) -> list[int]:
        return [self._get(*each) for each in zip(keys, places, sizes, strict=True)]

    def _get(self, key: str, place: int, size: int) -> int:
        value = self.values.get(key)
        if value is None:
            return -704
        if size < len(value) or not self._known(place, size):
            return -600
        ctypes.memmove(place, value, len(value))
        return len(value)

    def batch_put_from(
        self, keys: list[str], places: list[int], sizes: list[int], how: object
    ) -> list[int]:
        return [self._put(*each) for each in zip(keys, places, sizes, strict=True)]

    def _put(self, key: str, place: int, size: int) -> int:
        if not size or not self._known(place, size):
            return -600
        with self._lock:
            held = sum(map(len, self.values.values()))
            if self.limit is not None and held + size > self.limit:
                return -200
            self.values.setdefault(key, ctypes.string_at(place, size))
        return 0

    def batch_remove(self, keys: Sequence[str], force: bool) -> list[int]:
        return [-704 if self.values.pop(key, None) is None else 0 for key in keys]

    def register_buffer(self, place: int, size: int) -> int:
        self.registered[place] = size
        return 0

    def unregister_buffer(self, place: int) -> int:
        return -600 if self.registered.pop(place, None) is None else 0

    def _known(self, place: int, size: int) -> bool:
        return not self.must_register or any(
            first <= place and place + size <= first + room
            for first, room in self.registered.items()
        )


class Replica:
    """Where a value lies: in memory."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def is_memory_replica(self) -> bool:
        return True

    def get_memory_descriptor(self) -> Any:
        return SimpleNamespace(buffer_descriptor=SimpleNamespace(size=self._nbytes))


class FakeMooncake(MooncakeBackend):
    """The tier on pretended stores, one for each URL."""

    stores: ClassVar[dict[str, dict[str, bytes]]] = {}
    limit: ClassVar[int | None] = None

    @staticmethod
    def connect(config: MooncakeConfig) -> tuple[FakeStore, None]:
        values = FakeMooncake.stores.setdefault(config.url, {})
        return FakeStore(values, config, FakeMooncake.limit), None
