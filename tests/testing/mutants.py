"""Backends that break one law each, and how they are tried."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lmcache_core.memory.backend import MemoryBackend
from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.laws import Outcome, broken_laws, run_laws

Mutant = type[MemoryBackend]
LawsFor = Callable[[Mutant], type[BackendTests]]


class Mutants(dict[str, list[Mutant]]):
    """Mutants by the law that must kill them."""

    def breaks(self, law: str, /) -> Callable[[Mutant], Mutant]:
        """Decorate a mutant."""

        def register(mutant: Mutant) -> Mutant:
            self.setdefault(law, []).append(mutant)
            return mutant

        return register

    def each(self) -> pytest.MarkDecorator:
        """Give a test every ``law`` and ``mutant`` there are so far."""
        cases = [(law, mutant) for law, mutants in self.items() for mutant in mutants]
        names = [f"{law}-{mutant.__name__}" for law, mutant in cases]
        return pytest.mark.parametrize(("law", "mutant"), cases, ids=names)


def assert_killed_by_alone(law: str, mutant: Mutant, laws_for: LawsFor, /) -> None:
    verdicts = run_laws(laws_for(mutant))
    failed = [verdict for verdict in verdicts if verdict.outcome is Outcome.FAILED]
    assert broken_laws(verdicts) == {law}, failed
