"""The one place that touches Google's library: calls on one table, their errors in words of the contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc  # type: ignore[import-untyped]
from google.cloud.bigtable_v2 import types
from google.cloud.bigtable_v2.services.bigtable.transports import BigtableGrpcTransport

from lmcache_backend_bigtable.config import BigtableConfig
from lmcache_core.spi import BackendError, ConfigError, Unavailable

SERVICE = "/google.bigtable.v2.Bigtable/"
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
BUSY = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.CANCELLED,
}
HOPELESS = {
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
}


class Declined(BackendError):
    """Bigtable said no; no other try will change that."""


class Table:
    """Calls on one table, each no longer than the timeout. Thread-safe.

    Raises (also from the methods):
        ConfigError: there are no credentials.
        Unavailable: no answer.
        Declined: the answer is no.
    """

    def __init__(self, config: BigtableConfig) -> None:
        self._name = config.table
        self._profile = config.app_profile
        self._timeout = float(config.timeout)
        self._where = [
            (
                "x-goog-request-params",
                f"table_name={config.table}&app_profile_id={config.app_profile}",
            )
        ]
        if config.emulator:
            self._channel = grpc.insecure_channel(config.emulator, OPTIONS)
        else:
            self._channel = _channel(config)
        read, change = types.ReadRowsRequest, types.CheckAndMutateRowRequest
        self._read = self._channel.unary_stream(
            f"{SERVICE}ReadRows",
            request_serializer=read.serialize,
            response_deserializer=type(read_answer()).FromString,
        )
        self._change = self._channel.unary_unary(
            f"{SERVICE}CheckAndMutateRow",
            request_serializer=change.serialize,
            response_deserializer=types.CheckAndMutateRowResponse.deserialize,
        )

    def close(self) -> None:
        self._channel.close()

    def read(self, rows: types.RowSet, only: types.RowFilter, limit: int = 0) -> Iterator[Any]:
        """The chunks of cells of some rows, in the order of rows and columns."""
        request = types.ReadRowsRequest(
            table_name=self._name,
            app_profile_id=self._profile,
            rows=rows,
            filter=only,
            rows_limit=limit,
        )
        stream = self._read(request, timeout=self._timeout, metadata=self._where)
        try:
            for answer in stream:
                yield from answer.chunks
        except grpc.RpcError as error:
            raise _told(error) from None
        finally:
            stream.cancel()

    def change(
        self,
        row: bytes,
        *,
        present: list[types.Mutation] | None = None,
        absent: list[types.Mutation] | None = None,
    ) -> bool:
        """Change a row in one step, in a way that depends on whether it is there; and tell whether it was."""
        request = types.CheckAndMutateRowRequest(
            table_name=self._name, app_profile_id=self._profile, row_key=row,
            predicate_filter=types.RowFilter(cells_per_row_limit_filter=1),
            true_mutations=present or [], false_mutations=absent or [],
        )  # fmt: skip
        try:
            answer = self._change(request, timeout=self._timeout, metadata=self._where)
        except grpc.RpcError as error:
            raise _told(error) from None
        return bool(answer.predicate_matched)


def read_answer() -> Any:
    """An empty answer in the form that costs no wrapper per chunk."""
    return types.ReadRowsResponse.pb(types.ReadRowsResponse())


def _channel(config: BigtableConfig) -> Any:
    from google.auth.exceptions import GoogleAuthError

    try:
        return BigtableGrpcTransport.create_channel(
            credentials_file=config.credentials_file or None, options=OPTIONS
        )
    except (GoogleAuthError, OSError, ValueError) as error:
        raise ConfigError(f"no credentials for {config.url}: {error}") from error


def _told(error: Any) -> BackendError:
    code = error.code()
    text = " ".join(str(error.details()).split())[:200].lower()
    message = f"bigtable said {code.name.lower().replace('_', ' ')}: {text}"
    return Declined(message) if code in HOPELESS else Unavailable(message, retryable=code in BUSY)
