"""Kill a real writer at random moments and look at what it leaves.

    python backends/disk/tests/killing.py [--kills 100] [--seed 0] [--folder F]

Each round forks a process that opens the folder, stores values as fast as it can and writes the number of each
acknowledged one to a pipe; the parent kills it with SIGKILL some time later (now and then before it has opened),
then reads every value of the round back. Prints one JSON document; exit status 1 when a value was torn or lost.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from lmcache_backend_disk import DiskBackend
from lmcache_backend_disk.config import Direct, DiskConfig, Sync

from lmcache_core.spi import Key, Load, LoadStatus, Store, StoreStatus
from lmcache_core.testing.contexts import test_context

SPACE = hashlib.sha256(b"killing").digest()
POOL = random.Random(0).randbytes(1 << 20)


def key(number: int) -> Key:
    return Key(SPACE, hashlib.sha256(b"%d" % number).digest(), 0)


def value(number: int) -> memoryview:
    """What belongs to a number: 1 byte to 400 KB, aligned lengths among them."""
    source = random.Random(number)
    nbytes = source.choice([source.randrange(1, 400_000), 4096 * source.randrange(1, 60)])
    offset = source.randrange(len(POOL) - nbytes)
    return memoryview(POOL)[offset : offset + nbytes]


def backend(folder: str, sync: Sync, direct: Direct) -> DiskBackend:
    config = DiskConfig(path=folder, sync=sync, direct=direct, fan_out=16)
    return DiskBackend(config, test_context(random=random.Random(os.urandom(8))))


async def write(folder: str, numbers: range, acknowledge: int, sync: Sync, direct: Direct) -> None:
    store = backend(folder, sync, direct)
    await store.open()
    for start in range(numbers.start, numbers.stop, 8):
        batch = range(start, min(start + 8, numbers.stop))

        def done(index: int, result: object, batch: range = batch) -> None:
            if getattr(result, "status", None) in (StoreStatus.STORED, StoreStatus.PRESENT):
                os.write(acknowledge, b"%d\n" % batch[index])

        await store.store([Store(key(n), (value(n),)) for n in batch], done=done)


def child(folder: str, numbers: range, pipe: int, sync: Sync, direct: Direct) -> None:
    try:
        asyncio.run(write(folder, numbers, pipe, sync, direct))
    finally:
        os._exit(0)


def read_back(store: DiskBackend, number: int) -> str:
    """``whole``, ``absent`` or ``torn``."""
    wanted = value(number)
    (found,) = store.lookup_blocking([key(number)])
    if found is None:
        return "absent"
    buffer = memoryview(bytearray(found.nbytes))
    loaded = store.load_blocking(Load(key(number), (buffer,)))
    whole = loaded.status is LoadStatus.FILLED and buffer == wanted
    return "whole" if whole else "torn"


def run(folder: str, kills: int, seed: int) -> dict[str, int]:
    source = random.Random(seed)
    counts = dict.fromkeys(["kills", "acknowledged", "whole", "torn", "lost", "leftover"], 0)
    for number in range(kills):
        numbers = range(number * 1000, number * 1000 + 400)
        sync, direct = source.choice(list(Sync)), source.choice([Direct.AUTO, Direct.OFF])
        pipe, acknowledge = os.pipe()
        writer = os.fork()
        if writer == 0:
            child(folder, numbers, acknowledge, sync, direct)
        os.close(acknowledge)
        with open(pipe, "rb") as told:
            first = told.readline() if source.random() < 0.9 else b""  # then it is past opening
            time.sleep(source.random() * 0.02)
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
            # The last line may be cut off; a line that is there whole was acknowledged.
            lines = (first + told.read()).splitlines(keepends=True)
            acknowledged = {int(line) for line in lines if line.endswith(b"\n")}
        store = backend(folder, Sync.NONE, Direct.AUTO)
        store.open_blocking()
        states = {each: read_back(store, each) for each in numbers}
        counts["kills"] += 1
        counts["acknowledged"] += len(acknowledged)
        counts["whole"] += sum(state == "whole" for state in states.values())
        counts["torn"] += sum(state == "torn" for state in states.values())
        counts["lost"] += sum(states[each] != "whole" for each in acknowledged)
        counts["leftover"] += len(os.listdir(f"{folder}/tmp"))
        store.delete_blocking([key(each) for each in numbers])
        store.close_blocking()
    return counts


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        counts = run(folder, options.kills, options.seed)
    sys.stdout.write(json.dumps(counts) + "\n")
    return int(bool(counts["torn"] or counts["lost"] or counts["leftover"]))


if __name__ == "__main__":
    sys.exit(main())
