"""The routes against a real daemon, through a real port."""

import hashlib

from tests.wire.daemons import SPACE, Daemon, describe, free_port, key, store, value, wait_for


def test_health_follows_the_daemon(tmp_path, web_of):
    with Daemon(tmp_path) as daemon:
        web = web_of(f"unix://{daemon.path}")
        for path in ("/live", "/ready", "/health", "/healthcheck"):
            assert web.ask("GET", path, token=False)[0] == 200
        daemon.kill()
        assert web.ask("GET", "/live", token=False)[0] == 200
        status, _, body = web.ask("GET", "/ready", token=False)
        assert status == 503
        assert "daemon" in body["detail"]
        assert web.ask("GET", "/metrics", token=False)[0] == 503
        daemon.start()
        wait_for(lambda: web.ask("GET", "/ready", token=False)[0] == 200)


def test_status_says_what_the_daemon_says(web, operator, stored):
    status, _, body = web.ask("GET", "/status", token=False)
    assert status == 200
    assert body["pid"] == operator.describe()["pid"]
    assert [tier["name"] for tier in body["tiers"]] == ["disk"]
    assert body["memory"]["values"] == 4


def test_config_names_where_settings_come_from_and_no_secret(tmp_path, web_of):
    with Daemon(tmp_path, port=free_port(), token="do-not-tell") as daemon:
        web = web_of(f"unix://{daemon.path}")
        rows = {row["key"]: row for row in web.ask("GET", "/config", token=False)[2]}
        assert rows["tiers.cpu.size"]["source"] != "default"
        assert rows["chunk_size"]["value"] == 256
        for path in ("/config", "/status", "/metrics"):
            assert "do-not-tell" not in str(web.ask("GET", path, token=False))


def test_nothing_of_the_daemons_memory_is_mapped(operator, stored):
    assert operator.checksum(key(1)).nbytes == 65536
    assert operator.home.sizes == {}


def test_objects_are_listed_page_by_page_and_digested(web, stored):
    keys, after = [], ""
    for _ in range(10):
        _, _, body = web.ask("GET", f"/cache/objects?limit=3{after}", token=False)
        keys += [each["key"] for each in body["objects"]]
        if body["after"] is None:
            break
        after = f"&after={body['after']}"
    assert sorted(keys) == [key(number).text for number in (1, 2, 3, 4)]
    other = web.ask("GET", f"/cache/objects?space={'0' * 64}", token=False)[2]
    assert other["objects"] == []
    mine = web.ask("GET", f"/cache/objects?space={SPACE.hex()}&tier=disk", token=False)[2]
    assert len(mine["objects"]) == 4
    wanted = {"keys": [key(1).text, key(99).text]}
    found, absent = web.ask("POST", "/cache/checksums", wanted)[2]
    assert found["sha256"] == hashlib.sha256(value(1)).hexdigest()
    assert found["nbytes"] == 65536
    assert absent == {"key": key(99).text, "nbytes": 0, "sha256": ""}


def test_values_are_cleared_from_memory_prefetched_and_deleted(web, stored, operator):
    keys = [key(number).text for number in (1, 2)]
    assert web.ask("POST", "/cache/clear", {"tier": "cpu"})[2] == {"cleared": 4}
    assert operator.describe()["memory"]["values"] == 0
    status, headers, body = web.ask("POST", "/cache/prefetches", {"keys": keys})
    assert status == 202
    assert headers["location"] == f"/cache/prefetches/{body['id']}"

    def done():
        job = web.ask("GET", headers["location"], token=False)[2]
        return job["state"] == "done" and job

    assert wait_for(done) == {**body, "state": "done", "count": 2, "reason": "complete"}
    assert operator.describe()["memory"]["values"] == 2
    assert web.ask("DELETE", "/cache/objects", {"keys": keys})[2] == {"deleted": 4}
    assert operator.find([key(1)]).where == [-1]
    assert web.ask("GET", "/cache/prefetches/999999", token=False)[0] == 404


def test_quota_is_set_shown_and_removed(web, operator):
    assert web.ask("PUT", "/quota/alice", {"nbytes": 1 << 20})[0] == 200
    assert web.ask("GET", "/quota", token=False)[2]["quotas"] == {"alice": 1 << 20}
    for tenant, nbytes in (("alice", 1 << 20), ("bob", None)):
        found = web.ask("GET", f"/quota/{tenant}", token=False)[2]
        assert found == {"tenant": tenant, "nbytes": nbytes, "used": 0}
    assert describe(operator)["quotas"] == {"alice": 1 << 20}
    assert web.ask("DELETE", "/quota/alice")[0] == 200
    assert web.ask("GET", "/quota", token=False)[2]["quotas"] == {}


