"""The verbs."""

import atexit
import shutil
import tempfile
from collections.abc import Sequence

from lmcache_core import spi
from lmcache_sqlite_example.client import Client
from lmcache_sqlite_example.config import SqliteConfig


class SqliteBackend(spi.BlockingBackend):
    """Values in one file; WAL survives the end of the process, not the loss of power."""

    config_type = SqliteConfig
    capabilities = spi.Capabilities(
        ranges=True,
        scan=True,
        shared=True,
        persistent=True,
        durability=spi.Durability.PROCESS,
        max_value=1_000_000_000,
    )

    def __init__(self, config: SqliteConfig, context: spi.Context, /) -> None:
        super().__init__(config, context)
        self.client = Client(config.path, config.size)

    @classmethod
    def testing_config(cls) -> SqliteConfig:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, True)
        return SqliteConfig(f"{folder}/kv.sqlite", spi.ByteSize(1 << 30))

    def open_blocking(self) -> None:
        self.client.open()

    def close_blocking(self) -> None:
        self.client.close()

    def interrupt_blocking(self) -> None:
        self.client.interrupt()

    def lookup_blocking(self, keys: Sequence[spi.Key], /) -> Sequence[spi.Found | None]:
        lengths = [self._length(key) for key in keys]
        return [None if nbytes is None else spi.Found(nbytes) for nbytes in lengths]

    def load_blocking(self, load: spi.Load, /) -> spi.Loaded:
        whole, first = self._length(load.key), load.offset
        if whole is None:
            return spi.MISSED
        wanted = whole - first if load.length is None else load.length
        if not 0 <= first <= first + wanted <= whole:
            raise spi.Corrupt(f"{load.key!r} has {whole} bytes, asked for {wanted} from {first}")
        if load.room < wanted:
            raise spi.BufferTooSmall(f"{load.key!r} needs {wanted} bytes, got {load.room}")
        part = "SELECT substr(value, ?, ?) FROM kv WHERE key = ?"
        for (value,) in self.client.run(part, first + 1, wanted, load.key.text)[1]:
            load.into[0][:wanted] = value or b""  # SQL has no empty part
            return spi.Loaded.filled(wanted)
        return spi.MISSED

    def store_blocking(self, store: spi.Store, /) -> spi.Stored:
        insert, value = "INSERT OR IGNORE INTO kv VALUES (?, ?)", b"".join(store.parts)
        try:
            changed, _ = self.client.run(insert, store.key.text, value)
        except spi.Unavailable as error:
            if "full" not in str(error):
                raise
            return spi.Stored.refused(f"full: {self.config.size} bytes")
        return spi.STORED if changed else spi.PRESENT

    def delete_blocking(self, keys: Sequence[spi.Key], /) -> int:
        delete = "DELETE FROM kv WHERE key = ?"
        return sum(self.client.run(delete, key.text)[0] for key in keys)

    async def scan(self, after: str | None = None, /, *, limit: int = 1000) -> spi.ScanPage:
        page = "SELECT key, length(value) FROM kv WHERE key > ? ORDER BY key LIMIT ?"
        _, rows = await self.call("scan", self.client.run, page, after or "", limit)
        values = [(spi.Key.parse(key), spi.Found(nbytes)) for key, nbytes in rows]
        return spi.ScanPage(values, rows[-1][0] if len(rows) == limit else None)

    def _length(self, key: spi.Key) -> int | None:
        _, rows = self.client.run("SELECT length(value) FROM kv WHERE key = ?", key.text)
        return rows[0][0] if rows else None
