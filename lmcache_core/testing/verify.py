"""``lmcache plugins verify``: the whole kit against one installed backend."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmcache_core.config import load, permissions
from lmcache_core.spi import AbstractBackend, ConfigError
from lmcache_core.testing.backend import BackendTests
from lmcache_core.testing.contexts import test_context
from lmcache_core.testing.harness import run_real
from lmcache_core.testing.laws import Outcome, conformance, run_laws, write_report
from lmcache_core.testing.stateful import StatefulBackendTests


class InstalledBackend(BackendTests, StatefulBackendTests):
    """The laws for a backend of which nothing is known but its name; subclasses carry the two functions."""

    examples = 5
    shrink = False  # in real time it takes a minute; the author's own tests shrink
    kind: type[AbstractBackend]
    configure: Callable[[], Any]

    def make_backend(self) -> AbstractBackend:
        self.config = type(self).configure()
        return self.kind(self.config, test_context(tier="verify"))

    def reopen(self, store: AbstractBackend) -> AbstractBackend:
        return self.kind(self.config, test_context(tier="verify"))


def verify(
    name: str,
    /,
    *,
    config: Path | str | None = None,
    only: str | None = None,
    as_json: bool = False,
    report: Path | str = "conformance.json",
) -> int:
    """Run the laws against a backend, print the verdicts, write ``report``; 0 when none is broken.

    Args:
        name: as in configuration.
        config: a configuration with a tier of this plugin; else the plugin's ``testing_config`` is used.
        only: one law or one test.

    Raises:
        ConfigError: no tier of this plugin in the file, or ``only`` names nothing.
        PluginError: the plugin cannot be used.
        BackendError: the store behind it cannot be opened, or there is no testing configuration.
    """
    found, configure, version = _backend(name, config)
    tests = type("Verified", (InstalledBackend,), {"kind": found, "configure": configure})
    run_real(_try(found(configure(), test_context(tier="verify"))), InstalledBackend.limit_s)
    try:
        verdicts = run_laws(tests, [only] if only else [])
    except ValueError as error:
        raise ConfigError(str(error)) from None
    content = conformance(name, version, verdicts)
    write_report(report, content)
    if as_json:
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    else:
        for one in verdicts:
            line = f"{one.law:4} {one.outcome.value:8} {one.test.removeprefix('test_')}"
            sys.stdout.write(f"{line}{': ' if one.reason else ''}{one.reason}\n")
    counts = Counter(one.outcome for one in verdicts)
    told = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome)
    sys.stderr.write(f"{name} {version}: {told}; written to {report}\n")
    if not counts[Outcome.PASSED] and not counts[Outcome.FAILED]:
        sys.stderr.write(f"{name}: no law was selected, so nothing was shown\n")
        return 1
    return 1 if counts[Outcome.FAILED] else 0


def _backend(
    name: str, config: Path | str | None
) -> tuple[type[AbstractBackend], Callable[[], Any], str]:
    """Class, maker of configurations, version."""
    if config is None:
        registry = permissions()
        found = registry.load("backends", name)
        configure = found.testing_config
    else:
        effective = load(config)
        registry = effective.registry
        found = registry.load("backends", name)
        options = [tier.options for tier in effective.config.tiers if tier.plugin == name]
        if not options:
            have = ", ".join(tier.plugin for tier in effective.config.tiers) or "none"
            raise ConfigError(f"{config}: no tier of plugin {name!r} (there: {have})")

        def configure() -> Any:
            return options[0]

    plain, _, dist = name.partition("@")
    versions = (
        offer.version
        for offer in registry.offers("backends")
        if offer.name == plain and dist in ("", offer.dist)
    )
    return found, configure, next(versions, "")


async def _try(store: AbstractBackend) -> None:
    """Open and close once, so that a store that is not there is one error and not fifty."""
    try:
        await store.open()
    finally:
        await store.aclose()
