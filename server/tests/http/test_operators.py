"""Pins, prompts, key spaces and reloading: on the command line and over HTTP, against a real daemon."""

import json

import pytest
from lmcache_server.spaces import about, decode, root_of

from lmcache_core.identity import canonical, chunk_digests, keys
from lmcache_core.spi import Interior, KVSpec
from lmcache_core.wire import records, replies
from server.tests.http.running import answered, lmcache
from tests.identity.samples import group, space
from tests.wire.daemons import ROOM, SPACE, Daemon, fill, key, wait_for

MODEL = space(groups=(group(tokens_per_chunk=4),))


@pytest.fixture
def kept(stored, operator):
    """Nothing is pinned before and after."""
    yield [key(number).text for number in (1, 2, 3, 4)]
    operator.pin([], 0.0, seconds=5)
    operator.do(replies.Count, lambda id: records.Clear(id, 5.0))


def test_pinned_values_are_marked_counted_and_let_go(daemon, kept, web):
    found = answered(daemon, "pin", *kept[:2], "--for", "60")
    assert (found["pinned"], found["asked"], found["seconds"]) == (2, 2, 60)
    marked = {row["key"]: row["state"] for row in answered(daemon, "ls")}
    assert [marked[each] for each in kept] == ["pinned", "pinned", "", ""]
    pins = answered(daemon, "describe")["pins"]
    assert (pins["values"], pins["bytes"]) == (2, found["bytes"])
    assert "pinned: 2 values" in lmcache(daemon, "describe").stdout
    listed = web.ask("GET", "/cache/objects", token=False)[2]["objects"]
    assert sorted(row["key"] for row in listed if row["pinned"]) == kept[:2]
    assert answered(daemon, "pin", kept[0], key(99).text, status=1)["pinned"] == 1
    assert answered(daemon, "unpin", kept[0]) == {"unpinned": 1, "bytes": pins["bytes"] // 2}
    assert answered(daemon, "unpin", kept[0], status=1)["unpinned"] == 0
    assert answered(daemon, "unpin", "--all") == {"unpinned": 1, "bytes": 0}


def test_pins_over_http_bring_values_up(kept, web, operator):
    operator.do(replies.Count, lambda id: records.Clear(id, 5.0, "cpu"))
    body = {"keys": kept[:3], "lasts": 60}
    assert web.ask("POST", "/cache/pins", body, token=False)[0] == 401
    status, _, found = web.ask("POST", "/cache/pins", body)
    assert (status, found["pinned"]) == (200, 3)
    assert operator.describe()["memory"]["values"] == 3
    pins = web.ask("GET", "/cache/pins", token=False)[2]
    assert pins["bytes"] == found["bytes"] <= pins["limit"]
    metric = f'lmcache_memory_pinned_bytes{{tier="cpu"}} {float(pins["bytes"])}'
    assert metric in web.ask("GET", "/metrics", token=False)[2]
    assert web.ask("DELETE", "/cache/pins", {"keys": kept[:1]})[2]["unpinned"] == 1
    assert web.ask("DELETE", "/cache/pins", {})[2] == {"unpinned": 2, "bytes": 0}
    assert web.ask("POST", "/cache/pins", {"keys": kept, "lasts": 1e9})[0] == 422


def test_clearing_wins_over_a_pin(kept, daemon, operator):
    answered(daemon, "pin", *kept)
    assert answered(daemon, "clear", "--tier", "cpu")["cleared"] == 4
    assert answered(daemon, "ls") == []
    memory = wait_for(lambda: (m := operator.describe())["pins"]["values"] == 0 and m["memory"])
    assert memory["quarantined"] == memory["leased"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("unpin",), "say what to unpin"),
        (("query",), "say what to look for"),
        (("query", "--tokens", "1,2", "--model", "none"), "no such engine is registered; there are:"),
        (("query", "--tokens", "1,two"), "not a token id: 'two'"),
        (("query", "--tokens", "@/nowhere"), "it cannot be read"),
        (("ping", "engine"), "'engine' is not asked here, only kvcache"),
        (("kvcache", "move", "zz", "--from", "cpu", "--to", "disk"), "not a key: 'zz'"),
    ],
)  # fmt: skip
def test_a_mistake_is_said_in_one_line_with_status_2(daemon, words, said):
    done = lmcache(daemon, *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_known_words_reach_the_same_commands(daemon, kept):
    assert answered(daemon, "ping", "kvcache")["pid"] == daemon.pid
    assert answered(daemon, "kvcache", "info")["pid"] == daemon.pid
    assert len(answered(daemon, "kvcache", "ls")) == 4
    rows = answered(daemon, "kvcache", "checksum", kept[0], key(99).text, status=1)
    assert [len(row["sha256"]) for row in rows] == [64, 0]
    assert answered(daemon, "kvcache", "clear", "--tier", "cpu")["cleared"] == 4


# -- key spaces and prompts --------------------------------------------------------------------------------


def test_a_key_space_is_read_back_from_its_canonical_bytes():
    said = about(canonical(MODEL))
    assert said["model"] == MODEL.model
    assert [group["dtype"] for group in said["layouts"]] == [group.dtype for group in MODEL.groups]
    assert bytes.fromhex(root_of(canonical(MODEL))) == MODEL.root
    assert "tenant" not in said
    value = (None, True, 7, -0.5, "é", b"\0", (1, ()))
    assert decode(canonical(value)) == [None, True, 7, -0.5, "é", "00", [1, []]]


@pytest.mark.parametrize("damaged", [b"", b"s\x05\0\0\0a", b"z\0\0\0\0", canonical(1) + b"x"])
def test_what_is_not_canonical_says_nothing(damaged):
    assert about(damaged) == {}


@pytest.fixture
def engine(daemon):
    """A registered engine of one rank; what it is, and a function that stores chunks of its prompts."""
    client = daemon.client(timeout=5, name="rank 0")
    spec = KVSpec("uint8", 4, 1, 0, 0, Interior.PAGE, ())
    form = records.Form(64, spec.dtype, spec.tokens, 1, 0, 0, "page", [(0, 0, 0, 64)])
    told = client.ask(
        replies.Registered,
        lambda id: records.Register(id, "chat", 0, 1, canonical(MODEL), [form], [[0]]),
    )
    assert told.root == MODEL.root
    yield client
    client.ask(replies.Count, lambda id: records.Clear(id, 5.0))
    client.close()


def store_prompt(client, ids):
    found = keys(MODEL, chunk_digests(MODEL.root, ids, 4))
    granted = client.reserve([(each, ROOM + 4096) for each in found], None)
    assert all(client.commit_batch(granted, [fill(held, 1) for held in granted]))
    return found


def test_a_prompt_is_found_by_its_tokens(daemon, engine, tmp_path):
    ids = list(range(1, 19))
    nothing = answered(daemon, "query", "--tokens", "1,2,3,4,5", status=1)
    assert (nothing["tokens"], nothing["cached"]) == (5, 0)
    stored = store_prompt(engine, ids[:12])
    found = answered(daemon, "query", "--tokens", ",".join(map(str, ids)), "--engine", "chat")
    assert found["engine"] == "chat"
    assert found["model"] == MODEL.model
    assert (found["tokens"], found["cached"]) == (18, 12)
    assert found["chunks"] == [
        {"group": 0, "from": 0, "to": 12, "tier": "cpu"},
        {"group": 0, "from": 12, "to": 16, "tier": ""},
    ]
    engine.flush()
    answered(daemon, "kvcache", "move", stored[0].text, "--from", "cpu", "--to", "disk")
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(ids))
    said = lmcache(daemon, "query", "--tokens", f"@{file}", "--model", MODEL.model).stdout
    assert said.startswith("12 of 18 tokens are cached for engine chat\n")
    assert [line.split()[-1] for line in said.splitlines()[2:4]] == ["disk", "cpu"]
    other = answered(daemon, "query", "--tokens", "9 2 3 4", status=1)
    assert other["cached"] == 0


