"""What the disk gives: fio with one file per object, the same sizes, count and depth as ours.

Used by ``benchmarks/disk.py``; alone it runs one job and prints the command line and bytes per second:

    python benchmarks/limits/fio.py FOLDER write 4194304 128 --depth 8 --sync
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
from pathlib import Path


def command(
    folder: Path, verb: str, *, nbytes: int, count: int, depth: int, direct: bool, sync: bool
) -> list[str]:
    """The fio command line: ``depth`` threads, each moving its share of ``count`` files one after another."""
    line = [
        "fio", "--name=object", f"--directory={folder}", f"--rw={verb}", f"--bs={nbytes}",
        f"--filesize={nbytes}", f"--nrfiles={count // depth}", f"--numjobs={depth}", "--thread",
        "--openfiles=1", "--file_service_type=sequential", "--ioengine=psync",
        f"--direct={int(direct)}", "--group_reporting", "--output-format=json",
    ]  # fmt: skip
    if verb == "write":
        line += ["--create_on_open=1", "--fallocate=keep"]
    if sync:
        line.append("--fdatasync=1")
    if not direct:
        line.append("--invalidate=0")  # warm page cache, as a reader of a fresh value has it
    return line


def run(line: list[str]) -> float:
    """Bytes per second of one job."""
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return float(max(job["read"]["bw_bytes"], job["write"]["bw_bytes"]))


def available() -> bool:
    """Whether fio is installed."""
    return shutil.which("fio") is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("verb", choices=["read", "write"])
    parser.add_argument("nbytes", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--buffered", action="store_true")
    parser.add_argument("--sync", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    line = command(
        options.folder, options.verb, nbytes=options.nbytes, count=options.count,
        depth=options.depth, direct=not options.buffered, sync=options.sync,
    )  # fmt: skip
    print(shlex.join(line))
    print(f"{run(line) / 1e6:.0f} MB/s")


if __name__ == "__main__":
    main()
