"""A type checker of a plugin's author knows the type of every name in the contract."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_contract_is_completely_typed(root: Path) -> None:
    binaries = Path(sys.executable).parent
    # the interpreter is found by PATH: the option for it is not heeded together with --verifytypes
    environment = os.environ | {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(
        [
            binaries / "pyright",
            "--verifytypes",
            "lmcache_core.spi",
            "--ignoreexternal",
            "--outputjson",
        ],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(result.stdout)["typeCompleteness"]
    lacking = [
        symbol["name"]
        for symbol in report["symbols"]
        if symbol["isExported"] and (not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"])
    ]
    assert lacking == []
    assert report["completenessScore"] == 1
    assert report["exportedSymbolCounts"]["withKnownType"] > 300
