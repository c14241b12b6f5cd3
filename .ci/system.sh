#!/usr/bin/env bash
# Debian packages that CI promises; asks the package lists only when something is missing.
set -euo pipefail

python_version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
missing=()
for pair in make:make c++:g++ git:git fio:fio ps:procps; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
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
