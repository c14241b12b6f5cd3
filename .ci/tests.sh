#!/usr/bin/env bash
# `make test`, and what failed once more: hundreds of tests here race processes, signals and clocks on purpose, and a
# machine that stalls for a moment is no defect. Both runs are printed; what fails twice, or a run that broke off, fails.
# Arguments are handed to make; TEST_ARGS to pytest.
set -uo pipefail

make test "$@" PYTEST_ARGS="${TEST_ARGS-}" && exit 0
echo 'tests: what failed runs once more'
exec make test "$@" PYTEST_ARGS="${TEST_ARGS-} --last-failed --last-failed-no-failures=none"
