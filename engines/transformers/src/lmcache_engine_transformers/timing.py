"""Who takes the time of a call: the model, or the cache in front of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import LogitsProcessor


class Stopwatch(LogitsProcessor):
    """Changes nothing; notes when the first scores were there, and what CPU time the process had used by then."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.cpu = 0.0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.first is None:
            self.first, self.cpu = time.perf_counter(), time.process_time()
        return scores


class Own:
    """Time since it was made, less what the model took: seconds by the clock, and of this thread's CPU."""

    def __init__(self) -> None:
        self._model: tuple[float, ...] = (0.0, 0.0)
        self._began = self._now()

    @contextmanager
    def model(self) -> Iterator[None]:
        """Around what the model computes."""
        began = self._now()
        try:
            yield
        finally:
            spent = zip(self._model, began, self._now(), strict=True)
            self._model = tuple(so_far + then - first for so_far, first, then in spent)

    def spent(self) -> tuple[float, ...]:
        rows = zip(self._now(), self._began, self._model, strict=True)
        return tuple(now - began - model for now, began, model in rows)

    @property
    def computing(self) -> float:
        """Seconds the model took."""
        return self._model[0]

    def _now(self) -> tuple[float, ...]:
        return time.perf_counter(), time.thread_time()
