"""What a tier and a target say to each other: records of msgpack behind their length, in lists.

A message is ``[number, verb, ...]``, its answer ``[number, ...]``. Both sides send what they have collected as one list.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

VERSION = 1
LENGTH = struct.Struct("<I")
LONGEST = 64 << 20
encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode
DecodeError = msgspec.DecodeError


def pack(messages: list[Any], /) -> bytes:
    body = encode(messages)
    return LENGTH.pack(len(body)) + body


class Unpacker:
    """Bytes as they come, to messages.

    Raises:
        ValueError: what came is nothing that the other side says.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes, /) -> Iterator[list[Any]]:
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (nbytes,) = LENGTH.unpack_from(self._buffer)
            if nbytes > LONGEST:
                raise ValueError("not the language of nixl-target")
            if len(self._buffer) < LENGTH.size + nbytes:
                return
            body = bytes(self._buffer[LENGTH.size : LENGTH.size + nbytes])
            del self._buffer[: LENGTH.size + nbytes]
            try:
                messages = decode(body)
            except msgspec.DecodeError as error:
                raise ValueError(f"not the language of nixl-target: {error}") from None
            if not isinstance(messages, list) or not all(
                isinstance(m, list) and m and isinstance(m[0], int) for m in messages
            ):
                raise ValueError("not the language of nixl-target")
            yield from messages
