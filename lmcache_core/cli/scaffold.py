"""``lmcache plugins new``: a plugin from template files.

Templates lie in ``lmcache_core/testing/templates/KIND``. In file names and contents ``@name@`` stands for the
plugin's name, ``@package@`` for the Python package, ``@dist@`` for the distribution and ``@Class@`` for the
class stem; a ``.template`` in a file name is dropped.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from lmcache_core.spi import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def scaffold(kind: str, name: str, into: Path, /) -> Path:
    """Make ``into/lmcache-KIND-NAME`` and return it.

    Raises:
        ConfigError: no template of this kind, not a name, or the folder is there already.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"not a plugin name: {name!r} (lower case, digits, single hyphens)")
    templates = Path(str(files("lmcache_core.testing"))) / "templates"
    kinds = sorted(folder.name for folder in templates.iterdir() if folder.is_dir())
    if kind not in kinds:
        raise ConfigError(f"no template for {kind!r}; there are: {', '.join(kinds)}")
    dist = f"lmcache-{kind}-{name}"
    target = into / dist
    if target.exists():
        raise ConfigError(f"{target} is there already")
    stem = "".join(part.capitalize() for part in name.split("-"))
    words = {"@name@": name, "@package@": dist.replace("-", "_"), "@dist@": dist, "@Class@": stem}
    for source in (templates / kind).rglob("*"):
        if source.is_file() and source.parent.name != "__pycache__":
            place = _filled(str(source.relative_to(templates / kind)), words)
            made = target / place.replace(".template", "")
            made.parent.mkdir(parents=True, exist_ok=True)
            made.write_text(_filled(source.read_text(encoding="utf-8"), words), encoding="utf-8")
    return target


def _filled(text: str, words: dict[str, str]) -> str:
    return re.sub("|".join(words), lambda match: words[match[0]], text)
