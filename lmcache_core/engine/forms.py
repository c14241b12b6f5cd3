"""Stored forms of the chunks of one engine instance: lengths, segments, header room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmcache_core import frame
from lmcache_core.identity import KeySpace, Shard, rows_spec
from lmcache_core.spi import Interior, KVSpec, SegmentSpec
from lmcache_core.spi.errors import ConfigError


class Forms:
    """What a chunk of each group looks like in memory.

    Args:
        space: key space of the instance.
        opaque: for each ``PAGE`` or ``STATE`` group, its segments for one full chunk.

    Raises:
        ConfigError: groups disagree on tokens per chunk, or an opaque group has no segments.
    """

    def __init__(
        self, space: KeySpace, /, *, opaque: Mapping[int, Sequence[SegmentSpec]] | None = None
    ) -> None:
        sizes = {group.tokens_per_chunk for group in space.groups}
        if len(sizes) != 1:
            raise ConfigError(
                f"groups of one model chunk alike, got {sorted(sizes)} tokens per chunk"
            )
        self.space = space
        self.chunk_tokens = sizes.pop()
        self._opaque = {index: tuple(segments) for index, segments in (opaque or {}).items()}
        self._specs: dict[tuple[int, int], KVSpec] = {}
        for index, group in enumerate(space.groups):
            if group.interior is not Interior.ROWS and index not in self._opaque:
                raise ConfigError(
                    f"group {index} is {group.interior.value}: its segments must be given"
                )

    @property
    def groups(self) -> int:
        return len(self.space.groups)

    @property
    def partial(self) -> bool:
        """Whether a chunk may hold fewer tokens than ``chunk_tokens``."""
        return not self._opaque

    def spec(self, group: int, tokens: int, /) -> KVSpec:
        """Form of a chunk of so many tokens.

        Raises:
            ValueError: a part of a chunk of an opaque group.
        """
        known = self._specs.get((group, tokens))
        if known is None:
            known = self._specs[group, tokens] = self._make(group, tokens)
        return known

    def header_nbytes(self, group: int, tags: Sequence[str] = (), /) -> int:
        """Room in front of the payload."""
        return frame.header_nbytes(len(self.spec(group, self.chunk_tokens).segments), tags=tags)

    def _make(self, index: int, tokens: int) -> KVSpec:
        group = self.space.groups[index]
        if group.interior is Interior.ROWS:
            layers = (group.layers[0], group.layers[-1] + 1)
            return rows_spec(group, [Shard(*layers, *group.head_range)], tokens=tokens)
        if tokens != self.chunk_tokens:
            raise ValueError(
                f"{tokens} of {self.chunk_tokens} tokens of a {group.interior.value} group"
            )
        return KVSpec(
            group.dtype, tokens, group.planes, group.heads, 0, group.interior, self._opaque[index]
        )
