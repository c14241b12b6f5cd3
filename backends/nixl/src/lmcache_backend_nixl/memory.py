"""Addresses of borrowed memory."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator, Sequence

from lmcache_backend_nixl.agent import Piece


class _Buffer(ctypes.Structure):
    """``Py_buffer`` of CPython."""

    _fields_ = (
        ("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    )  # fmt: skip


_get, _release = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
_get.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release.argtypes = (ctypes.c_void_p,)
_release.restype = None


def address(view: memoryview, /) -> int:
    """Where a view begins; valid as long as the view is."""
    buffer = _Buffer()
    _get(view, ctypes.byref(buffer), 0)
    at = buffer.buf or 0
    _release(ctypes.byref(buffer))
    return int(at)


def pieces(views: Sequence[memoryview], nbytes: int, /) -> list[Piece]:
    """Addresses and lengths of the first ``nbytes`` bytes of some views."""
    found = []
    for view in views:
        part = min(view.nbytes, nbytes)
        if part:
            found.append((address(view), part))
        nbytes -= part
    return found


class Staging:
    """One block of memory, lent in runs of pages; first fit.

    ``take`` gives None while there is no room.
    """

    PAGE = 4096

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // self.PAGE) * self.PAGE
        self.view = memoryview(mmap.mmap(-1, self.nbytes))
        self.at = address(self.view)
        self._free: list[Piece] = [(0, self.nbytes)]
        self._mutex = threading.Lock()

    def take(self, nbytes: int, /) -> Piece | None:
        """Offset and length, in whole pages."""
        wanted = max(1, -(-nbytes // self.PAGE)) * self.PAGE
        with self._mutex:
            for number, (at, room) in enumerate(self._free):
                if room >= wanted:
                    rest = [(at + wanted, room - wanted)] if room > wanted else []
                    self._free[number : number + 1] = rest
                    return at, wanted
        return None

    def give(self, piece: Piece, /) -> None:
        with self._mutex:
            self._free = list(_joined(sorted([*self._free, piece])))


def _joined(runs: Sequence[Piece]) -> Iterator[Piece]:
    at, room = runs[0]
    for start, more in runs[1:]:
        if start == at + room:
            room += more
        else:
            yield at, room
            at, room = start, more
    yield at, room
