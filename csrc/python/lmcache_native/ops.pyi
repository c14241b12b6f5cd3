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

class RansTables:
    def __init__(self, freqs: Buffer, bits: int) -> None: ...
    @property
    def bits(self) -> int: ...
    @property
    def classes(self) -> int: ...

def rans_bound(count: int, bits: int) -> int: ...
def rans_encode(tables: RansTables, classes: Buffer, symbols: Buffer, into: Buffer) -> int: ...
def rans_decode(tables: RansTables, classes: Buffer, source: Buffer, into: Buffer) -> bool: ...
def x12_encode(source: Buffer, into: Buffer, planes: int) -> int: ...
def x12_decode(source: Buffer, into: Buffer, planes: int) -> bool: ...
def xr_encode(source: Buffer, into: Buffer, planes: int, item: int, channels: int) -> int: ...
def xr_decode(source: Buffer, into: Buffer, planes: int, item: int, channels: int) -> bool: ...
def quant_nbytes(code: int, tokens: int, heads: int, dim: int, group: int) -> int: ...
def quant_encode(
    code: int,
    element: int,
    source: Buffer,
    into: Buffer,
    tokens: int,
    heads: int,
    dim: int,
    group: int,
) -> bool: ...
def quant_decode(
    code: int,
    element: int,
    source: Buffer,
    into: Buffer,
    tokens: int,
    heads: int,
    dim: int,
    group: int,
) -> None: ...

class Basis:
    def __init__(
        self, mean: Buffer, forward: Buffer, backward: Buffer, heads: int, dim: int
    ) -> None: ...

def basis_encode(
    basis: Basis,
    source: Buffer,
    symbols: Buffer,
    offset: int,
    stride: int,
    escapes: Buffer,
    steps: Buffer,
    limits: Buffer,
    deltas: Buffer,
    group: int,
    rounding: float,
    turns: Buffer,
    interleaved: bool,
    element: int,
    tokens: int,
) -> int: ...
def basis_decode(
    basis: Basis,
    symbols: Buffer,
    offset: int,
    stride: int,
    escapes: Buffer,
    into: Buffer,
    steps: Buffer,
    limits: Buffer,
    deltas: Buffer,
    group: int,
    turns: Buffer,
    interleaved: bool,
    element: int,
    tokens: int,
) -> int: ...
