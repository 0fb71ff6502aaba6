"""The API against its own description: schemathesis makes requests of it, good and bad ones."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings

from polylens.server.openapi import describe_api
from polylens.server.options import ServerOptions
from tests.server.conftest import Serve
from tests.server.local import Local

SHORT, LONG = 12, 400

schema = schemathesis.openapi.from_dict(describe_api())

schemathesis.checks.load_all_checks()
CHECKS = [
    check
    for check in schemathesis.checks.CHECKS.get_all()
    if check.__name__ in ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
]
"""Whether bad data is refused and good data taken is tested elsewhere: null counts as absent here, and a model's name
or a deadline can make a request fail that is good by its form."""


@pytest.fixture
def server(serve: Serve) -> Local:
    return serve(ServerOptions(("tiny",), deadline_s=2.0))


def check(case: schemathesis.Case, server: Local) -> None:
    response = case.call(base_url=server.url)
    # 504: an answer as long as the context may take longer than the tests' deadline.
    assert response.status_code < 500 or response.status_code == 504, response.text
    case.validate_response(response, checks=CHECKS)


@schema.parametrize()
@settings(
    max_examples=SHORT, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
def test_short(case: schemathesis.Case, server: Local):
    check(case, server)


@pytest.mark.full
@schema.parametrize()
@settings(max_examples=LONG, deadline=None, suppress_health_check=list(HealthCheck))
def test_long(case: schemathesis.Case, server: Local):
    check(case, server)
