"""``lmcache plugins new``: a plugin from template files.

Templates lie in ``lmcache_core/testing/templates/KIND``. In file names and contents ``@name@`` stands for the
plugin's name, ``@package@`` for the Python package, ``@dist@`` for the distribution and ``@Class@`` for the
class stem; a ``.template`` at the end of a file name is dropped.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_core.spi import ConfigError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def scaffold(kind: str, name: str, into: Path, /) -> Path:
    """Make ``into/lmcache-KIND-NAME`` and return it.

    Raises:
        ConfigError: no template of this kind, not a name, or the folder is there already.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"not a plugin name: {name!r} (lower case, digits, single hyphens)")
    templates = files("lmcache_core.testing") / "templates"
    kinds = sorted(folder.name for folder in templates.iterdir() if folder.is_dir())
    if kind not in kinds:
        raise ConfigError(f"no template for {kind!r}; there are: {', '.join(kinds)}")
    dist = f"lmcache-{kind}-{name}"
    target = into / dist
    if target.exists():
        raise ConfigError(f"{target} is there already")
    stem = "".join(part.capitalize() for part in name.split("-"))
    words = {"@name@": name, "@package@": dist.replace("-", "_"), "@dist@": dist, "@Class@": stem}
    _copy(templates / kind, target, words)
    return target


def _copy(source: Traversable, target: Path, words: dict[str, str]) -> None:
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.name == "__pycache__":
            continue
        place = target / _filled(entry.name, words).removesuffix(".template")
        if entry.is_dir():
            _copy(entry, place, words)
        else:
            place.write_text(_filled(entry.read_text(encoding="utf-8"), words), encoding="utf-8")


def _filled(text: str, words: dict[str, str]) -> str:
    return re.sub("|".join(words), lambda match: words[match[0]], text)
