"""The helpers of the native operations never get in the way of the process they live in."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "lmcache_native.ops", reason="not built: pip install --no-build-isolation ./csrc"
)

BUSY = """
import os, sys, threading
from lmcache_native import ops
data = os.urandom(32 << 20)
target = bytearray(len(data))
ops.copy(target, data, threads=3)
assert target == data
"""


def run(code: str) -> None:
    """Run it in a fresh interpreter, which must end well and soon."""
    subprocess.run([sys.executable, "-c", BUSY + code], check=True, timeout=60)


def test_a_process_ends_while_helpers_sleep() -> None:
    run("")


def test_a_process_ends_while_helpers_work() -> None:
    """Seen in LMCache#265."""
    run(
        "work = lambda: [ops.copy(bytearray(len(data)), data, threads=3) for _ in range(1000)]\n"
        "threading.Thread(target=work, daemon=True).start()\n"
    )


def test_a_forked_child_has_helpers_of_its_own() -> None:
    run(
        "child = os.fork()\n"
        "other = bytearray(len(data))\n"
        "ops.copy(other, data, threads=3)\n"
        "same = other == data\n"
        "if child == 0: os._exit(0 if same else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0 and same\n"
    )


def test_other_threads_run_during_a_large_call() -> None:
    """Seen in dynamo#3747."""
    run(
        "seen, started, big = [], threading.Event(), bytes(256 << 20)\n"
        "def call():\n"
        "    started.set()\n"
        "    ops.digest(big, 0)\n"
        "    seen.append('call')\n"
        "sys.setswitchinterval(1000)\n"  # nobody takes the interpreter: it has to be given
        "thread = threading.Thread(target=call)\n"
        "thread.start()\n"
        "started.wait()\n"
        "seen.append('main')\n"
        "thread.join()\n"
        "assert seen == ['main', 'call'], seen\n"
    )


def test_the_module_needs_no_tensor_library_and_no_accelerator() -> None:
    """Seen in LMCache#1294 and LMCache#585: built against one torch, it did not load beside another."""
    from lmcache_native import ops

    module = Path(ops.__file__)
    assert module.name.endswith((".abi3.so", ".abi3.dylib", ".pyd"))
    assert re.findall(rb"lib(torch|c10|cuda|cudart|amdhip|nccl)\S*", module.read_bytes()) == []
