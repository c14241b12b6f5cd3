"""The page is the protocol: its golden frames are ours, and a client written from it works."""

import re
from pathlib import Path

import pytest

from lmcache_core.frame import seal_value
from lmcache_core.identity import probe_digest
from lmcache_core.spi import Interior, Key, KVSpec, SegmentSpec
from lmcache_core.wire import records, replies
from lmcache_core.wire.codec import LENGTH, decode_reply, decode_request, frame, to_keys, to_runs
from tests.wire.daemons import ROOM, Daemon, describe, free_port, key
from tests.wire.second_client import Second
from tests.wire.test_tcp import TOKEN

PAGE = (Path(__file__).resolve().parents[2] / "docs/reference/protocol.md").read_text()
GOLDEN = dict(re.findall(r"^(\w+) +([0-9a-f]{10,})$", PAGE, re.MULTILINE))
RUNS = [records.Run(bytes(range(32)), 0, b"\1" * 32 + b"\2" * 32)]


def words(*numbers):
    return b"".join(number.to_bytes(8, "little") for number in numbers)


RECORDS = {
    "hello": records.Hello(1, 1, b"\7" * 32, 4242, ["shm"], b"", None, "example"),
    "ping": records.Ping(2),
    "auth": records.Auth(3, b"\x09" * 32),
    "find": records.Find(4, RUNS, 0.5, 256),
    "load": records.Load(5, RUNS, 0.5, 256, "", False),
    "reserve": records.Reserve(6, RUNS, words(8192, 8192)),
    "commit": records.Commit(7, [1001, 1002], b"\3" * 32),
    "release": records.Release([1003], [(1004, [0, 2])]),
    "abort": records.Abort([1002]),
    "part": records.Part(8, [1005], b"\4" * 16),
    "dispatch": records.Dispatch("engine", [1003], 2),
    "list": records.List(9, "", b"", "128", 1000),
    "follow": records.Follow(11, 128),
    "pin": records.Pin(10, RUNS, 0.5, 60.0),
    "granted": replies.Granted(5, 1003, words(0, 4096, 8192, 5), b"\3" * 16, "miss"),
    "reserved": replies.Reserved(6, [1001, 0], ["present"], words(0, 12288, 8192, 1)),
    "committed": replies.Committed(7, [True, False]),
    "failed": replies.Failed(8, "config", "there is no lower tier 'x'; there are: none"),
    "values": replies.Values(9, ["00:01"], [8192], "256"),
    "changed": replies.Changed(11, 130, False, ["cpu"], [replies.Change("cpu", True, RUNS)]),
    "ready": replies.Ready(11, 16, "complete"),
    "revoke": replies.Revoke([]),
}


@pytest.mark.parametrize("name", RECORDS)
def test_golden_frame(name):
    data = bytes.fromhex(GOLDEN[name])
    assert bytes(frame(RECORDS[name])) == data
    decode = decode_request if isinstance(RECORDS[name], _requests()) else decode_reply
    assert decode(data[LENGTH.size :]) == RECORDS[name]


def _requests():
    return tuple(
        kind for kind in vars(records).values()
        if isinstance(kind, type) and issubclass(kind, records.Record)
        and kind not in (records.Record, records.Message)
    )  # fmt: skip


def test_page_names_every_record_with_its_fields():
    kinds = [
        kind for module in (records, replies) for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, records.Record)
        and kind not in (records.Record, records.Message)
    ]  # fmt: skip
    for kind in kinds:
        fields = ", ".join(
            name + ("" if at < len(kind.__struct_fields__) - len(kind.__struct_defaults__) else "?")
            for at, name in enumerate(kind.__struct_fields__)
        )
        assert f"| `{kind.__struct_config__.tag}` | {fields} |" in PAGE


def test_keys_keep_their_order_through_runs():
    keys = [key(1), key(2), key(3)._replace(group=1), key(4), key(5)._replace(space=b"x" * 32)]
    assert to_keys(to_runs(keys)) == keys
    assert to_runs([]) == []
    with pytest.raises(ValueError, match="32-byte digests"):
        to_keys([records.Run(bytes(32), 0, bytes(33))])


def sealed(key):
    """A frame, and what names its content."""
    whole = bytearray(ROOM + 600_000)
    segment = (SegmentSpec(0, 0, 0, 600_000),)
    spec = KVSpec("uint8", 256, 1, 0, 0, Interior.PAGE, segment)
    view = memoryview(whole)
    header = seal_value(view[:ROOM], view[ROOM:], key, spec=spec)
    return bytes(whole), header.identity


@pytest.mark.parametrize("mode", ["shared-rw", "sealed"])
def test_second_client_works_from_the_page_alone(tmp_path, mode):
    with Daemon(tmp_path, "--arena-mode", mode, port=free_port(), token=TOKEN) as daemon:
        local = Second(daemon.path, probe_digest())
        remote = Second(("127.0.0.1", daemon.port), probe_digest(), TOKEN.encode())
        space, one, two = bytes(32), b"\1" * 32, b"\2" * 32
        assert local.put(space, one, b"first" * 3000)
        assert not local.put(space, one, b"again")
        assert remote.get(space, one) == b"first" * 3000
        assert not remote.put(space, two, b"no frame" * 1000)
        whole, identity = sealed(Key(space, two))
        assert remote.put(space, two, whole, identity)
        assert local.get(space, two, identity) == whole
        assert local.get(space, b"\3" * 32) is None and remote.get(space, b"\3" * 32) is None
        client = daemon.client()
        assert describe(client)["memory"]["leased"] == 0
        client.close()
        local.sock.close()
        remote.sock.close()
