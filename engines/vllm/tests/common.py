"""What the tests on engines without a model share."""

from engines.vllm.tests.stand_ins import CHUNK, next_token
from lmcache_core.identity import Chain
from lmcache_core.spi import Key
from lmcache_core.wire import records, replies
from tests.wire.daemons import describe, wait_for

PROMPT = list(range(100, 141))


def served(engine, tokens, most=2, **how):
    """Run one request; tokens it did not have to compute."""
    id = engine.add(tokens, most, **how)
    request = engine.requests[id]
    engine.run()
    expected = list(tokens)
    for _ in range(most):
        expected.append(next_token(expected))
    assert engine.outputs[id] == expected
    return request.served


def settled(daemon, client=None):
    asked = client or daemon.client(timeout=10.0)  # a machine may stall

    def ended():
        memory = describe(asked)["memory"]
        return memory["leased"] == memory["reserved"] == 0

    wait_for(ended, 5, "the end of all leases")
    if client is None:
        asked.close()


def forget(daemon):
    client = daemon.client()
    client.ask(replies.Count, lambda id: records.Clear(id, 5.0))
    client.close()


def lose_leases(planted, worker):
    """From now on the worker finds none of what was dispatched to it."""
    client = worker.client
    adopt = client.adopt
    planted.setattr(client, "adopt", lambda handle: client.release(adopt(handle)))


def keys(engine):
    """Under which an engine keeps the prompt."""
    names = engine.scheduler.scheduler.names
    chain = Chain(names.root, CHUNK)
    return [Key(names.space, digest) for digest in chain.extend(PROMPT)]
