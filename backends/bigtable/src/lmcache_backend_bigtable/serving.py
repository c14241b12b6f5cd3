"""A Bigtable emulator of one's own: for tests, ``lmcache plugins verify``, the demo and benchmarks."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import grpc  # type: ignore[import-untyped]

from lmcache_backend_bigtable.config import BigtableConfig
from lmcache_core.spi import Unsupported
from lmcache_core.testing.services import Serving, find_program, free_port

PROGRAM = "cbtemulator"
START = "bash .ci/bigtable.sh  (or install google-cloud-cli-bigtable-emulator)"


class Emulator(Serving):
    """Google's emulator on the loopback, in memory, with one table."""

    def __init__(self, program: str, folder: Path, /) -> None:
        self.port = free_port()
        super().__init__([program, "-host=127.0.0.1", f"-port={self.port}"], folder=folder)

    def config(self) -> BigtableConfig:
        """Options of a tier here."""
        return BigtableConfig(url="bigtable://p/i/kv", emulator=f"127.0.0.1:{self.port}")

    def ready(self) -> bool:
        """Make the table."""
        from google.cloud.bigtable_admin_v2 import types

        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            create = channel.unary_unary(
                "/google.bigtable.admin.v2.BigtableTableAdmin/CreateTable",
                request_serializer=types.CreateTableRequest.serialize,
                response_deserializer=types.Table.deserialize,
            )
            table = types.Table(column_families={"kv": types.ColumnFamily()})
            request = types.CreateTableRequest(
                parent="projects/p/instances/i", table_id="kv", table=table
            )
            try:
                create(request, timeout=1.0)
            except grpc.RpcError as error:
                return bool(error.code() is grpc.StatusCode.ALREADY_EXISTS)
        return True


@functools.cache
def shared_server() -> Emulator:
    """One emulator for this process, stopped when it ends.

    Raises:
        Unsupported: the program is not here.
    """
    program = find_program(PROGRAM)
    if program is None:
        raise Unsupported(f"no {PROGRAM} here; {START}")
    return Emulator(program, Path(tempfile.mkdtemp(prefix="lmcache-bigtable-"))).start()
