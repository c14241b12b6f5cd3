#!/usr/bin/env bash
# The C++ library's own tests, as released and once more with sanitizers; `native.sh thread` runs what has threads
# under the thread sanitizer (at night: the rest is sequential, and fifty times as slow there).
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

if ! command -v "${CXX:-c++}" >/dev/null; then
    echo 'native: no C++ compiler: install g++; skipped'
    exit
fi
for kind in ${1:-release address,undefined}; do
    only=()
    [[ $kind != thread ]] || only=(-R '^(pool|threads)$')
    build=.lmcache-work/ctest/${kind%%,*}
    options=(-DLMCACHE_TESTS=ON -DLMCACHE_BINDINGS=OFF)
    [[ $kind == release ]] || options+=("-DLMCACHE_SANITIZE=$kind")
    cmake -S csrc -B "$build" -G Ninja "${options[@]}" >/dev/null
    cmake --build "$build" >/dev/null
    echo "native: ctest, $kind"
    ctest --test-dir "$build" --output-on-failure --no-tests=error "${only[@]}"
done
