"""Laws as tests: what a law test is, how it is run without pytest, and what a run amounts to."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import SkipTest

from lmcache_core.spi import PLUGIN_API

Decorator = Callable[[Callable[..., Any]], Callable[..., None]]
NUMBER = re.compile(r"[A-Z]\d+")


def read_laws(text: str | None, /) -> dict[str, str]:
    """Read laws written as ``* B1 Title. Sentence.`` (continued on indented lines) from a docstring."""
    laws: dict[str, str] = {}
    for item in re.split(r"^\* ", text or "", flags=re.MULTILINE)[1:]:
        paragraph = item.split("\n\n")[0]
        number, _, rest = paragraph.partition(" ")
        if NUMBER.fullmatch(number):
            laws[number] = " ".join(rest.split())
    return laws


def law(number: str, text: str, /, *arguments: Any) -> Decorator:
    """Turn a method into the test of a law: its docstring is the law, and its failure quotes it.

    A coroutine method is handed to the class's ``obey`` together with ``arguments``.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(self: Any) -> None:
            try:
                if inspect.iscoroutinefunction(body):
                    self.obey(body, *arguments)
                else:
                    body(self)
            except SkipTest:
                raise
            except Exception as error:
                error.add_note(f"law {number} {text}")
                raise

        # pytest would take the arguments of the body for fixtures
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        )
        test.__doc__ = text
        test.law = number  # type: ignore[attr-defined]
        return test

    return decorate


class Outcome(Enum):
    """How one law test ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one law test said; ``reason`` is one line, empty when it passed."""

    law: str
    test: str
    outcome: Outcome
    reason: str = ""


def law_tests(tests: type, /, only: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Name the law tests of a class as (law, method), in the order of the laws.

    Args:
        only: numbers of laws or names of tests (``test_`` may be left out); empty means all.

    Raises:
        ValueError: something in ``only`` is neither.
    """
    found = [
        (str(method.law), name)
        for name, method in inspect.getmembers(tests, callable)
        if hasattr(method, "law")
    ]
    known = {word for pair in found for word in pair}
    only = [f"test_{word}" if f"test_{word}" in known else word for word in only]
    if unknown := [word for word in only if word not in known]:
        laws = sorted({number for number, _ in found}, key=_order)
        raise ValueError(f"no law or test {unknown[0]!r}; laws are {', '.join(laws)}")
    chosen = [pair for pair in found if not only or not {*pair}.isdisjoint(only)]
    return sorted(chosen, key=lambda pair: (_order(pair[0]), pair[1]))


def run_laws(tests: type, /, only: Sequence[str] = ()) -> list[Verdict]:
    """Run the law tests of a class without pytest; each gets an instance of its own.

    Raises:
        RuntimeError: Python runs without assertions (``-O``), so that nothing could fail.
    """
    if not __debug__:
        raise RuntimeError("law tests are assertions; run them without -O")
    return [_judge(tests(), number, name) for number, name in law_tests(tests, only)]


def _judge(instance: Any, number: str, name: str) -> Verdict:
    try:
        getattr(instance, name)()
    except SkipTest as skipped:
        return Verdict(number, name, Outcome.SKIPPED, str(skipped))
    except Exception as error:  # noqa: BLE001  # whatever a plugin raises is the verdict on it
        lines = str(error).strip().splitlines()
        return Verdict(
            number, name, Outcome.FAILED, f"{type(error).__name__}: {lines[0] if lines else ''}"
        )
    return Verdict(number, name, Outcome.PASSED)


def broken_laws(verdicts: Iterable[Verdict], /) -> set[str]:
    """The laws of which at least one test failed."""
    return {verdict.law for verdict in verdicts if verdict.outcome is Outcome.FAILED}


def conformance(name: str, version: str, verdicts: Sequence[Verdict], /) -> dict[str, Any]:
    """The content of ``conformance.json``: what was run and what each law's tests said.

    A law is ``passed`` when a test of it passed and none failed.
    """
    laws: dict[str, Any] = {}
    for number in sorted({verdict.law for verdict in verdicts}, key=_order):
        mine = [verdict for verdict in verdicts if verdict.law == number]
        outcomes = {verdict.outcome for verdict in mine}
        best = next(
            outcome
            for outcome in (Outcome.FAILED, Outcome.PASSED, Outcome.SKIPPED)
            if outcome in outcomes
        )
        laws[number] = {
            "outcome": best.value,
            "tests": {verdict.test: verdict.outcome.value for verdict in mine},
            "reasons": {verdict.test: verdict.reason for verdict in mine if verdict.reason},
        }
    return {"name": name, "version": version, "plugin_api": PLUGIN_API, "laws": laws}


def write_report(path: Path | str, content: dict[str, Any], /) -> None:
    """Write a report, or add it to the one for the same name that is there."""
    Path(path).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _order(number: str) -> tuple[str, int]:
    return number[0], int(number[1:])
