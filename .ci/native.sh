#!/usr/bin/env bash
# The C++ library's own tests, as released and once more with sanitizers.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

if ! command -v "${CXX:-c++}" >/dev/null; then
    echo 'native: no C++ compiler: install g++; skipped'
    exit
fi
for kind in release address,undefined; do
    build=.lmcache-work/ctest/${kind%%,*}
    options=(-DLMCACHE_TESTS=ON -DLMCACHE_BINDINGS=OFF)
    [[ $kind == release ]] || options+=("-DLMCACHE_SANITIZE=$kind")
    cmake -S csrc -B "$build" -G Ninja "${options[@]}" >/dev/null
    cmake --build "$build" >/dev/null
    echo "native: ctest, $kind"
    ctest --test-dir "$build" --output-on-failure --no-tests=error
done
