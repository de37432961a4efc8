"""Our OpenAPI document against our server: generated requests, right ones and wrong ones.

schemathesis makes them of the document; whatever the server answers has to be in the document.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.python import asgi
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from prefixkv.api.app import create_app
from prefixkv.api.openapi import OPERATIONS
from tests.api.fake_engine import FakeEngine

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# few, and the same ones in every run: this guards the document, it does not hunt
FEW = settings(
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def app() -> Any:
    """An application in this process; its engine's context is short, as generated bodies ask
    for as many tokens as there may be."""
    engine = FakeEngine()
    engine.max_model_len = 40
    engine.is_running = True
    return create_app(engine, ["m"])


@pytest.fixture(scope="module")
def session(app: Any) -> Iterator[Any]:
    """A client of the application."""
    with asgi.get_client(app) as client:
        yield client


@pytest.fixture(scope="module")
def operations(app: Any) -> dict[str, Any]:
    """The operations of the served document, by method and path."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [one.ok() for one in schema.get_all_operations()]
    return {operation.label: operation for operation in operations}


def fuzz(operation: Any, session: Any) -> Counter[int]:
    """Send generated requests to one operation; return how often each status was the answer."""
    statuses: Counter[int] = Counter()
    right = operation.as_strategy(GenerationMode.POSITIVE)
    wrong = operation.as_strategy(GenerationMode.NEGATIVE)

    @FEW
    @given(case=right | wrong if operation.body else right)
    def send(case: Any) -> None:
        response = case.call_and_validate(session=session, checks=CHECKS)
        statuses[response.status_code] += 1

    send()
    return statuses


@pytest.mark.parametrize("label", OPERATIONS)
def test_generated_requests_get_what_is_documented(
    operations: dict[str, Any], session: Any, label: str
) -> None:
    """No 5xx, no status, media type, header or body that the document lacks."""
    statuses = fuzz(operations[label], session)

    expected = {404} if "{" in label else {200} if label.startswith("GET") else {200, 400}
    assert statuses.keys() >= expected, statuses
