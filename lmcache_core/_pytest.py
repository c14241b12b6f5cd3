"""What pytest loads in every environment that has this distribution: an option and a marker, nothing else."""

from __future__ import annotations

from typing import Any


def pytest_addoption(parser: Any) -> None:
    parser.getgroup("lmcache").addoption(
        "--conformance",
        metavar="FOLDER",
        help="write a conformance report for each class of law tests into FOLDER",
    )


def pytest_configure(config: Any) -> None:
    config.addinivalue_line("markers", "service(name): needs a running service of this name")
    if folder := config.getoption("--conformance"):
        from lmcache_core.testing.report import Recorder

        config.pluginmanager.register(Recorder(folder), "lmcache-conformance")
