"""What requests carry. Every bound is the protocol's or tighter, so the daemon never refuses a whole connection."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Path, Query
from pydantic import BaseModel, ConfigDict, Field

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,254}$"
_SPACE = r"^[0-9a-f]{64}$"
KeyText = Annotated[str, Field(pattern=r"^[0-9a-f]{132}$")]
Name = Annotated[str, Field(pattern=_NAME)]
NamePath = Annotated[str, Path(pattern=_NAME)]
NameQuery = Annotated[str | None, Query(pattern=_NAME)]
SpaceQuery = Annotated[str | None, Query(pattern=_SPACE)]
Cursor = Annotated[str | None, Query(pattern=r"^([0-9]{1,15}|[!-,.-/:-~][!-~]{0,1023})$")]
Since = Annotated[int | None, Query(ge=0, lt=1 << 63)]
Limit = Annotated[int, Query(ge=1, le=10_000)]
Seconds = Annotated[float, Field(gt=0, le=3600)]
NBytes = Annotated[int, Field(ge=0, le=1 << 60)]


class Body(BaseModel):
    """An unknown field is a mistake."""

    model_config = ConfigDict(extra="forbid")


class Keys(Body):
    keys: Annotated[list[KeyText], Field(min_length=1, max_length=8192)]
    seconds: Seconds = 10.0


class Checksums(Body):
    keys: Annotated[list[KeyText], Field(min_length=1, max_length=64)]


class Pinning(Keys):
    lasts: Annotated[float, Field(gt=0, le=7 * 24 * 3600)] = 300.0


class Unpinning(Body):
    keys: Annotated[list[KeyText], Field(max_length=8192)] = []


class Deletion(Keys):
    tier: Name | None = None


class Moving(Keys):
    source: Name
    target: Name
    copy_only: bool = False


class Clearing(Body):
    """What is named narrows it down; nothing named means everything."""

    tier: Name | None = None
    space: Annotated[str, Field(pattern=_SPACE)] | None = None
    tag: Annotated[str, Field(pattern=r"^[!-~]{1,255}$")] | None = None
    seconds: Seconds = 10.0


class Limited(Body):
    nbytes: NBytes


class Level(Body):
    level: Literal["debug", "info", "warning", "error"]


class Timed(Body):
    seconds: Seconds = 10.0
