"""A process may end while a daemon thread is inside a call."""

import subprocess
import sys

PROGRAM = """
import mmap, threading, time
import lmcache_native.ops as ops
memory = memoryview(mmap.mmap(-1, 1 << 20))
inside = threading.Event()
def work():
    inside.set()
    while True:
        ops.populate(memory, threads=1)
threading.Thread(target=work, daemon=True).start()
inside.wait()
time.sleep(0.001)
"""


def test_a_thread_inside_a_call_does_not_abort_the_process() -> None:
    for _ in range(12):
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
        )
        assert (ended.returncode, ended.stderr) == (0, "")
