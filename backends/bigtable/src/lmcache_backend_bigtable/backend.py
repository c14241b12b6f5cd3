"""The tier: a value is one row, its length in the first cell and its bytes in the following ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from google.cloud.bigtable_v2 import types

from lmcache_backend_bigtable.client import Declined, Table
from lmcache_backend_bigtable.config import BigtableConfig
from lmcache_core.spi import (
    MISSED,
    PRESENT,
    STORED,
    BackendError,
    BlockingBackend,
    BufferTooSmall,
    Capabilities,
    Closed,
    ConfigError,
    Context,
    Corrupt,
    Durability,
    Found,
    Key,
    Load,
    Loaded,
    ScanPage,
    Store,
    Stored,
)

LENGTH = b"#"
"""Column of the length, before those of the bytes, ``0000`` and so on."""
VALUE_MOST = 128 << 20
"""A row may have 256 MiB, and so may a request."""
EVERY = types.RowFilter(cells_per_column_limit_filter=1)
LENGTHS = types.RowFilter(
    chain=types.RowFilter.Chain(
        filters=[types.RowFilter(column_qualifier_regex_filter=LENGTH), EVERY]
    )
)


class BigtableBackend(BlockingBackend):
    """Values as rows of one table, written whole by one conditional change."""

    config_type = BigtableConfig
    config: BigtableConfig

    def __init__(self, config: BigtableConfig, context: Context, /) -> None:
        super().__init__(config, context)
        self._table: Table | None = None
        self.capabilities = Capabilities(
            scan=True,
            shared=True,
            persistent=True,
            hints=True,
            durability=Durability.POWER,
            max_value=VALUE_MOST,
            iov_max=1024,
            quiescence_s=config.timeout + 1.0,
        )

    @classmethod
    def testing_config(cls) -> BigtableConfig:
        """An emulator of this process, which ends with it."""
        from lmcache_backend_bigtable.serving import shared_server

        return shared_server().config()

    @property
    def table(self) -> Table:
        if self._table is None:
            raise Closed("bigtable backend is not open")
        return self._table

    def open_blocking(self) -> None:
        self.close_blocking()  # of an attempt that failed
        self._table = Table(self.config)
        row = f"probe-{self.context.pid:x}-{self.context.random.getrandbits(64):016x}".encode()
        value = memoryview(self.context.random.randbytes(64 << 10))
        now = self.context.clock.now
        try:
            began = now()
            self._put(row, [value])
            stored = now()
            into = memoryview(bytearray(value.nbytes))
            self._get(row, (into,), Key(b"", b""))
            self.context.log.info(
                "tier %s: %s answers in %.1f ms, gives 64 KiB in %.1f ms",
                self.context.tier, self.config.url, (stored - began) * 1e3, (now() - stored) * 1e3,
            )  # fmt: skip
            self._delete(row)
        except Declined as error:
            where = f"{self.config.url} with family {self.config.family}"
            raise ConfigError(f"tier {self.context.tier} cannot use {where}: {error}") from error

    def close_blocking(self) -> None:
        if self._table is not None:
            self._table.close()

    def lookup_blocking(self, keys: Sequence[Key], /) -> Sequence[Found | None]:
        rows = types.RowSet(row_keys=[key.text.encode() for key in keys])
        found = dict(self._lengths(rows))
        return [
            None if (nbytes := found.get(key.text)) is None else Found(nbytes, promise=False)
            for key in keys
        ]

    def load_blocking(self, load: Load, /) -> Loaded:
        try:
            got = self._get(load.key.text.encode(), load.into, load.key)
        except BackendError as error:
            return Loaded.failed(error.with_traceback(None))  # its frames hold the caller's views
        return MISSED if got is None else Loaded.filled(got)

    def store_blocking(self, store: Store, /) -> Stored:
        try:
            new = self._put(store.key.text.encode(), store.parts)
        except Declined as error:
            return Stored.refused(str(error))
        return STORED if new else PRESENT

    def delete_blocking(self, keys: Sequence[Key], /) -> int:
        return sum(self._delete(key.text.encode()) for key in keys)

    async def scan(self, after: str | None = None, /, *, limit: int = 1000) -> ScanPage:
        return await self.call("scan", self._scan, after, limit)

    def _scan(self, after: str | None, limit: int) -> ScanPage:
        behind = types.RowRange(start_key_open=(after or "").encode())
        values, foreign, last, count = [], [], None, 0
        for last, nbytes in self._lengths(types.RowSet(row_ranges=[behind]), limit):
            count += 1
            try:
                values.append((Key.parse(last), Found(nbytes, promise=False)))
            except ValueError:
                foreign.append(last)
        return ScanPage(values, last if count >= limit else None, foreign)

    def _put(self, row: bytes, parts: Sequence[memoryview]) -> bool:
        """Write a row; False where one is there."""
        whole = b"".join(parts)
        size = self.config.cell_size
        cells = [(LENGTH, len(whole).to_bytes(8, "big"))]
        cells += [
            (b"%04d" % number, whole[at : at + size])
            for number, at in enumerate(range(0, len(whole), size))
        ]
        family, stamp = self.config.family, int(self.context.clock.wall() * 1e3) * 1000
        changes = [
            types.Mutation(
                set_cell=types.Mutation.SetCell(
                    family_name=family, column_qualifier=column, timestamp_micros=stamp, value=cell
                )
            )
            for column, cell in cells
        ]
        return not self.table.change(row, absent=changes)

    def _delete(self, row: bytes) -> bool:
        gone = types.Mutation(delete_from_row=types.Mutation.DeleteFromRow())
        return self.table.change(row, present=[gone])

    def _get(self, row: bytes, into: Sequence[memoryview], key: Key) -> int | None:
        """Copy a row's value; its length, None where there is none."""
        room = sum(view.nbytes for view in into)
        sink, nbytes, first, done = _Sink(into), None, b"", 0
        for chunk in self.table.read(types.RowSet(row_keys=[row]), EVERY):
            if chunk.reset_row:
                sink, nbytes, first, done = _Sink(into), None, b"", 0
                continue
            if nbytes is None:
                first += chunk.value
                if chunk.value_size:
                    continue
                if len(first) != 8:
                    raise Corrupt(f"{key!r} does not begin with its length", operation="load")
                nbytes = int.from_bytes(first, "big")
                if nbytes > room:
                    problem = f"{key!r} needs {nbytes} bytes, the buffers have {room}"
                    raise BufferTooSmall(problem, operation="load")
            else:
                done += len(chunk.value)
                if done > nbytes:
                    break
                sink.take(memoryview(chunk.value))
        if nbytes is not None and done != nbytes:
            raise Corrupt(f"{key!r} says {nbytes} bytes and has others", operation="load")
        return nbytes

    def _lengths(self, rows: types.RowSet, limit: int = 0) -> Iterator[tuple[str, int]]:
        """Names and lengths of rows."""
        row = b""
        for chunk in self.table.read(rows, LENGTHS, limit):
            row = chunk.row_key or row
            if len(chunk.value) == 8:
                yield row.decode(errors="replace"), int.from_bytes(chunk.value, "big")


class _Sink:
    """Where the bytes of a value go, one buffer after another."""

    def __init__(self, into: Sequence[memoryview]) -> None:
        self._left = [view for view in into if view.nbytes]

    def take(self, piece: memoryview) -> None:
        """Copy a piece that fits."""
        while piece.nbytes:
            view = self._left[0]
            size = min(view.nbytes, piece.nbytes)
            view[:size] = piece[:size]
            piece = piece[size:]
            self._left[:1] = [view[size:]] if size < view.nbytes else []
