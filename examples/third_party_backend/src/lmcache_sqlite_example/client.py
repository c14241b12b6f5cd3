"""The calls on the file: blocking, thread-safe."""

import sqlite3
from threading import Lock
from typing import Any

from lmcache_core.spi import Unavailable


class Client:
    """One connection, used by one thread at a time."""

    _file: sqlite3.Connection

    def __init__(self, path: str, size: int) -> None:
        self._path, self._size, self._lock = path, size, Lock()

    def open(self) -> None:
        self._file = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        self.run("PRAGMA journal_mode=WAL")
        self.run("CREATE TABLE IF NOT EXISTS kv (key TEXT PRIMARY KEY, value BLOB NOT NULL)")
        ((page,),) = self.run("PRAGMA page_size")[1]
        self.run(f"PRAGMA max_page_count={self._size // page}")

    def run(self, statement: str, *values: Any) -> tuple[int, list[Any]]:
        """Run one statement and return how many rows it changed, and its rows."""
        try:
            with self._lock:
                cursor = self._file.execute(statement, values)
                return cursor.rowcount, cursor.fetchall()
        except sqlite3.Error as error:
            raise Unavailable(f"sqlite: {error}") from error

    def interrupt(self) -> None:
        """Make the statement that is running fail; from any thread."""
        self._file.interrupt()

    def close(self) -> None:
        """Disconnect; also when never connected."""
        if hasattr(self, "_file"):
            self._file.close()
