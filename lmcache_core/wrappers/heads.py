"""Headers of stored frames, read without what follows them."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core import frame
from lmcache_core.spi import MISSED, AbstractBackend, Corrupt, Key, Load, Loaded, LoadStatus


async def read_headers(
    inner: AbstractBackend, places: Sequence[tuple[Key, int]], deadline: float | None, /
) -> list[frame.Header | Loaded]:
    """The header at each offset of a value, or the result that says why there is none.

    One call, two where a header is longer than usual; ``inner`` declares ``ranges``.
    """
    found: list[frame.Header | Loaded] = [MISSED] * len(places)
    lengths = dict.fromkeys(range(len(places)), frame.ALIGNMENT)
    while lengths:
        loads = [
            Load(places[at][0], (memoryview(bytearray(nbytes)),), places[at][1], nbytes)
            for at, nbytes in lengths.items()
        ]
        results = await inner.load(loads, deadline=deadline)
        longer = {}
        for at, load, result in zip(lengths, loads, results, strict=True):
            found[at] = result
            if result.status is LoadStatus.FILLED:
                view = load.into[0]
                if frame.length_of(view) > view.nbytes == frame.ALIGNMENT:
                    longer[at] = frame.length_of(view)
                    continue
                try:
                    found[at] = frame.open_header(view, load.key)
                except Corrupt as error:
                    found[at] = Loaded.failed(error)
        lengths = longer
    return found
