"""The Grafana dashboard, from the declared metrics: one panel each, one row per part of the cache."""

from __future__ import annotations

import json
from typing import Any

PANEL = {"w": 8, "h": 7}
_UNITS = {"bytes": "bytes", "seconds": "s"}
_RATES = {"bytes": "Bps", "seconds": "s"}
_ROWS = (
    ("lmcache_tier_", "Tiers"),
    ("lmcache_memory_", "Memory"),
    ("lmcache_space_", "Key spaces"),
    ("lmcache_", "Requests and events"),
)


def dashboard() -> str:
    """deploy/grafana/lmcache.json."""
    from lmcache_core.observers import METRICS, Metric

    rows: dict[str, list[Metric]] = {title: [] for _, title in _ROWS}
    for metric in METRICS:
        rows[next(title for prefix, title in _ROWS if metric.name.startswith(prefix))].append(
            metric
        )
    panels: list[dict[str, Any]] = []
    y = 0
    for title, metrics in rows.items():
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place})
        y += 1
        for at, metric in enumerate(metrics):
            x, down = at % 3 * PANEL["w"], at // 3 * PANEL["h"]
            place = {"x": x, "y": y + down, **PANEL}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(metric)})
        y += -(-len(metrics) // 3) * PANEL["h"]
    document = {
        "uid": "lmcache", "title": "LMCache", "schemaVersion": 39, "editable": True,
        "refresh": "10s", "time": {"from": "now-1h", "to": "now"}, "timezone": "",
        "templating": {"list": [
            {"name": "source", "type": "datasource", "query": "prometheus", "label": "Data source"},
            {"name": "instance", "type": "query", "label": "Daemon", "multi": True, "includeAll": True,
             "allValue": ".*", "datasource": {"type": "prometheus", "uid": "${source}"}, "refresh": 2,
             "query": "label_values(lmcache_memory_capacity_bytes, instance)"},
        ]},
        "panels": panels,
    }  # fmt: skip
    return json.dumps(document, indent=1) + "\n"


def _panel(metric: Any) -> dict[str, Any]:
    kind, by = metric.kind.value, ", ".join(("instance", *metric.labels))
    series = metric.name + ("_bucket" if kind == "histogram" else "")
    chosen = f'{series}{{instance=~"$instance"}}'
    legend = " ".join(f"{{{{{label}}}}}" for label in ("instance", *metric.labels))
    unit = _UNITS.get(metric.unit, "short")
    if kind == "gauge":
        targets = [(f"sum by ({by}) ({chosen})", legend)]
    elif kind == "counter":
        targets = [(f"sum by ({by}) (rate({chosen}[$__rate_interval]))", legend)]
        unit = _RATES.get(metric.unit, "short")
    else:
        rate = f"sum by (le, {by}) (rate({chosen}[$__rate_interval]))"
        targets = [
            (f"histogram_quantile({q}, {rate})", f"{legend} p{q * 100:g}") for q in (0.5, 0.99)
        ]
    return {
        "type": "timeseries",
        "title": metric.help[0].upper() + metric.help[1:],
        "description": f"`{metric.name}`, {metric.unit}{' per second' if kind == 'counter' else ''}",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + at), "expr": expression, "legendFormat": shown}
            for at, (expression, shown) in enumerate(targets)
        ],
    }
