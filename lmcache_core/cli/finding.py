"""What ``lmcache doctor`` has to say about one thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["good", "note", "warning", "fault", "unreachable"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, how it is, and what to do where it is not good."""

    about: str
    state: State
    found: str
    remedy: str = ""

    @classmethod
    def judged(cls, good: bool, about: str, found: str, state: State, remedy: str) -> Finding:
        """A finding that has this state and this remedy unless all is good."""
        return cls(about, "good", found) if good else cls(about, state, found, remedy)
