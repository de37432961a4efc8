"""Server-sent events: deltas as chunks, errors inside a stream, and its end."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from functools import cache
from typing import ClassVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from prefixkv.api.caching.cache_reports import CacheReports
from prefixkv.api.disconnect import unless_disconnected
from prefixkv.api.errors import describe
from prefixkv.api.generation import Deltas, IndexedDelta
from prefixkv.api.replies.bodies import Envelope, dump_json, dump_long_json, usage_body
from prefixkv.api.replies.logprobs import MANY_LOGPROBS, LogprobsBody
from prefixkv.outputs import OutputDelta, TokenLogprobs, Usage

DONE = b"data: [DONE]\n\n"


class Chunks(ABC):
    """Encodes the chunks of one response; what they share is encoded once.

    Args:
        logprobs: makes the encoder of the log-probabilities of a choice, by its index.
    """

    object_: ClassVar[str]

    def __init__(self, envelope: Envelope, logprobs: Callable[[int], LogprobsBody]) -> None:
        self._logprobs = cache(logprobs)
        self._head = "data: " + dump_json(envelope.head(self.object_))[:-1] + ',"choices":['

    @abstractmethod
    def opening(self, index: int) -> bytes:
        """Return what precedes the first text of a choice, perhaps nothing."""

    @abstractmethod
    def _content(self, text: str) -> str:
        """Return the JSON member that carries `text`."""

    def more(self, index: int, delta: OutputDelta) -> bytes:
        """Return a chunk with what `delta` adds, which may be nothing."""
        if not delta.text and not delta.logprobs:
            return b""
        return self._chunk(index, self._content(delta.text), "null", delta.logprobs)

    def finish(self, index: int, delta: OutputDelta, usage: str | None, members: str = "") -> bytes:
        """Return the last chunk of a choice, with `usage` as JSON unless it is None.

        `members` follow, each as JSON behind a comma.
        """
        reasons = f'"{delta.finish_reason}","stop_reason":{dump_json(delta.stop_reason)}'
        tail = f',"usage":{usage}' if usage is not None else ""
        return self._chunk(
            index, self._content(delta.text), reasons, delta.logprobs, tail + members
        )

    def usage(self, usage: str) -> bytes:
        """Return the chunk that holds nothing but `usage`, as JSON."""
        return f'{self._head}],"usage":{usage}}}\n\n'.encode()

    def _chunk(
        self,
        index: int,
        content: str,
        reasons: str,
        entries: Sequence[TokenLogprobs] | None = None,
        tail: str = "",
    ) -> bytes:
        told = "null"
        if entries is not None:
            dump = dump_json if len(entries) <= MANY_LOGPROBS else dump_long_json
            told = dump(self._logprobs(index)(entries))
        choice = f'{{"index":{index},{content},"logprobs":{told},"finish_reason":{reasons}}}'
        return f"{self._head}{choice}]{tail}}}\n\n".encode()


class CompletionChunks(Chunks):
    """Chunks of POST /v1/completions."""

    object_ = "text_completion"

    def opening(self, index: int) -> bytes:
        """Return nothing: a completion begins with its text."""
        return b""

    def _content(self, text: str) -> str:
        return f'"text":{dump_json(text)}'


class ChatChunks(Chunks):
    """Chunks of POST /v1/chat/completions."""

    object_ = "chat.completion.chunk"

    def opening(self, index: int) -> bytes:
        """Return the chunk that says whose turn begins."""
        return self._chunk(index, '"delta":{"role":"assistant","content":""}', "null")

    def _content(self, text: str) -> str:
        return f'"delta":{{"content":{dump_json(text)}}}' if text else '"delta":{}'


class Told:
    """What a stream has told so far: which choices it has begun, and how many it has ended.

    The choices of a prompt follow those of the prompt before, `n` of each. Usage comes exactly
    once, since some clients add up all they see: in a chunk of its own if the client asked for
    that, else on the last finish chunk, where clients that never ask see it too.
    """

    def __init__(
        self,
        chunks: Chunks,
        *,
        num_prompts: int,
        n: int,
        usage_at_finish: bool,
        cache_reports: CacheReports | None = None,
    ) -> None:
        self._chunks = chunks
        self._cache_reports = cache_reports
        self._n = n
        self._usage_at_finish = usage_at_finish
        self._begun: set[int] = set()
        self._num_open = num_prompts * n
        self._usages: dict[int, Usage] = {}

    @property
    def usages(self) -> Collection[Usage]:
        """The usage of each prompt so far: a view, which goes on with the stream."""
        return self._usages.values()

    def event(self, prompt: int, delta: OutputDelta) -> bytes:
        """Return what `delta` adds, perhaps nothing."""
        index = prompt * self._n + delta.index
        self._usages[prompt] = delta.usage
        opening = b"" if index in self._begun else self._chunks.opening(index)
        self._begun.add(index)
        if delta.finish_reason is None:
            return opening + self._chunks.more(index, delta)
        self._num_open -= 1
        is_last = self._usage_at_finish and not self._num_open
        usage = self._usage() if is_last else None
        return opening + self._chunks.finish(index, delta, usage, self._members(prompt, delta))

    def _members(self, prompt: int, delta: OutputDelta) -> str:
        """Return what the last chunk of a prompt tells besides: the engine reports only then."""
        if self._cache_reports is None or delta.cache_report is None:
            return ""
        members = self._cache_reports.members(prompt, delta.cache_report)
        return "".join(f',"{name}":{dump_json(value)}' for name, value in members.items())

    def ending(self) -> bytes:
        """Return what follows the last choice, perhaps nothing."""
        return b"" if self._usage_at_finish else self._chunks.usage(self._usage())

    def _usage(self) -> str:
        return dump_json(usage_body(self._usages.values()))


async def events(first: IndexedDelta, rest: Deltas, told: Told) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream whose first delta is there already.

    An error that comes now is told as an event: the status 200 is on its way.
    """
    async with aclosing(rest):
        try:
            if event := await _event(first, told):
                yield event
            async for item in rest:
                may_be_long = item[1].logprobs is not None
                if event := await _event(item, told) if may_be_long else told.event(*item):
                    yield event
            if event := told.ending():
                yield event
        except Exception as error:
            yield f"data: {dump_json(describe(error))}\n\n".encode()
        yield DONE


async def _event(item: IndexedDelta, told: Told) -> bytes:
    """Encode what may be a whole prompt once more, with all its log-probabilities."""
    if len(item[1].logprobs or ()) > MANY_LOGPROBS:
        return await asyncio.to_thread(told.event, *item)
    return told.event(*item)


class EventStream(Response):
    """A streamed response that ends its source when the client leaves, whatever it waits for.

    Args:
        source: of the events.
        deltas: which it takes them from, and which run already. A source that was not begun when
            the client left would not close them.
    """

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[bytes, None], deltas: Deltas) -> None:
        # the second header keeps nginx from holding tokens back
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._source = source
        self._deltas = deltas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the source ends or the client is gone."""
        async with aclosing(self._deltas), aclosing(self._source):
            with suppress(ClientDisconnect):
                await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._source:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
