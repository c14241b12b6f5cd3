"""The flags of ``lmcache server`` under the names users know, as a table: what each does, or why nothing.

The page ``docs/reference/server-flags.md`` is this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Effect(Enum):
    """What becomes of a flag."""

    MAPPED = "mapped"
    NOTHING = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Flag:
    """One row.

    Attributes:
        to: for ``MAPPED``: the configuration key, or ``""`` where the command itself reads it.
        what: what it does, or why it does nothing or is refused.
        value: name of its value in the help; ``""`` for a switch.
        harmless: for ``REFUSED``: the value that asks for nothing, and is taken.
        own: not known upstream.
    """

    name: str
    effect: Effect
    what: str
    to: str = ""
    value: str = "VALUE"
    own: bool = False
    harmless: str | None = None

    @property
    def attribute(self) -> str:
        return self.name.lstrip("-").replace("-", "_")


_M, _N, _R = Effect


def _rows(effect: Effect, what: str, *names: str) -> tuple[Flag, ...]:
    return tuple(Flag(f"--{name}", effect, what) for name in names)


def _switches(effect: Effect, what: str, *names: str) -> tuple[Flag, ...]:
    return tuple(Flag(f"--{name}", effect, what, value="") for name in names)


FLAGS: tuple[Flag, ...] = (
    Flag("--config", _M, "configuration file", value="FILE", own=True),
    Flag("--host", _M, "address of the TCP port (localhost)", value="HOST"),
    Flag("--port", _M, "TCP port (5555); 0 for none", value="PORT"),
    Flag("--socket", _M, "path of the unix socket; by default one named after the port", value="PATH", own=True),
    Flag("--token-file", _M, "file with the token of TCP clients; also LMCACHE_SERVER_TOKEN", value="FILE", own=True),
    Flag("--ssl-certfile", _M, "certificate (PEM) for TLS on the TCP port; read again at SIGHUP", value="FILE", own=True),
    Flag("--ssl-keyfile", _M, "its key, where that is another file", value="FILE", own=True),
    Flag("--http-host", _M, "address of the HTTP port (127.0.0.1)", value="HOST"),
    Flag("--http-port", _M, "port of `lmcache http`, which is started beside it (8080); none: no such port", value="PORT"),
    Flag("--prometheus-port", _M, "one more port of it, for /metrics alone (9090); none: no such port", value="PORT"),
    Flag("--prometheus-host", _M, "its address (127.0.0.1); scrapers need no token there", value="HOST", own=True),
    Flag("--disable-metrics", _M, "the same as --prometheus-port none", value=""),
    Flag("--disable-observability", _M, "the same as --prometheus-port none", value=""),
    Flag("--chunk-size", _M, "tokens per chunk", "chunk_size", "TOKENS"),
    Flag("--l1-size-gb", _M, "size of memory in GiB", "max_local_cpu_size", "GIB"),
    Flag("--l1-use-hugepages", _M, "use huge pages the system has set aside", "local_cpu_use_hugepages", ""),
    Flag("--eviction-policy", _M, "policy of all tiers", "cache_policy", "NAME"),
    Flag("--l2-disk-path", _M, "folder of a disk tier", "local_disk", "PATH"),
    Flag("--l2-disk-size-gb", _M, "size of the disk tier in GiB", "max_local_disk_size", "GIB", own=True),
    Flag("--l2-adapter", _M, "one more tier: {\"type\": NAME, option: value}; repeat for several", value="JSON"),
    Flag("--kv-event-log-size", _M, "arrivals and departures kept for those who follow them (16384)", value="COUNT"),
    Flag("--log-level", _M, "debug, info, warning, error", "log_level", "LEVEL", own=True),
    Flag("--arena-mode", _M, "sealed: only the daemon writes into memory, clients send what they store; "
         "shared-rw: every client of this user writes in place", value="MODE", own=True),
    Flag("--overcommit", _M, "allow more memory than the machine or the control group has", value="", own=True),
    Flag("--drain-seconds", _M, "how long a stop waits for clients, and for unwritten values (5)", value="S", own=True),
    Flag("--daemonize", _M, "go into the background once it serves", value="", own=True),
    Flag("--log-file", _M, "where the log goes with --daemonize", value="FILE", own=True),
    Flag("--private", _M, "end --grace seconds after the last client, open no port unasked; started by engines", value="", own=True),
    Flag("--grace", _M, "see --private (30)", value="S", own=True),
    Flag("--settings", _M, "configuration keys as a JSON object; written by engines", value="FILE", own=True),
    *_rows(_N, "the daemon has one transport, and it is not ZMQ or gRPC", "transport", "grpc-server-workers"),
    *_rows(_N, "one loop serves control, data never passes it", "max-workers", "max-gpu-workers", "max-cpu-workers"),
    *_rows(_N, "every start has an id of its own", "instance-id"),
    *_rows(_N, "chunk digests are SHA-256, equal in every process", "hash-algorithm"),
    *_rows(_N, "the engine's layout says which blocks are empty", "null-block-id"),
    *_rows(_N, "clients map memory where the socket can pass it and stream otherwise", "supported-transfer-mode"),
    *_rows(_N, "memory has no name in /dev/shm", "shm-name"),
    *_switches(_N, "memory has no name in /dev/shm", "isolated-ipc"),
    *_rows(_N, "a lease ends with its owner, not with time", "worker-reap-timeout-seconds", "session-ttl-seconds",
           "worker-registration-grace-seconds", "l1-write-ttl-seconds", "l1-read-ttl-seconds"),
    *_rows(_N, "memory grows by itself and is touched in the background", "l1-init-size-gb", "l1-align-bytes"),
    *_switches(_N, "memory grows by itself and is touched in the background", "l1-use-lazy", "no-l1-use-lazy"),
    *_switches(_N, "huge pages are used only when asked for", "no-l1-use-hugepages"),
    *_rows(_N, "memory is used up to its size, leaves before roots", "eviction-trigger-watermark", "eviction-ratio"),
    *_rows(_N, "each tier says when it is written and read (write, promote)", "l2-store-policy",
           "l2-prefetch-policy", "l2-prefetch-max-in-flight", "periodic-notifier-interval-ms"),
    *_rows(_N, "metrics and events cost nothing and are always on", "event-bus-queue-size", "metrics-sample-rate"),
    *_switches(_N, "metrics and events cost nothing and are always on", "disable-grpc-metrics",
               "disable-logging"),
    *_switches(_N, "groups, windows and states are always separate", "separate-object-groups",
               "no-separate-object-groups", "enable-segmented-prefix", "enable-dedup-content"),
    *_rows(_R, "code is never taken from a flag; plugins are installed distributions", "runtime-plugin-locations",
           "runtime-plugin-config", "script-allowed-imports", "server-module"),
    *_switches(_R, "nothing here runs code that comes over the network", "run-script-api-enabled"),
    Flag("--engine-type", _R, "there is no other than `default`", harmless="default"),
    *_rows(_R, "this version has no part that does it", "enable", "p2p-advertise-url", "p2p-listen-url",
           "p2p-lookup-timeout", "p2p-load-timeout", "p2p-transfer-engine", "l1-devdax-path", "gds-l1-path",
           "gds-l1-backend", "otlp-endpoint", "lookup-hash-log-dir", "lookup-hash-log-rotation-interval",
           "lookup-hash-log-rotation-max-size", "lookup-hash-log-max-files", "gc-monitor-min-pause-ms",
           "gc-monitor-top-objects", "extra-logging-interval", "trace-level", "trace-output", "coordinator-url",
           "coordinator-advertise-ip", "coordinator-heartbeat-interval", "coordinator-event-flush-interval",
           "coordinator-event-transport", "coordinator-kafka-bootstrap-servers", "coordinator-kafka-topic",
           "coordinator-kafka-delivery-timeout", "coordinator-blend-timeout", "coordinator-blend-match-concurrency"),
    *_switches(_R, "this version has no part that does it", "gds-l1-use-direct-io", "no-gds-l1-use-direct-io",
               "enable-blend-reorder", "enable-tracing", "enable-gc-monitor", "enable-extra-logging",
               "coordinator-event-reporting"),
    *_rows(_R, "write the memory tier in a file (tiers: [cpu: {...}])", "l1-manager"),
)  # fmt: skip


def page() -> str:
    """The reference page, as Markdown."""
    lines = [
        "# Flags of `lmcache server`",
        "",
        "Generated from `server/src/lmcache_server/flags.py`. Everything else is said in a configuration file;",
        "its keys are those of every other part.",
        "",
        "| Flag | Effect | |",
        "| --- | --- | --- |",
    ]
    for flag in FLAGS:
        target = f" (`{flag.to}`)" if flag.to else ""
        what = flag.what.replace("|", "\\|")
        lines.append(f"| `{flag.name}` | {flag.effect.value}{target} | {what} |")
    return "\n".join(lines) + "\n"
