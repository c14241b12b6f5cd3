#!/usr/bin/env bash
# Build the Bigtable emulator from Debian's Go packages into .lmcache-work/bin, where the tests look for it.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(golang-go golang-google-cloud-dev)
if ! dpkg -s "${packages[@]}" >/dev/null 2>&1; then
    apt-get update -qq
    apt-get install -qq -y --no-install-recommends "${packages[@]}" >/dev/null
fi
mkdir -p .lmcache-work/bin
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
GO111MODULE=off GOPATH="$cache:/usr/share/gocode" GOCACHE="$cache/build" GOFLAGS=-trimpath \
    go build -o .lmcache-work/bin/cbtemulator .ci/bigtable.go
echo 'bigtable: built the emulator'
