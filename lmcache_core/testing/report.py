"""``pytest --conformance FOLDER``: one report for each law class that ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import SkipTest

from lmcache_core.testing.laws import Outcome, Verdict, conformance, write_report


class Recorder:
    """A pytest plugin object; notes how each law test ended and writes the reports at the end.

    A class is reported under its attribute ``plugin`` (else its name) and ``version``.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.verdicts: dict[type, dict[str, Verdict]] = {}

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        number = getattr(getattr(item, "obj", None), "law", None)
        if number is None or (call.when == "teardown" and call.excinfo is None):
            return
        outcome, reason = Outcome.PASSED, ""
        if call.excinfo is not None:
            skipped = call.excinfo.errisinstance(SkipTest) or call.excinfo.typename == "Skipped"
            outcome = Outcome.SKIPPED if skipped else Outcome.FAILED
            reason = str(call.excinfo.value).split("\n", 1)[0]
        if call.when == "call" or outcome is not Outcome.PASSED:
            self.verdicts.setdefault(item.cls, {})[item.name] = Verdict(
                number, item.name, outcome, reason
            )

    def pytest_sessionfinish(self, session: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for tests, verdicts in self.verdicts.items():
            name = getattr(tests, "plugin", tests.__name__)
            content = conformance(name, getattr(tests, "version", ""), list(verdicts.values()))
            write_report(self.folder / f"{name}.json", content)
            if all(one.outcome is Outcome.SKIPPED for one in verdicts.values()):
                session.exitstatus = 1  # nothing was shown: green would be a lie
