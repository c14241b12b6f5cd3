"""What a scrape says: the daemon's own counters, whose identities hold, under names that dashboards know."""

import json
import re
import shutil
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from lmcache_server.metrics import ALIASES, HIT_RATE, exposition
from prometheus_client.parser import text_string_to_metric_families

from lmcache_core.observers import METRICS, SECONDS, Kind, Sample, Snapshot, check_identities
from lmcache_core.testing.services import need_service
from tests.wire.daemons import Process, free_port, key, wait_for

ROOT = Path(__file__).resolve().parents[3]


def parsed(text):
    """(name, labels) -> value."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(web):
    status, headers, text = web.ask("GET", "/metrics", token=False)
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    return parsed(text)


def test_every_sample_of_every_kind_is_exported_under_its_name():
    """Seen in LMCache#729."""
    made = []
    for metric in METRICS:
        labels = tuple((label, f'{label} "1"\n') for label in metric.labels)
        buckets = tuple(range(len(SECONDS) + 1)) if metric.kind is Kind.HISTOGRAM else ()
        made.append(Sample(metric.name, labels, 2.5, buckets))
    found = parsed(exposition(Snapshot(made)).decode())
    for sample in made:
        labels = tuple(sorted(sample.labels))
        if not sample.buckets:
            assert found[sample.name, labels] == 2.5
            continue
        assert found[f"{sample.name}_sum", labels] == 2.5
        assert found[f"{sample.name}_count", labels] == sum(sample.buckets)
        first = tuple(sorted([*labels, ("le", str(SECONDS[1]))]))
        assert found[f"{sample.name}_bucket", first] == 0 + 1


def test_no_name_is_exported_twice():
    """Seen in LMCache#4216."""
    lines = exposition(Snapshot()).decode().splitlines()
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names)) == len(METRICS) + len(ALIASES) + 1


def test_identities_hold_in_what_a_scrape_says(web, daemon, stored, operator):
    client = daemon.client(timeout=5)
    loaded = client.load([key(1), key(2), key(77)], None)
    client.release(loaded.leases)
    client.lookup([key(1), key(78)])
    client.close()
    web.ask("POST", "/cache/clear", {"tier": "cpu"})
    web.ask("DELETE", "/cache/objects", {"keys": [key(3).text]})
    found = scrape(web)
    plain = [
        Sample(name, labels, value)
        for (name, labels), value in found.items()
        if not name.endswith(("_bucket", "_sum", "_count", "_created"))
    ]
    assert check_identities(Snapshot(plain)) == []
    assert found["lmcache_tier_hit_chunks_total", (("tier", "cpu"),)] >= 2
    assert found["lmcache_tier_asked_chunks_total", (("tier", "disk"),)] >= 2
    assert found["lmcache_tier_out_bytes_total", (("tier", "disk"), ("why", "deleted"))] > 0


def test_known_names_say_the_same(web, stored, daemon):
    client = daemon.client(timeout=5)
    client.lookup([key(1), key(79)])
    client.close()
    found = scrape(web)
    for alias in ALIASES:
        labels = next(metric.labels for metric in METRICS if metric.name == alias.source)
        names = dict(zip(labels, ("backend", "operation"), strict=False))
        ours = {
            (
                name.replace(alias.source, alias.name),
                tuple(sorted((names.get(k, k), v) for k, v in at)),
            ): value
            for (name, at), value in found.items()
            if re.fullmatch(f"{alias.source}(_bucket|_sum|_count)?", name)
        }
        assert ours.items() <= found.items()
    cpu = (("backend", "cpu"),)
    hits, asked = found["lmcache_hits_total", cpu], found["lmcache_requests_total", cpu]
    assert asked > hits > 0
    assert found[HIT_RATE, cpu] == pytest.approx(hits / asked)
    assert ("lmcache_backend_size_bytes", (("backend", "disk"),)) in found


def test_dashboard_has_a_panel_for_every_metric():
    document = json.loads((ROOT / "deploy/grafana/lmcache.json").read_text())
    panels = [panel for panel in document["panels"] if panel["type"] != "row"]
    asked = [set(re.findall(r"lmcache_\w+", t["expr"])) for p in panels for t in p["targets"]]
    names = {name.removesuffix("_bucket") for found in asked for name in found}
    assert names == {metric.name for metric in METRICS}
    ids = [panel["id"] for panel in document["panels"]]
    assert len(set(ids)) == len(ids)
    spots = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels}
    assert len(spots) == len(panels)


@pytest.fixture
def prometheus(web, tmp_path):
    """A real one that scrapes the HTTP process; ended by its id."""
    unpacked = ROOT / ".lmcache-work/prometheus/usr/bin/prometheus"
    program = shutil.which("prometheus") or (str(unpacked) if unpacked.exists() else None)
    need_service(
        "prometheus", None if program else "the program is not there", start="bash .ci/system.sh"
    )
    config = tmp_path / "prometheus.yml"
    target = f"127.0.0.1:{web.port}"
    config.write_text(
        "global: {scrape_interval: 250ms, scrape_timeout: 250ms}\n"
        f"scrape_configs: [{{job_name: lmcache, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    port = free_port()
    with open(tmp_path / "prometheus.log", "wb") as log:
        process = Process(
            [
                program, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
    yield f"http://127.0.0.1:{port}"
    process.kill()


@pytest.mark.slow
@pytest.mark.service("prometheus")
def test_prometheus_scrapes_what_the_daemon_counts(prometheus, web, operator, stored):
    """Seen in LMCache#1447."""

    def ask(expression):
        query = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"{prometheus}/api/v1/query?{query}", timeout=5) as answer:
                return json.load(answer)["data"]["result"]
        except OSError:
            return []

    assert wait_for(lambda: ask("up == 1"))
    (found,) = wait_for(lambda: ask('lmcache_tier_resident_bytes{tier="disk"} > 0'))
    resident = operator.snapshot().total("lmcache_tier_resident_bytes", tier="disk")
    assert float(found["value"][1]) == resident
    assert ask('lmcache_backend_size_bytes{backend="disk"}')
    assert not ask("scrape_samples_scraped == 0")
    identity = "lmcache_tier_hit_chunks_total + lmcache_tier_missed_chunks_total - lmcache_tier_asked_chunks_total"
    assert {float(each["value"][1]) for each in ask(identity)} <= {0.0}
