"""What an extra brings: a tier's own library and not another tier's, as the page on installing says."""

import re
import tomllib
from pathlib import Path

from extras import closure
from packaging.requirements import Requirement

REMOTE = ("redis", "memcached", "infinistore", "s3", "bigtable", "mooncake", "nixl")


def libraries(root: Path, tier: str) -> set[str]:
    """Distributions of others that a tier names itself."""
    project = tomllib.loads((root / f"backends/{tier}/pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project.get("optional-dependencies", {}).get("cpu", ())]
    return {Requirement(line).name for line in lines} - {"lmcache"}


def test_no_tier_brings_the_library_of_another(root: Path) -> None:
    own = {tier: libraries(root, tier) for tier in REMOTE}
    assert own["redis"] == {"redis"}
    assert own["mooncake"] == {"mooncake-transfer-engine-non-cuda"}
    brought = {tier: closure(f"lmcache[{tier}]").keys() for tier in REMOTE}
    foreign = {
        (tier, other): found
        for tier in REMOTE
        for other in REMOTE
        if other != tier and (found := own[other] & brought[tier])
    }
    assert foreign == {}


def test_page_on_installing_names_the_library_of_every_remote_tier(root: Path) -> None:
    page = (root / "docs/howto/install.md").read_text()
    rows = re.findall(r"^\| (`.+`) \| (.+?) \| .+ \| .+ \|$", page, re.M)
    told = {
        name: set(re.findall("`(.+?)`", row))
        for names, row in rows
        for name in re.findall("`(.+?)`", names)
    }
    for tier in REMOTE:
        assert libraries(root, tier) <= told[tier]
    assert told.keys() >= {"valkey", "gs", "az", "mooncake-cuda"}
