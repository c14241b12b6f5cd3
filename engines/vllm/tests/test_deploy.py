"""The example for Kubernetes, as far as it can be run without one: its flags, its socket, its JSON."""

import json
import subprocess
import sys
from pathlib import Path

import yaml
from lmcache_engine_vllm import settings

from engines.vllm.tests.stand_ins import config
from tests.wire.daemons import Daemon

EXAMPLE = Path(__file__).resolve().parents[3] / "deploy/kubernetes/vllm.yaml"


def test_the_example_for_kubernetes_starts_a_daemon_that_its_engines_reach(tmp_path):
    text = EXAMPLE.read_text().replace('"60"', '"0.0625"')
    text = text.replace("/run/lmcache", str(tmp_path)).replace("kv.sock", "daemon.sock")
    daemons, engines = (each["spec"]["template"]["spec"] for each in yaml.safe_load_all(text))
    assert daemons["securityContext"] == engines["securityContext"]  # one user
    assert daemons["volumes"] == engines["volumes"]
    (node,), (served,) = daemons["containers"], engines["containers"]
    assert node["volumeMounts"] == served["volumeMounts"]
    command, verb, *flags = node["command"]
    assert (command, verb) == ("lmcache", "server")
    env = {each["name"]: each["value"] for each in node["env"]}
    with Daemon(tmp_path, *flags, env=env) as daemon:
        _, *probe = node["readinessProbe"]["exec"]["command"]
        subprocess.run([sys.executable, "-m", "lmcache_core", *probe], check=True)
        given, said = config(daemon), json.loads(served["args"][1])
        given.kv_transfer_config.kv_connector_extra_config = said["kv_connector_extra_config"]
        cache, client = settings.open_cache(settings.read(given, shared=True))
        assert client.home is not None and client.home.writable
        cache.close()
