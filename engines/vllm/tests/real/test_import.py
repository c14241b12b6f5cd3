"""What the connector adds to the start of an engine that has imported vLLM."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import time, vllm, vllm.v1.engine.core, vllm.v1.worker.gpu_worker
begun = time.process_time()
import lmcache.integration.vllm.lmcache_mp_connector, lmcache.integration.vllm.vllm_v1_adapter
import lmcache_engine_vllm.connector
print(time.process_time() - begun)
"""


def test_the_connector_imports_within_a_second_beyond_vllm() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    seconds = float(done.stdout.split()[-1])
    print(f"import of the connector: {seconds:.2f} s beyond vLLM")  # noqa: T201
    assert seconds <= 1
