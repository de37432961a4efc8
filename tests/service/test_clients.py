"""Client libraries talk to the served default model; more of them do in `make clients`."""

from collections.abc import Iterator
from typing import Any

import pytest

from prefixkv import default_model
from tests.clients import langchain, openai, pydantic_ai
from tests.service.conftest import Server, start

pytestmark = [
    pytest.mark.default_model,
    # raised inside the clients' own packages
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the default model; one thread computes, as other tests run beside it."""
    default_model.fetch()
    log = tmp_path_factory.mktemp("log") / "server.log"
    server = start(log, MODEL, "--num-blocks", "64", "--threads", "1")
    yield server
    assert server.stop() == 0


@pytest.mark.parametrize("client", [openai, pydantic_ai, langchain], ids=lambda m: m.__name__)
def test_the_second_turn_finds_all_of_the_first(server: Server, client: Any) -> None:
    """A plain chat, the same streamed, and a second turn: only the last token was no input."""
    conversation = client.converse(f"{server.base_url}/v1", MODEL)

    conversation.check()
    assert conversation.num_cached == conversation.num_tokens - 1
