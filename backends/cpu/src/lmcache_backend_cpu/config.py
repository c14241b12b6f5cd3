"""Options of the ``cpu`` tier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CPUConfig:
    """How the memory is taken.

    Attributes:
        huge_pages: use 2 MiB pages that the system has set aside; without them one warning and small pages.
        numa_node: prefer the memory of this node.
        populate: touch the memory in the background, so that the first stores do not pay for it.
    """

    huge_pages: bool = False
    numa_node: int | None = None
    populate: bool = True
