"""Recorded requests, dealt out to clients that ask at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmcache_core.spi import Key, Refusal
from lmcache_core.testing.replay import distinct, read_trace
from lmcache_core.wire.client import DaemonClient

TRACE = Path(__file__).parents[1] / "data/traces/mooncake_conversation_trace.jsonl.gz"
NBYTES = 4096
"""Of a value: hit rates depend on how many there are, not on how large they are."""


def recorded(count: int, share: float) -> tuple[list[list[Key]], float]:
    """The first requests of the trace as keys, and a share of their distinct values in GiB."""
    requests = read_trace(TRACE)[:count]
    keys = [[Key(bytes(32), block.to_bytes(32, "big")) for block in each] for each in requests]
    return keys, int(distinct(requests) * share) * NBYTES / 2**30


def hit_rate(clients: Sequence[DaemonClient], requests: Sequence[list[Key]]) -> float:
    """Share of values found, each request asked by whichever client is free."""
    rest, lock = iter(requests), threading.Lock()
    counts: list[tuple[int, int]] = []

    def work(client: DaemonClient) -> None:
        for keys in _dealt(rest, lock):
            loaded = client.load(keys, None)
            good = len(loaded.leases)
            client.release(loaded.leases)
            if good < len(keys):
                held = client.reserve([(key, NBYTES) for key in keys[good:]], None)
                mine = [each for each in held if not isinstance(each, Refusal)]
                client.commit_batch(mine, [bytes(16)] * len(mine))
            counts.append((good, len(keys)))

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == len(requests)
    return sum(good for good, _ in counts) / sum(asked for _, asked in counts)


def _dealt(rest: Iterator[list[Key]], lock: threading.Lock) -> Iterator[list[Key]]:
    while True:
        with lock:
            keys = next(rest, None)
        if keys is None:
            return
        yield keys
