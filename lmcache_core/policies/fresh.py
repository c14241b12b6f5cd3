"""The touch that ends an insertion is not a reuse.

A *correlated reference* in the words of E. O'Neil, P. O'Neil, G. Weikum, The LRU-K page replacement
algorithm for database disk buffering, SIGMOD 1993.
"""

from __future__ import annotations

from collections import OrderedDict

PERIOD = 512
"""Insertions after which even the first touch is a reuse."""


class Fresh(OrderedDict[int, None]):
    """Slots inserted lately and not touched since."""

    def add(self, slot: int) -> None:
        """Note an insertion; the oldest of too many is fresh no more."""
        self[slot] = None
        if len(self) > PERIOD:
            self.popitem(last=False)

    def end(self, slot: int) -> bool:
        """Whether the slot was fresh; it is not any longer."""
        if slot in self:
            del self[slot]
            return True
        return False
