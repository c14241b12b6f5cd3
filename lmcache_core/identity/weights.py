"""Fingerprint of a model folder in seconds: names, sizes and samples, never a full read.

Two folders with equal fingerprints hold the same weights unless they differ only between the
samples, which training, quantising or merging never does. Times and inodes do not enter: nodes with
copies agree.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

WEIGHTS_TAG = b"lmcache.weights\x00"
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
SAMPLE_NBYTES = 256
SAMPLES = 256
"""Per file without a tensor table; a table's tensors are sampled at begin, middle and end each."""
TABLE_LIMIT = 64 << 20


def weights_fingerprint(folder: Path) -> bytes:
    """32 bytes that stand for the weights in a folder.

    Raises:
        FileNotFoundError: the folder holds no tensor file.
        OSError: a file cannot be read.
    """
    paths = sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    if not paths:
        wanted = ", ".join(SUFFIXES)
        raise FileNotFoundError(f"no tensor file in {folder} (expected one of {wanted})")
    state = hashlib.sha256(WEIGHTS_TAG)
    for path in paths:
        size = path.stat().st_size
        name = path.relative_to(folder).as_posix().encode()
        state.update(struct.pack("<IQ", len(name), size) + name + _file_digest(path, size))
    return state.digest()


def _file_digest(path: Path, size: int) -> bytes:
    state = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for offset, nbytes in _samples(file, path, size):
            file.seek(offset)
            state.update(struct.pack("<QQ", offset, nbytes) + file.read(nbytes))
    return state.digest()


def _samples(file: BinaryIO, path: Path, size: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) to read; a safetensors table is read whole: it has names and shapes."""
    table = int.from_bytes(file.read(8), "little") if path.suffix == ".safetensors" else 0
    if 0 < table <= min(TABLE_LIMIT, size - 8):
        yield 0, 8 + table
        file.seek(8)
        try:
            entries = json.loads(file.read(table))
            spans = [e["data_offsets"] for n, e in sorted(entries.items()) if n != "__metadata__"]
            places = [(8 + table + int(a), 8 + table + int(b)) for a, b in spans]
        except (ValueError, TypeError, KeyError, AttributeError):
            places = []  # not a table after all: sampled like any other file
        if places and all(8 + table <= a <= b <= size for a, b in places):
            for begin, end in places:
                last = max(begin, end - SAMPLE_NBYTES)
                for offset in sorted({begin, (begin + last) // 2, last}):
                    yield offset, min(SAMPLE_NBYTES, end - offset)
            return
    for i in range(SAMPLES):
        yield max(0, size - SAMPLE_NBYTES) * i // (SAMPLES - 1), SAMPLE_NBYTES
