"""Server-sent events: deltas as chunks, errors inside a stream, and its end."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import ClassVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from prefixkv.api.disconnect import unless_disconnected
from prefixkv.api.errors import describe
from prefixkv.api.generation import Deltas, IndexedDelta
from prefixkv.api.logprobs import LogprobsBody
from prefixkv.api.responses import Envelope, dump_json, usage_body
from prefixkv.outputs import OutputDelta, TokenLogprobs, Usage

DONE = b"data: [DONE]\n\n"


class Chunks(ABC):
    """Encodes the chunks of one response; what they share is encoded once.

    Args:
        logprobs: makes the encoder of the log-probabilities of one choice.
    """

    object_: ClassVar[str]

    def __init__(self, envelope: Envelope, logprobs: Callable[[], LogprobsBody]) -> None:
        self._logprobs: defaultdict[int, LogprobsBody] = defaultdict(logprobs)
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

    def finish(self, index: int, delta: OutputDelta, usage: str | None) -> bytes:
        """Return the last chunk of a choice, with `usage` as JSON unless it is None."""
        reasons = f'"{delta.finish_reason}","stop_reason":{dump_json(delta.stop_reason)}'
        tail = f',"usage":{usage}' if usage is not None else ""
        return self._chunk(index, self._content(delta.text), reasons, delta.logprobs, tail)

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
        told = "null" if entries is None else dump_json(self._logprobs[index](entries))
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


async def events(
    first: IndexedDelta, rest: Deltas, chunks: Chunks, *, includes_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream whose first delta is there already.

    Usage comes exactly once, since some clients add up all they see: in a chunk of its own if the
    client asked for that, else on the finish chunk, where clients that never ask see it too.
    An error that comes now is told as an event: the status 200 is on its way.
    """
    usages: dict[int, Usage] = {}
    async with aclosing(rest):
        try:
            if event := _event(first, chunks, usages, not includes_usage):
                yield event
            async for item in rest:
                if event := _event(item, chunks, usages, not includes_usage):
                    yield event
            if includes_usage:
                yield chunks.usage(dump_json(usage_body(usages.values())))
        except Exception as error:
            yield f"data: {dump_json(describe(error))}\n\n".encode()
        yield DONE


def _event(
    item: IndexedDelta, chunks: Chunks, usages: dict[int, Usage], usage_at_finish: bool
) -> bytes:
    index, delta = item
    opening = b"" if index in usages else chunks.opening(index)
    usages[index] = delta.usage
    if delta.finish_reason is not None:
        usage = dump_json(usage_body(usages.values())) if usage_at_finish else None
        return opening + chunks.finish(index, delta, usage)
    return opening + chunks.more(index, delta)


class EventStream(Response):
    """A streamed response that ends its source when the client leaves, whatever it waits for."""

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[bytes, None]) -> None:
        # the second header keeps nginx from holding tokens back
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the source ends or the client is gone."""
        async with aclosing(self._source):
            with suppress(ClientDisconnect):
                await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._source:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
