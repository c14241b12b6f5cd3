#!/usr/bin/env bash
# Debian packages that CI promises; asks the package lists only when something is missing.
set -euo pipefail

# One lost packet is no reason to stop.
mkdir -p .lmcache-work
echo 'Acquire::Retries "5";' >.lmcache-work/apt.conf
export APT_CONFIG=$PWD/.lmcache-work/apt.conf

python_version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
missing=()
for pair in make:make c++:g++ git:git fio:fio ps:procps; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
# What the Mooncake wheel needs and does not bring.
for pair in libibverbs.so.1:libibverbs1 libnuma.so.1:libnuma1 libcurl.so.4:libcurl4; do
    python3 -c "import ctypes; ctypes.CDLL('${pair%%:*}')" 2>/dev/null || missing+=("${pair##*:}")
done
python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=("python$python_version-venv")
python3 - <<'PROBE' || missing+=("python$python_version-dev")
import pathlib, sys, sysconfig
sys.exit(not (pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h").exists())
PROBE
# The unprivileged run needs a Python outside root's home.
if [[ $(id -u) == 0 ]] && ! runuser -u nobody -- "$(python3 -c 'import sys; print(sys._base_executable)')" -c '' 2>/dev/null; then
    for package in python3 python3-venv python3-dev; do
        dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
    done
fi

# Unpacked, not installed: the package would start a server of its own.
prometheus=.lmcache-work/prometheus
if ! command -v prometheus >/dev/null && [[ ! -x $prometheus/usr/bin/prometheus ]] && command -v apt-get >/dev/null; then
    [[ $(id -u) != 0 ]] || apt-get update -qq
    mkdir -p "$prometheus"
    (cd "$prometheus" && apt-get download -qq prometheus && dpkg -x prometheus_*.deb . && rm -f prometheus_*.deb)
    echo 'system: unpacked prometheus'
fi

# The same for servers that tests start themselves; .lmcache-work/bin has a starter for each.
unpack() { # COMMAND PACKAGE...: the package with the command and the libraries that a bare Debian lacks
    local command=$1 debian=.lmcache-work/debian
    shift
    if command -v "$command" >/dev/null || [[ -x .lmcache-work/bin/$command ]] || ! command -v apt-get >/dev/null; then
        return
    fi
    [[ $(id -u) != 0 ]] || apt-get update -qq
    mkdir -p "$debian" .lmcache-work/bin
    (cd "$debian" && apt-get download -qq "$@" && for each in *.deb; do dpkg -x "$each" .; done && rm -f ./*.deb) || return
    cat >".lmcache-work/bin/$command" <<'STARTER'
#!/bin/sh
tree=$(dirname "$(dirname "$(readlink -f "$0")")")/debian
LD_LIBRARY_PATH=$(echo "$tree"/usr/lib/*-linux-gnu "$tree"/lib/*-linux-gnu | tr ' ' :) exec "$tree/usr/bin/$(basename "$0")" "$@"
STARTER
    chmod +x ".lmcache-work/bin/$command"
    echo "system: unpacked $command"
}
unpack redis-server redis-server redis-tools libhiredis0.14 libjemalloc2 liblua5.1-0 liblzf1 lua-bitop lua-cjson libatomic1
unpack memcached memcached libevent-2.1-7 libsasl2-2
unpack etcd etcd-server
# Two mounts of one folder, for tests of shared ones; without it they share the folder itself.
unpack bindfs bindfs libfuse2 || echo 'system: no bindfs'
if ! command -v cbtemulator >/dev/null && [[ ! -x .lmcache-work/bin/cbtemulator && $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    bash .ci/bigtable.sh
fi

if ((${#missing[@]} == 0)); then
    echo 'system: everything is there'
    exit
fi
if ! command -v apt-get >/dev/null || [[ $(id -u) != 0 ]]; then
    echo "system: install ${missing[*]}" >&2
    exit 1
fi
apt-get update -qq
apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
echo "system: installed ${missing[*]}"
