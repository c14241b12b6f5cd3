"""The backend keeps the laws."""

import contextlib
import sqlite3

from lmcache_sqlite_example import SqliteBackend
from lmcache_sqlite_example.config import SqliteConfig

from lmcache_core.spi import AbstractBackend, ByteSize, Key
from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import test_context as context
from lmcache_core.testing.stateful import StatefulBackendTests


class TestSqlite(BackendTests, StatefulBackendTests):
    plugin, examples = "sqlite-example", 5

    def make_backend(self) -> AbstractBackend:
        self.config = SqliteBackend.testing_config()
        return SqliteBackend(self.config, context())

    def make_small_backend(self, nbytes: int) -> AbstractBackend:
        path = SqliteBackend.testing_config().path
        return SqliteBackend(SqliteConfig(path, ByteSize(nbytes)), context())

    def reopen(self, store: AbstractBackend) -> AbstractBackend:
        return SqliteBackend(self.config, context())

    crash = reopen

    def peek(self, key: Key) -> bytes | None:
        rows = self.run_sql("SELECT value FROM kv WHERE key = ?", key.text)
        return rows[0][0] if rows else None

    def poke(self, key: Key, value: bytes) -> None:
        self.run_sql("INSERT INTO kv VALUES (?, ?)", key.text, value)

    def damage(self, key: Key) -> None:
        self.run_sql("UPDATE kv SET value = x'00' WHERE key = ?", key.text)

    def run_sql(self, statement: str, *values: object) -> list[tuple[bytes]]:
        with contextlib.closing(sqlite3.connect(self.config.path)) as file, file:
            return file.execute(statement, values).fetchall()
