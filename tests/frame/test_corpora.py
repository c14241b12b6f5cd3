"""Input that is right, kept beside the tests: it is read for ever, and whatever is changed in it breaks no parser.

``tests/data/corpus``: ``frames.txt`` has stored values (name, zlib in base64), ``protocol.txt`` records (name, msgpack
in hexadecimal), ``*.yaml`` configurations. Lines are added, and leave only with the version they are of.
"""

from __future__ import annotations

import base64
import random
import zlib
from pathlib import Path

import msgspec
import pytest

from lmcache_core import frame, ops
from lmcache_core.config import Config, load
from lmcache_core.spi import ConfigError, Corrupt, PluginError
from lmcache_core.wire import codec
from tests.config.plugins import registry
from tests.frame.test_frame import KEY, read, sealed

CORPUS = Path(__file__).parents[1] / "data/corpus"
SEALED = {
    "raw": {},
    "tagged": {"tags": ("user=someone", "b"), "first": 512},
    "encoded": {"chain": ("x12", "zstd"), "stored": 200, "digests": (b"d" * 16,) * 3},
    "lossy": {"chain": ("klt",), "stored": 120, "approximate": True},
}
TELLING = (0x00, 0x01, 0x7F, 0x80, 0x90, 0xC0, 0xC4, 0xCF, 0xD9, 0xDF, 0xFF)
"""Bytes at which integers, and kinds of msgpack, part."""


def lines(name: str) -> dict[str, str]:
    """Content by name."""
    return dict(line.split() for line in (CORPUS / name).read_text().splitlines())


FRAMES = {n: zlib.decompress(base64.b64decode(text)) for n, text in lines("frames.txt").items()}
RECORDS = {name: bytes.fromhex(text) for name, text in lines("protocol.txt").items()}
FILES = {path.stem: path.read_bytes() for path in sorted(CORPUS.glob("*.yaml"))}


def changed(draw: random.Random, good: bytes, other: bytes) -> bytes:
    """Something near to what is right."""
    data = bytearray(good)
    for _ in range(draw.choice((1, 1, 2, 6))):
        at, kind = draw.randrange(len(data) + 1), draw.randrange(6)
        size = draw.choice((1, 2, 4, 16))
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = draw.choice(TELLING)
        elif kind == 2:
            del data[at : at + size]
        elif kind == 3:
            data[at:at] = data[at : at + size]
        elif kind == 4:
            begin = draw.randrange(len(other))
            data[at : at + size] = other[begin : begin + size]
        else:
            data[at:at] = bytes([draw.choice(TELLING)]) * size
    return bytes(data)


@pytest.mark.parametrize("name", FRAMES)
def test_stored_values_are_read_and_made_again_to_the_byte(name: str) -> None:
    whole = FRAMES[name]
    header = read(whole)
    assert header.created == 1_700_000_000
    assert whole == sealed(created=1_700_000_000, **SEALED[name])


def test_changed_frames_are_refused_or_what_they_were() -> None:
    draw, names = random.Random(1), list(FRAMES)
    refused = 0
    for at in range(3000):
        good, other = FRAMES[names[at % len(names)]], FRAMES[draw.choice(names)]
        bad = bytearray(changed(draw, good[: draw.choice((200, 400, len(good)))], other))
        bad += good[len(bad) :]
        if at % 3 == 0 and len(bad) >= 4096:  # as by a writer who is wrong, and signs it
            bad[4080:4096] = ops.digest(memoryview(bad)[:4080], 0)
        try:
            header = frame.open_header(memoryview(bad), KEY if at % 2 else None)
            frame.verify(header, memoryview(bad)[header.nbytes :])
        except Corrupt:
            refused += 1
        else:
            assert at % 3 == 0 or bytes(bad[: len(good)]) == good
    assert refused > 2000


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_understood(name: str) -> None:
    asked = name in {kind.__name__.lower() for kind in codec._REQUESTS}
    decode = codec.decode_request if asked else codec.decode_reply
    record = decode(RECORDS[name])
    assert type(record).__name__.lower() == name
    assert decode(bytes(codec.frame(record))[codec.LENGTH.size :]) == record


def test_every_kind_of_record_is_there() -> None:
    kinds = {*codec._REQUESTS, *codec.Reply.__args__, *codec.NOTICES}
    assert RECORDS.keys() == {kind.__name__.lower() for kind in kinds}


def test_changed_records_are_refused_or_understood() -> None:
    draw, names = random.Random(2), list(RECORDS)
    understood = 0
    for at in range(6000):
        bad = changed(draw, RECORDS[names[at % len(names)]], RECORDS[draw.choice(names)])
        for decode in (codec.decode_request, codec.decode_reply):
            try:
                record = decode(bad)
            except codec.DecodeError:
                continue
            understood += 1
            again = bytes(codec.frame(record))[codec.LENGTH.size :]
            assert msgspec.msgpack.encode(decode(again)) == again
    assert 300 < understood < 6000


def outcome(text: bytes, file: Path) -> str:
    """What loading says: nothing, or one line."""
    file.write_bytes(text)
    try:
        assert isinstance(load(file, env={"HOST": "h"}, registry=registry()).config, Config)
    except (ConfigError, PluginError) as error:
        return str(error) or "refused"
    return ""


@pytest.mark.parametrize("name", FILES)
def test_configurations_are_read(name: str, tmp_path: Path) -> None:
    assert outcome(FILES[name], tmp_path / "kv.yaml") == ""


def test_changed_configurations_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    draw, names = random.Random(3), list(FILES)
    refused = 0
    for at in range(200):
        bad = changed(draw, FILES[names[at % len(names)]], FILES[draw.choice(names)])
        said = outcome(bad, tmp_path / "kv.yaml")
        assert "\n" not in said, said
        refused += said != ""
    assert refused > 50