def test_key_spaces_tell_their_model_and_what_is_held_of_them(daemon, engine, web, kept):
    store_prompt(engine, range(1, 13))
    spaces = {each["space"]: each for each in web.ask("GET", "/spaces", token=False)[2]}
    mine, other = spaces[MODEL.digest.hex()], spaces[SPACE.hex()]
    assert (mine["model"], mine["engines"]) == (MODEL.model, ["chat"])
    assert mine["tiers"]["cpu"][0]["values"] == 3
    assert other["engines"] == []
    assert other["tiers"]["cpu"] == [
        {"group": 0, "values": 4, "bytes": other["tiers"]["cpu"][0]["bytes"]}
    ]
    status = web.ask("GET", "/status", token=False)[2]
    assert status["engines"]["chat"]["chunk_tokens"] == [4]
    assert MODEL.root.hex() not in str(status)
    metrics = web.ask("GET", "/metrics", token=False)[2]
    short = MODEL.digest.hex()[:12]
    assert f'lmcache_space_chunks{{space="{short}",tier="cpu"}} 3.0' in metrics
    assert (
        f"key space {short} of {MODEL.model}: 3 values in cpu" in lmcache(daemon, "describe").stdout
    )
    engine.ask(replies.Count, lambda id: records.Clear(id, 5.0))
    assert short not in web.ask("GET", "/metrics", token=False)[2]


def test_a_reload_takes_over_what_may_change_and_refuses_what_is_wrong(tmp_path, web_of):
    file = tmp_path / "kv.yaml"
    plain = f"tiers:\n- cpu: {{size: 64MiB}}\n- disk: {{path: '{tmp_path / 'kv'}', size: SIZE}}\n"
    file.write_text(plain.replace("SIZE", "64MiB"))
    with Daemon(tmp_path, "--config", str(file)) as daemon:
        web = web_of(f"unix://{daemon.path}")
        file.write_text(plain.replace("SIZE", "32MiB") + "tenants: {bob: {quota: 1MiB}}\n")
        assert answered(daemon, "reload") == {"reloaded": True}
        wait_for(lambda: web.ask("GET", "/tiers", token=False)[2][0]["limit"] == 32 << 20)
        assert web.ask("GET", "/quota", token=False)[2]["quotas"] == {"bob": 1 << 20}
        file.write_text("tiers: [{cpu: {sise: 1}}]\n")
        status, _, body = web.ask("POST", "/reload")
        assert status == 400
        assert "did you mean 'size'" in body["detail"]
        assert lmcache(daemon, "reload").returncode == 2
        assert web.ask("GET", "/tiers", token=False)[2][0]["limit"] == 32 << 20
        assert web.ask("POST", "/reload", token=False)[0] == 401


def test_a_bar_is_shown_on_a_terminal_only(daemon, kept, monkeypatch):
    assert lmcache(daemon, "prefetch", *kept).stderr == ""
    monkeypatch.setattr("lmcache_server.client.commands.PART", 2)
    done = lmcache(daemon, "prefetch", *kept, terminal=True)
    assert done.returncode == 0
    assert "prefetch" in done.stderr
    assert "100%" in done.stderr
    done = lmcache(daemon, "clear", "--all", "--json", terminal=True)
    assert json.loads(done.stdout)["cleared"] >= 4
    assert "100%" in done.stderr