def test_a_frozen_daemon_takes_nothing_new(web, daemon):
    client = daemon.client(timeout=5)
    assert web.ask("PUT", "/freeze/enable")[2] == {"frozen": True}
    assert web.ask("GET", "/freeze/status", token=False)[2] == {"frozen": True}
    assert store(client, 50) == []
    assert web.ask("PUT", "/freeze/disable")[2] == {"frozen": False}
    assert store(client, 50) == [True]
    client.close()


def test_move_names_tiers_that_are_there(web, stored):
    keys = [key(number).text for number in (1, 2)]
    moved = web.ask("POST", "/cache/move", {"keys": keys, "source": "disk", "target": "cpu"})
    assert moved[2] == {"moved": 2}
    listed = web.ask("GET", "/cache/objects?tier=disk", token=False)[2]["objects"]
    assert not {each["key"] for each in listed} & set(keys)
    status, _, body = web.ask("POST", "/cache/move", {"keys": keys, "source": "x", "target": "cpu"})
    assert (status, body["detail"]) == (400, "there is no tier 'x'; there are: cpu, disk")
    assert web.ask("POST", "/cache/clear", {"tier": "x"})[0] == 400


def test_a_named_tier_is_resized_taken_out_and_put_back_and_none_can_be_added(tmp_path, web_of):
    disk = ("--l2-disk-path", str(tmp_path / "kv"), "--l2-disk-size-gb", "0.1")
    with Daemon(tmp_path, "--arena-mode", "shared-rw", *disk) as daemon:
        web, client = web_of(f"unix://{daemon.path}"), daemon.client(timeout=5)
        assert store(client, 1, 2) == [True, True]
        client.flush()
        web.ask("POST", "/cache/clear", {"tier": "cpu"})
        assert web.ask("PUT", "/tiers/disk/limit", {"nbytes": 50 << 20})[0] == 200
        assert web.ask("GET", "/tiers", token=False)[2][0]["limit"] == 50 << 20
        assert web.ask("PUT", "/tiers/other/limit", {"nbytes": 1})[0] == 400
        for method in ("POST", "PUT"):
            assert web.ask(method, "/tiers", {"disk": {"path": "/tmp"}})[0] == 405
        assert web.ask("PUT", "/tiers/disk/enable")[0] == 400
        assert web.ask("PUT", "/tiers/disk/disable", {})[0] == 200
        (out,) = web.ask("GET", "/tiers", token=False)[2]
        assert (out["name"], out["plugin"], out["enabled"]) == ("disk", "disk", False)
        assert web.ask("PUT", "/tiers/other/enable")[0] == 400
        assert web.ask("PUT", "/tiers/disk/enable")[0] == 200
        wait_for(lambda: web.ask("GET", "/tiers", token=False)[2][0]["chunks"] == 2)
        assert client.lookup([key(1), key(2)]).places[0].tier == "disk"
        client.close()


def test_log_level_and_flush(web, stored):
    assert web.ask("PUT", "/loglevel", {"level": "debug"})[0] == 200
    assert web.ask("PUT", "/loglevel", {"level": "loud"})[0] == 422
    assert web.ask("PUT", "/loglevel", {"level": "warning"})[0] == 200
    assert web.ask("POST", "/flush", {})[2] == {"left": 0, "left_bytes": 0}


def test_no_route_takes_code_and_the_schema_is_served(web):
    """Seen in LMCache#5128."""
    paths = web.ask("GET", "/openapi.json", token=False)[2]["paths"]
    assert len(paths) > 15
    assert not [path for path in paths if "script" in path or "module" in path]
    for path in ("/run_script", "/docs", "/redoc"):
        assert web.ask("POST", path, {"script": "1"})[0] in (404, 405)
        assert web.ask("GET", path, token=False)[0] == 404


def test_a_long_list_is_asked_for_in_parts_and_is_whole(web, daemon, monkeypatch, operator):
    client = daemon.client(timeout=5)
    numbers = range(1000, 1300)
    assert all(store(client, *numbers, nbytes=4096))
    client.close()
    asked = []
    do = operator.do
    monkeypatch.setattr(
        operator, "do", lambda kind, make: asked.append(make(1).limit) or do(kind, make)
    )
    wanted = {key(number).text for number in numbers}
    whole = operator.list(limit=10_000)
    assert wanted <= set(whole.keys)
    assert len(whole.keys) == len(set(whole.keys)) == len(whole.nbytes)
    assert whole.after is None
    assert max(asked) <= 128
    listed = web.ask("GET", "/cache/objects?limit=200", token=False)[2]
    rest = web.ask("GET", f"/cache/objects?limit=200&after={listed['after']}", token=False)[2]
    assert len(listed["objects"]) == 200
    assert wanted <= {each["key"] for each in listed["objects"] + rest["objects"]}
    web.ask("POST", "/cache/clear", {})
