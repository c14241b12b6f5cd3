"""Requests made from the served schema: whatever is asked, the answer is never an error of the server."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

EXAMPLES = 8


def operations(web):
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{web.port}/openapi.json")
    return [found.ok() for found in schema.get_all_operations()]


@pytest.mark.slow
def test_no_request_makes_the_server_fail(web, daemon, operator):
    headers = {"Authorization": f"Bearer {web.token}"}
    found = operations(web)
    assert len(found) > 20
    seen = set()
    for operation in found:
        modes = [schemathesis.GenerationMode.POSITIVE]
        if operation.body or any(operation.iter_parameters()):
            modes.append(schemathesis.GenerationMode.NEGATIVE)
        for mode in modes:
            seen |= provoke(operation, operation.as_strategy(generation_mode=mode), headers)
    assert {200, 202, 422} <= seen
    assert daemon.child.poll() is None
    assert operator.describe()["pid"] == daemon.pid


def provoke(operation, strategy, headers):
    seen = set()

    @settings(
        max_examples=EXAMPLES, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=strategy)
    def ask(case):
        response = case.call(headers=headers, timeout=20)
        seen.add(response.status_code)
        case.validate_response(response, checks=[not_a_server_error])

    ask()
    return seen
