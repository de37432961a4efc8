"""Our OpenAPI document against our server: generated requests, right ones and wrong ones.

schemathesis makes them of the document; whatever the server answers has to be in the document.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
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
from tiny_models import byte_tokenizer

from prefixkv.api.app import create_app
from prefixkv.api.replies.openapi import OPERATIONS
from prefixkv.errors import EngineStopped, QueueFull, StepFailed
from prefixkv.tokenizer import Tokenizer
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
    max_examples=8,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


@pytest.fixture(scope="module")
def app() -> Any:
    """An application in this process over a fake engine with a real tokenizer.

    The context is short, as generated bodies ask for as many tokens as there may be.
    """
    engine: Any = FakeEngine()
    engine.tokenizer = Tokenizer(byte_tokenizer())
    engine.vocab_size = len(byte_tokenizer())
    engine.max_model_len = 80
    engine.is_running = True
    app = create_app(engine, ["m"])
    app.state.engine = engine
    return app


@pytest.fixture(scope="module")
def session(app: Any) -> Iterator[Any]:
    """A client of the application."""
    with asgi.get_client(app) as client:
        yield client


@pytest.fixture(scope="module")
def operations(app: Any) -> dict[str, Any]:
    """The operations of the served document, by method and path."""
    schema: Any = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [one.ok() for one in schema.get_all_operations()]
    return {operation.label: operation for operation in operations}


def cases(operation: Any) -> Iterator[Any]:
    """One request for each constraint of each field, kept and broken, and some at random."""
    covering = operation.schema.iter_coverage_cases(
        operation,
        generation_modes=MODES,
        generation_config=operation.schema.config.generation_for(operation=operation),
    )
    # tokenisation takes a chat's many fields, most of which it has no use for
    step = 8 if "tokenize" in operation.path else 1
    if operation.path == "/tokenize":  # of which few that are generated are right
        yield operation.Case(body={"prompt": "x"}, media_type="application/json")
    for case in islice(covering, 0, None, step):
        if case.method == operation.method.upper():  # others are a 405, see test_errors.py
            yield case
    if operation.body:
        yield from drawn(operation)


def drawn(operation: Any) -> list[Any]:
    """Requests with several fields at once, right and wrong ones."""
    found = []

    @FEW
    @given(case=operation.as_strategy(MODES[0]) | operation.as_strategy(MODES[1]))
    def note(case: Any) -> None:
        found.append(case)

    note()
    return found


def test_every_route_is_documented(operations: dict[str, Any]) -> None:
    """And no other ones."""
    assert operations.keys() == OPERATIONS.keys()


@pytest.mark.parametrize("label", OPERATIONS)
def test_generated_requests_get_what_is_documented(
    operations: dict[str, Any], session: Any, label: str
) -> None:
    """No 5xx, no status, media type, header or body that the document lacks."""
    statuses: Counter[int] = Counter()
    for case in cases(operations[label]):
        response = case.call_and_validate(session=session, checks=CHECKS)
        statuses[response.status_code] += 1

    expected = {404} if "_id}" in label else {200} if label.startswith("GET") else {200, 400}
    if label == "POST /reset_prefix_cache":
        expected = {403}  # the application has no admin key
    assert statuses.keys() >= expected, statuses


def test_each_refusal_is_documented(app: Any, session: Any) -> None:
    """What no generated request provokes: an unknown model, and what the engine raises."""
    path = "/v1/completions"
    documented = app.openapi()["paths"][path]["post"]["responses"]
    engine = app.state.engine
    for error in (QueueFull("full"), StepFailed("failed"), EngineStopped("draining")):
        engine.error = error
        assert str(session.post(path, json={"prompt": "x"}).status_code) in documented
    engine.error = None
    unknown = session.post(path, json={"prompt": "x", "model": "nope"})
    assert unknown.status_code == 404
    assert "404" in documented
