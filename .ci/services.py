"""Print the services that CI promises to the tests, for LMCACHE_TEST_SERVICES: the fixed list of plugins.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

if __name__ == "__main__":
    data = tomllib.loads((Path(__file__).resolve().parent.parent / "plugins.toml").read_text())
    rows = [row for kind in data.values() if isinstance(kind, dict) for row in kind.values()]
    print(",".join(sorted({row["service"] for row in rows if row.get("service")})))
