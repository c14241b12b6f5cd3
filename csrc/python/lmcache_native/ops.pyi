# Contract and documentation: lmcache_core/ops.py. Signatures: those in bindings/ops.cpp.
from collections.abc import Sequence
from typing import Final, Protocol

from typing_extensions import Buffer

class PlaneTable(Protocol):
    @property
    def packed(self) -> Buffer: ...

INSTRUCTIONS: Final[str]
INSTRUCTION_SETS: Final[tuple[str, ...]]

def select(name: str) -> None: ...
def copy(dst: Buffer, src: Buffer, *, threads: int = 1) -> None: ...
def digest(data: Buffer, seed: int) -> bytes: ...
def copy_and_digest(dst: Buffer, src: Buffer, seed: int) -> bytes: ...
def chain(root: Buffer, tokens: Buffer, chunk_tokens: int) -> bytes: ...
def pack_tokens(ids: Sequence[int]) -> bytes: ...
def gather(
    table: PlaneTable,
    block_ids: Buffer,
    first: int,
    count: int,
    dst: Buffer,
    *,
    seed: int | None = None,
    threads: int = 1,
) -> bytes | None: ...
def scatter(
    table: PlaneTable,
    block_ids: Buffer,
    first: int,
    count: int,
    src: Buffer,
    *,
    seed: int | None = None,
    digests: Buffer | None = None,
    threads: int = 1,
) -> int: ...
def populate(view: Buffer, *, threads: int = 1) -> None: ...
