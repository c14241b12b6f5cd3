"""The medium of a simulated disk: what a program sees, what a power loss leaves, and room that ends.

What a program sees (the page cache) and what has reached the medium are kept apart. Only ``sync`` moves the
one to the other: of a file its bytes, length and stamp, of a folder its entries. A power loss keeps, sector by
sector and entry by entry, any mixture of the two; that is harsher than a journalling file system, so what
survives here survives there. The end of a process loses nothing but descriptors and locks.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from lmcache_core.spi.context import FileStatus

BLOCK = 4096
SECTOR = 512


@dataclass(slots=True, eq=False)
class Node:
    """A file, folder or special file. ``durable`` and ``past`` tell what the medium may still hold."""

    number: int
    kind: str
    modified: float
    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    lengths: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    allocated: int = 0
    entries: dict[str, Node] = field(default_factory=dict)
    past: dict[str, list[Node | None]] = field(default_factory=dict)
    names: int = 0
    opened: int = 0

    def bind(self, name: str, node: Node | None) -> None:
        before = self.entries.pop(name, None)
        self.past.setdefault(name, []).append(before)
        if before is not None:
            before.names -= 1
        if node is not None:
            self.entries[name] = node
            node.names += 1
            self.modified = max(self.modified, node.modified)

    def settle(self) -> None:
        """Bring to the medium what ``sync`` promises."""
        self.durable = bytes(self.content)
        self.lengths.clear()
        self.times.clear()
        self.past.clear()


def describe(node: Node) -> FileStatus:
    return FileStatus(
        nbytes=len(node.content),
        allocated=node.allocated,
        modified=node.modified,
        is_file=node.kind == "file",
        is_folder=node.kind == "folder",
        inode=node.number,
    )


class SimDisk:
    """The medium, shared by the ``SimFiles`` of several simulated processes.

    Args:
        seed: decides what a power loss keeps, where bits flip and how short a short transfer is.
        capacity: bytes of data blocks; a write beyond it is ``ENOSPC``.
        direct: 0 refuses ``O_DIRECT`` at open; else offsets and lengths must be multiples of this.
        links: whether the file system has hard links.
        wall: time for modification stamps.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        capacity: int = 1 << 40,
        direct: int = SECTOR,
        links: bool = True,
        wall: Callable[[], float] = lambda: 1e9,
    ) -> None:
        self.random = random.Random(seed)
        self.capacity = capacity
        self.direct = direct
        self.links = links
        self.wall = wall
        self.read_only = False
        self.mutex = threading.RLock()
        self.locks: dict[int, object] = {}
        self.used = 0
        self.numbers = 1
        self.root = Node(1, "folder", 0.0)

    def node(self, kind: str) -> Node:
        self.numbers += 1
        return Node(self.numbers, kind, self.wall())

    def grow(self, node: Node, nbytes: int) -> int:
        """Allocate blocks up to ``nbytes`` as far as there is room; return the bytes allocated in all."""
        want = -(-nbytes // BLOCK) * BLOCK - node.allocated
        got = max(0, min(want, (self.capacity - self.used) // BLOCK * BLOCK))
        node.allocated += got
        self.used += got
        return node.allocated

    def forget(self, node: Node) -> None:
        """Free the blocks of a file that has neither name nor descriptor."""
        if node.names == 0 and node.opened == 0:
            self.used -= node.allocated
            node.allocated = 0

    def find(self, path: str) -> Node:
        node = self.root
        for part in path.split("/"):
            if part not in ("", "."):
                if node.kind != "folder":
                    raise OSError(errno.ENOTDIR, "Not a directory", path)
                if part not in node.entries:
                    raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
                node = node.entries[part]
        return node

    def parent(self, path: str) -> tuple[Node, str]:
        folder, _, name = path.rpartition("/")
        node = self.find(folder)
        if node.kind != "folder":
            raise OSError(errno.ENOTDIR, "Not a directory", path)
        return node, name

    def plant(self, path: str, content: bytes = b"", *, kind: str = "file") -> None:
        """Put something there from outside, durably; ``kind``: file, folder, fifo, device or link."""
        folder, name = self.parent(path)
        node = self.node(kind)
        node.content[:] = content
        self.grow(node, len(content))
        folder.bind(name, node)
        node.settle()
        folder.past.pop(name, None)

    def peek(self, path: str) -> bytes:
        """Bytes of a file as a program would see them."""
        return bytes(self.find(path).content)

    def flip(self, path: str, bit: int | None = None) -> None:
        """Damage a file at rest by one bit, drawn from the seed unless given."""
        node = self.find(path)
        bit = self.random.randrange(len(node.content) * 8) if bit is None else bit
        node.content[bit // 8] ^= 1 << bit % 8
        node.durable = bytes(node.content)

    def cut(self, path: str, nbytes: int) -> None:
        """Damage a file at rest: only its first bytes are left."""
        node = self.find(path)
        del node.content[nbytes:]
        node.settle()

    def walk(self) -> list[str]:
        """Paths of everything that is no folder."""
        found: list[str] = []

        def visit(node: Node, path: str) -> None:
            for name, child in sorted(node.entries.items()):
                if child.kind == "folder":
                    visit(child, f"{path}/{name}")
                else:
                    found.append(f"{path}/{name}")

        visit(self.root, "")
        return found

    def lose_power(self) -> None:
        """Keep what has been synced and, of the rest, what the seed likes; drop all locks."""
        with self.mutex:
            self.locks.clear()
            self.used = 0
            seen: set[int] = set()
            self._survive(self.root, seen)

    def _survive(self, node: Node, seen: set[int]) -> None:
        if node.number in seen:
            node.names += 1
            return
        seen.add(node.number)
        node.names, node.opened = 1, 0
        if node.kind == "folder":
            for name, history in node.past.items():
                choice = self.random.choice([*history, node.entries.get(name)])
                node.entries.pop(name, None)
                if choice is not None:
                    node.entries[name] = choice
            for child in node.entries.values():
                self._survive(child, seen)
        elif node.kind == "file":
            node.content[:] = self._torn(node)
            if node.times:
                node.modified = self.random.choice([*node.times, node.modified])
            node.allocated = 0
            self.grow(node, len(node.content))
        node.settle()

    def _torn(self, node: Node) -> bytes:
        old, new = node.durable, bytes(node.content)
        if old == new and not node.lengths:
            return new
        length = self.random.choice([len(old), len(new), *node.lengths])
        unit = self.random.choice([SECTOR, BLOCK])
        mood = self.random.choice([0.0, 0.5, 0.9, 1.0])  # often all or nothing, as on real disks
        pieces = []
        for start in range(0, length, unit):
            source = new if self.random.random() < mood else old
            pieces.append(source[start : start + unit].ljust(unit, b"\0"))
        return b"".join(pieces)[:length]
