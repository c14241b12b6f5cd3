"""The flags of ``lmcache server`` that users bring with them: each is known, and takes a value only where it did."""

import pytest
from lmcache_server.command import _parse, settings
from lmcache_server.flags import FLAGS, Effect

from lmcache_core.spi import ConfigError

# As the documentation of LMCache 0.5 lists them.
WITH_VALUES = """--instance-id --transport --host --port --chunk-size --null-block-id --max-workers --max-gpu-workers
    --max-cpu-workers --grpc-server-workers --hash-algorithm --engine-type --supported-transfer-mode --shm-name
    --worker-reap-timeout-seconds --session-ttl-seconds --worker-registration-grace-seconds --enable
    --kv-event-log-size --server-module --runtime-plugin-locations --runtime-plugin-config --script-allowed-imports
    --p2p-advertise-url --p2p-listen-url --p2p-lookup-timeout --p2p-load-timeout --p2p-transfer-engine --l1-size-gb
    --l1-manager --l1-init-size-gb --l1-align-bytes --l1-devdax-path --gds-l1-path --gds-l1-backend
    --l1-write-ttl-seconds --l1-read-ttl-seconds --eviction-policy --eviction-trigger-watermark --eviction-ratio
    --l2-adapter --l2-store-policy --l2-prefetch-policy --l2-prefetch-max-in-flight --periodic-notifier-interval-ms
    --http-host --http-port --otlp-endpoint --event-bus-queue-size --prometheus-port --metrics-sample-rate
    --lookup-hash-log-dir --lookup-hash-log-rotation-interval --lookup-hash-log-rotation-max-size
    --lookup-hash-log-max-files --gc-monitor-min-pause-ms --gc-monitor-top-objects --extra-logging-interval
    --trace-level --trace-output --coordinator-url --coordinator-advertise-ip --coordinator-heartbeat-interval
    --coordinator-event-flush-interval --coordinator-event-transport --coordinator-kafka-bootstrap-servers
    --coordinator-kafka-topic --coordinator-kafka-delivery-timeout --coordinator-blend-timeout
    --coordinator-blend-match-concurrency"""
SWITCHES = """--isolated-ipc --separate-object-groups --no-separate-object-groups --enable-segmented-prefix
    --enable-dedup-content --enable-blend-reorder --run-script-api-enabled --l1-use-lazy --no-l1-use-lazy
    --l1-use-hugepages --no-l1-use-hugepages --gds-l1-use-direct-io --no-gds-l1-use-direct-io
    --disable-observability --disable-metrics --disable-grpc-metrics --disable-logging --enable-tracing
    --enable-gc-monitor --enable-extra-logging --coordinator-event-reporting"""


def test_every_flag_that_users_know_has_a_row():
    known = {
        flag.name: bool(flag.value)
        for flag in FLAGS
        if not flag.own and flag.name != "--l2-disk-path"
    }
    assert known == {
        **dict.fromkeys(WITH_VALUES.split(), True),
        **dict.fromkeys(SWITCHES.split(), False),
    }
    assert len(FLAGS) == len({flag.name for flag in FLAGS})


def test_a_command_line_that_users_bring_is_understood(capsys):
    line = """--host localhost --port 6555 --instance-id node-a --chunk-size 512 --max-workers 4 --max-gpu-workers 2
        --hash-algorithm blake3 --engine-type default --isolated-ipc --l1-size-gb 100 --l1-use-lazy --l1-init-size-gb 20
        --l1-align-bytes 4096 --l1-write-ttl-seconds 600 --separate-object-groups --disable-observability
        --eviction-policy LRU --eviction-ratio 0.1 --l2-store-policy default --metrics-sample-rate 0.01"""
    given = _parse([*line.split(), "--shm-name", ""])
    assert (given.port, given.l1_use_lazy, given.isolated_ipc) == ("6555", True, True)
    assert settings(given) == {
        "chunk_size": "512", "max_local_cpu_size": "100", "cache_policy": "LRU"
    }  # fmt: skip
    said = {each.partition(" has no effect")[0] for each in capsys.readouterr().err.splitlines()}
    nothing = {flag.name for flag in FLAGS if flag.effect is Effect.NOTHING}
    assert said == nothing & {*line.split(), "--shm-name"}


@pytest.mark.parametrize("value", ["blend", "blend_legacy"])
def test_an_engine_type_that_is_not_there_is_refused(value):
    with pytest.raises(ConfigError, match="--engine-type is not supported: there is no other"):
        settings(_parse(["--engine-type", value]))
