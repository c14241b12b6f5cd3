"""Commands of ``lmcache``, run in this process."""

import io
import json
import os
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from lmcache_core.cli import main


class Terminal(io.StringIO):
    def isatty(self):
        return True


def lmcache(daemon, *words, terminal=False, **env):
    """Run a command in this process."""
    where = {} if daemon is None else {"LMCACHE_DAEMON": f"unix://{daemon.path}"}
    out, err = io.StringIO(), Terminal() if terminal else io.StringIO()
    with mock.patch.dict(os.environ, {**where, **env}), redirect_stdout(out), redirect_stderr(err):
        status = main(words)
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


def answered(daemon, *words, status=0):
    """The document a command prints."""
    done = lmcache(daemon, *words, "--json")
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout)
