"""From the body of a response's request to the tokens of its prompt."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from prefixkv.api.access.tenant import Tenant
from prefixkv.api.caching.breakpoints import Mark, breakpoint_positions, take_marks
from prefixkv.api.caching.cache_plan import CachePlan, cache_plan
from prefixkv.api.caching.prewarm import prewarm_params
from prefixkv.api.conversations.response_input import input_messages
from prefixkv.api.conversations.response_request import (
    UNSUPPORTED_IN_RESPONSES,
    ResponseRequest,
    parse_response_request,
)
from prefixkv.api.conversations.response_store import StoredResponse, Turns, turns_of
from prefixkv.api.engine_interface import Tokenizer
from prefixkv.api.history.token_memory import ChatTokens, tokens_behind
from prefixkv.api.requests.messages import (
    RenderedChat,
    chat_text,
    checked_template_kwargs,
    normalized,
    require_tokens,
)
from prefixkv.api.service import Service
from prefixkv.errors import InvalidRequest
from prefixkv.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ResponseJob:
    """A turn that was checked and tokenised.

    Attributes:
        turns: the conversation that it answers, without instructions.
        chat: the same as tokens, instructions included.
        salt: of the engine.
        plan: what is asked of the cache.
    """

    request: ResponseRequest
    params: SamplingParams
    model: str
    turns: Turns
    chat: ChatTokens
    salt: str | None
    plan: CachePlan

    @property
    def prompts(self) -> list[list[int]]:
        """The one prompt."""
        return [self.chat.token_ids]

    @property
    def plans(self) -> list[CachePlan]:
        """What it asks of the cache."""
        return [self.plan]


def response_job(service: Service, raw: bytes, tenant: Tenant) -> ResponseJob:
    """Make a job of a body; takes time proportional to the text.

    Raises:
        InvalidRequest: the body or a field of it is wrong.
        ModelNotFound: it names a model that is not served.
        ResponseNotFound: it goes on from a response that the tenant does not have.
    """
    request = parse_response_request(raw)
    service.unknown_fields.note((request.model_extra or {}).keys() - UNSUPPORTED_IN_RESPONSES)
    model = service.resolve_model(request.model)
    params = service.sampling_params(request, default_max_tokens=None)
    if request.is_prewarm:
        params = prewarm_params(params)
    salt = tenant.salt_for(request.cache_salt)
    previous = None
    if request.previous_response_id is not None:
        previous = service.responses.previous(tenant, request.previous_response_id, salt)
    messages = input_messages(request.input)
    marks = take_marks(messages, "input")
    turns = turns_of(normalized(messages), previous.turns if previous is not None else None)
    try:
        chat = _chat_tokens(service, request, turns, previous, salt)
    except InvalidRequest as error:
        if error.param == "messages":  # what the template refuses, this client sent as input
            error.param = "input"
        raise
    plan = _cache_plan(request, marks, turns, chat.token_ids, service.engine.tokenizer)
    return ResponseJob(request, params, model, turns, chat, salt, plan)


def _cache_plan(
    request: ResponseRequest,
    marks: Sequence[Mark],
    turns: Turns,
    prompt: Sequence[int],
    tokenizer: Tokenizer,
) -> CachePlan:
    messages = _with_instructions(request.instructions, turns.all_messages())
    num_before = len(messages) - len(turns.messages)
    placed = [replace(mark, message=mark.message + num_before) for mark in marks]
    text = partial(
        chat_text, tokenizer=tokenizer, **checked_template_kwargs(request.chat_template_kwargs)
    )
    positions = breakpoint_positions(placed, messages, text, prompt, tokenizer)
    return cache_plan(request, len(prompt), marks, positions)


def _chat_tokens(
    service: Service,
    request: ResponseRequest,
    turns: Turns,
    previous: StoredResponse | None,
    salt: str | None,
) -> ChatTokens:
    """Return the tokens of the conversation: those of the previous response as they are, unless
    the instructions before them are others now."""
    kwargs = checked_template_kwargs(request.chat_template_kwargs)
    messages = _with_instructions(request.instructions, turns.all_messages())
    if previous is not None and _begins_alike(previous, request.instructions, kwargs):
        position = len(messages) - len(turns.messages) - 1
        exact = _behind(service, previous, RenderedChat(messages, "", kwargs), position, salt)
        if exact is not None:
            return exact
    tokenizer = service.engine.tokenizer
    text = chat_text(messages, tokenizer, **kwargs)
    chat = service.token_memory.tokens(RenderedChat(messages, text, kwargs), salt, tokenizer)
    require_tokens(chat.token_ids)
    return chat


def _begins_alike(
    previous: StoredResponse, instructions: str | None, kwargs: Mapping[str, Any]
) -> bool:
    return previous.instructions == instructions and previous.template_kwargs == kwargs


def _behind(
    service: Service,
    previous: StoredResponse,
    chat: RenderedChat,
    position: int,
    salt: str | None,
) -> ChatTokens | None:
    """Return the stored tokens, and those of what the template puts behind the previous answer,
    the message at `position`; None where the template does not show such an answer as it is.

    A word that no conversation has stands for the answer, so that its end is found whatever the
    template makes of earlier messages.
    """
    tokenizer = service.engine.tokenizer
    word = f"prefixkv{uuid.uuid4().hex}"
    marked = [*chat.messages]
    marked[position] = {**marked[position], "content": word}
    _, *behind = chat_text(marked, tokenizer, **chat.template_kwargs).split(word)
    if len(behind) != 1:
        return None
    digests = service.token_memory.digests(chat, salt)
    return tokens_behind(
        previous.transcript, previous.rest + behind[0], digests[-1] if digests else None, tokenizer
    )


def _with_instructions(
    instructions: str | None, messages: list[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    return [{"role": "system", "content": instructions}, *messages] if instructions else messages
