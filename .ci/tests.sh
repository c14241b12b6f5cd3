#!/usr/bin/env bash
# `make test`, and what failed once more: hundreds of tests here race processes, signals and clocks on purpose, and a
# machine that stalls for a moment is no defect. Both runs are printed; what fails twice, or a run that broke off, fails.
# Arguments are handed to make; TEST_ARGS to pytest.
set -uo pipefail

export LMCACHE_NO_BUDGETS=1 # the stage around this has one: a slow run must not look like a failed test
make test "$@" PYTEST_ARGS="${TEST_ARGS-}" && exit 0
echo 'tests: what failed runs once more'
exec make test "$@" PYTEST_ARGS="${TEST_ARGS-} --last-failed --last-failed-no-failures=none"
