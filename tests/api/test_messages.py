"""Rendering of chats where the tokenizer matters."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from prefixkv.api.requests.messages import chat_prompt
from prefixkv.api.requests.schemas import ChatCompletionRequest, parse_request
from prefixkv.errors import InvalidRequest
from tests.api.fake_engine import ByteTokenizer

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


class ContinuingTokenizer(ByteTokenizer):
    """Can go on with the last message."""

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """Return what it was asked for."""
        return f"{add_generation_prompt} {continue_final_message}"


class BrokenTokenizer(ByteTokenizer):
    """Renders nothing, or fails."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def chat_text(self, *args: Any, **kwargs: Any) -> str:
        """Raise the error, if any."""
        if self._error is not None:
            raise self._error
        return ""


def test_a_tokenizer_that_can_continues_the_last_message() -> None:
    """The generation prompt is left out by itself then."""
    request = parse_request(ChatCompletionRequest, BODY | {"continue_final_message": True})

    assert bytes(chat_prompt(request, ContinuingTokenizer())) == b"False True"


@pytest.mark.parametrize("error", [RecursionError(), InvalidRequest("the template refuses"), None])
def test_what_a_template_cannot_render_is_the_clients_error(error: Exception | None) -> None:
    """Nesting without end, a refusal, and a rendering without tokens blame the messages."""
    request = parse_request(ChatCompletionRequest, BODY)
    with pytest.raises(InvalidRequest) as refused:
        chat_prompt(request, BrokenTokenizer(error))

    assert refused.value.param == "messages"
