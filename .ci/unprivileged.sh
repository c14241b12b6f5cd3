#!/usr/bin/env bash
# `make setup` and `make test` as a person who is not root, in a copy of the tree of his own.
# TEST_ARGS is handed to pytest.
set -euo pipefail

if [[ $(id -u) != 0 ]]; then
    echo 'unprivileged: this run has no root already'
    exec bash .ci/tests.sh
fi

user=lmcachetest
id "$user" >/dev/null 2>&1 || useradd --system --no-create-home --shell /usr/sbin/nologin "$user"
home=$(mktemp -d /tmp/lmcachetest.XXXXXX)
trap 'rm -rf "$home"' EXIT
mkdir "$home/tree" "$home/tmp"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -pt "$home/tree"
mkdir -p "$home/tree/.lmcache-work"
for part in prometheus debian bin; do # unpacked by system.sh, not installed
    [[ ! -d .lmcache-work/$part ]] || cp -r ".lmcache-work/$part" "$home/tree/.lmcache-work/"
done
chown -R "$user" "$home"
chmod 700 "$home"

as_user() {
    runuser -u "$user" -- env -C "$home/tree" HOME="$home" TMPDIR="$home/tmp" USER="$user" "$@"
}

python=
for candidate in "$(python3 -c 'import sys; print(sys._base_executable)')" /usr/bin/python3.1[1-9]; do
    if as_user "$candidate" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[[ -n $python ]] || { echo 'unprivileged: no Python >= 3.11 with venv that this user may run' >&2; exit 1; }

as_user make setup PYTHON="$python"
as_user bash .ci/tests.sh PYTHON="$python"
