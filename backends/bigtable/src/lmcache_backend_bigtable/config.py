"""Options of ``bigtable``."""

# No postponed annotations: the binder reads the fields' types at run time.

import re
from dataclasses import dataclass

from lmcache_core.spi import ByteSize, Duration

URL = re.compile(r"bigtable://([a-z0-9:.-]+)/([a-z0-9-]+)/([A-Za-z0-9_.-]+)")
CELL_MOST = 100 << 20
"""Longest cell that Bigtable takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BigtableConfig:
    """Options.

    Attributes:
        url: ``bigtable://PROJECT/INSTANCE/TABLE``; the table is there already.
        family: column family of the table, used by nobody else.
        app_profile: how requests are routed; empty for the instance's default.
        credentials_file: key of a service account; empty: found as Google tools find them.
        emulator: ``HOST:PORT`` of an emulator, without credentials.
        cell_size: values are split into cells of this length.
        timeout: longest wait for one call.
        threads: most calls at once.
    """

    url: str
    family: str = "kv"
    app_profile: str = ""
    credentials_file: str = ""
    emulator: str = ""
    cell_size: ByteSize = ByteSize(2 << 20)
    timeout: Duration = Duration(5.0)
    threads: int = 8

    def __post_init__(self) -> None:
        if not URL.fullmatch(self.url):
            raise ValueError(f"url is {self.url!r}; write bigtable://PROJECT/INSTANCE/TABLE")
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", self.family):
            raise ValueError(f"family is {self.family!r}; it has 1 to 64 of A-Z a-z 0-9 _ . -")
        if not 0 < self.cell_size <= CELL_MOST:
            raise ValueError(f"cell_size is {self.cell_size}; at most {CELL_MOST} fit")

    @property
    def table(self) -> str:
        """Full name of the table."""
        match = URL.fullmatch(self.url)
        assert match is not None, "checked when it was made"
        return f"projects/{match[1]}/instances/{match[2]}/tables/{match[3]}"
