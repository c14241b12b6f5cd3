"""``lmcache server`` as its operator meets it."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lmcache_server.flags import FLAGS, Effect, page
from lmcache_server.listening import claim, disclaim

from lmcache_core.spi import ConfigError
from tests.wire.daemons import (
    PATIENCE,
    Daemon,
    check_leases,
    describe,
    identity_holds,
    key,
    store,
    wait_for,
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]


def run(*flags, **options):
    return subprocess.run(
        [sys.executable, "-m", "lmcache_core", "server", "--http-port", "none", "--prometheus-port", "none", *flags],
        capture_output=True, text=True, timeout=30, **options,
    )  # fmt: skip


def test_banner_says_what_serves_where(tmp_path):
    with Daemon(
        tmp_path, "--l2-disk-path", str(tmp_path / "kv"), "--l2-disk-size-gb", "0.1"
    ) as daemon:
        wait_for(lambda: "tier disk" in daemon.log.read_text())
        text = daemon.log.read_text()
    assert f"serves on {daemon.path}" in text
    assert "memory: 64 MiB, sealed; chunk_size 256" in text
    assert re.search(r"tier disk: disk, .*, ready", text)


def test_stop_flushes_and_the_next_start_has_it(tmp_path):
    disk = ("--l2-disk-path", str(tmp_path / "kv"), "--l2-disk-size-gb", "0.1")
    with Daemon(tmp_path, "--arena-mode", "shared-rw", *disk) as daemon:
        client = daemon.client()
        assert store(client, 1, 2) == [True, True]
        client.close()
        daemon.send(signal.SIGTERM)
        assert daemon.child.wait(PATIENCE) == 0
        assert not [name for name in os.listdir(tmp_path) if ".sock" in name]
        daemon.start()
        client = daemon.client(timeout=5)
        loaded = wait_for(lambda: (got := client.load([key(1), key(2)], None)).leases and got)
        check_leases(loaded.leases, [1, 2])
        client.release(loaded.leases)
        assert identity_holds(describe(client)["memory"])
        client.close()


def test_lock_whose_file_went_meanwhile_counts_for_nothing(tmp_path, monkeypatch):
    path, flock, first = str(tmp_path / "d.sock"), fcntl.flock, claim(str(tmp_path / "d.sock"))
    with pytest.raises(ConfigError, match="another daemon serves"):
        claim(path)

    def end_first(lock, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        disclaim(path, first)  # between the opening of its file and the lock on it
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", end_first)
    second = claim(path)
    with pytest.raises(ConfigError, match="another daemon serves"):
        claim(path)
    disclaim(path, second)
    assert os.listdir(tmp_path) == []


def test_stop_comes_in_time_although_a_client_holds_on(tmp_path):
    with Daemon(tmp_path, "--arena-mode", "shared-rw", "--drain-seconds", "1") as daemon:
        client = daemon.client()
        store(client, 1)
        loaded = client.load([key(1)], None)
        begun = time.monotonic()
        daemon.send(signal.SIGTERM)
        assert daemon.child.wait(PATIENCE) == 0
        assert 0.8 < time.monotonic() - begun < 4
        check_leases(loaded.leases, [1])
        client.close()


def test_hangup_reads_quotas_and_log_level_again(tmp_path):
    config = tmp_path / "cache.yaml"
    text = "tiers: [{cpu: {size: 64MiB}}]\n"
    config.write_text(text)
    with Daemon(tmp_path, "--config", str(config), "--arena-mode", "shared-rw") as daemon:
        client = daemon.client()
        config.write_text(text + "tenants: {small: {quota: 1MiB}}\n")
        daemon.send(signal.SIGHUP)
        wait_for(lambda: describe(client)["quotas"] == {"small": 1 << 20})
        assert store(client, 5, nbytes=2 << 20, tenant="small") == []
        config.write_text("tiers: nonsense\n")
        daemon.send(signal.SIGHUP)
        wait_for(lambda: "not reloaded" in daemon.log.read_text())
        assert store(client, 6) == [True]
        client.close()


def test_daemonize_returns_when_it_serves(tmp_path):
    path = str(tmp_path / "d.sock")
    log = str(tmp_path / "log")
    flags = ("--socket", path, "--port", "0", "--l1-size-gb", "0.03")
    done = run("--daemonize", "--log-file", log, *flags)
    assert done.returncode == 0, done.stderr
    pid = int(re.search(r"pid (\d+)", Path(log).read_text())[1])
    try:
        assert os.getsid(pid) != os.getsid(0)
        second = run("--daemonize", *flags)
        assert second.returncode == 2 and "another daemon serves" in second.stderr
    finally:
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not os.path.exists(path))


def test_pool_larger_than_the_machine_is_refused_with_what_fits():
    """Seen in LMCache#5127."""
    done = run("--port", "0", "--l1-size-gb", "99999")
    assert done.returncode == 2
    assert re.search(r"the largest size that fits is \d+MiB", done.stderr)


def test_pool_of_most_of_the_memory_serves_within_two_seconds(tmp_path):
    """Seen in LMCache#792."""
    available = int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1])
    size = available * 3 / 4 / 2**20
    begun = time.monotonic()
    with Daemon(tmp_path, "--arena-mode", "shared-rw", size=f"{size:.3f}") as daemon:
        client = daemon.client()
        assert store(client, 1) == [True]
        spent = time.monotonic() - begun
        assert describe(client)["memory"]["populated"] < describe(client)["memory"]["capacity"]
        client.close()
    assert spent < 2 + 1.5  # starting Python on a busy machine


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.effect is Effect.REFUSED][:3])
def test_refused_flags_say_why(flag):
    value = ("x",) if flag.value else ()
    done = run(flag.name, *value)
    assert done.returncode == 2
    assert flag.what in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prot", "3"), "no such flag: --prot; did you mean --port?"),
        (("--port",), "argument --port: expected one argument (see `lmcache server --help`)"),
        (("--chunk-size", "0"), "--chunk-size must be at least 1, not 0"),
        (("--log-level", "loud"), "--log-level: not one of the choices: 'loud'; valid: debug, info, warning, error"),
        (("--eviction-policy", "LUR"), "--eviction-policy: tiers.cpu.policy: no policy 'lur'; did you mean 'lru'?"),
        (("--l2-disk-path", "/tmp/kv"), "--l2-disk-path: needs --l2-disk-size-gb (in GiB) beside it"),
        (("--token-file", "/dev/null"), "--token-file /dev/null: it is empty"),
        (("--socket", "/nowhere/kv.sock"), "no socket at /nowhere/kv.sock: No such file or directory"),
        (("--socket", f"/tmp/{'x' * 200}"), f"no socket at /tmp/{'x' * 200}: AF_UNIX path too long"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_flag_is_one_line_in_its_own_words(flags, message):
    done = run("--port", "0", "--l1-size-gb", "0.03", *flags)
    assert (done.returncode, done.stderr) == (2, f"lmcache: {message}\n")


def test_open_address_needs_a_token():
    done = run("--host", "0.0.0.0", "--port", "6000")
    assert done.returncode == 2 and "--token-file" in done.stderr


def test_page_of_the_flags_is_up_to_date():
    assert (ROOT / "docs/reference/server-flags.md").read_text() == page()
