"""The events of a streamed response, and its end."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from prefixkv.api.conversations.response_objects import ResponseObject, response_logprobs, text_part
from prefixkv.api.errors import answer_to, describe
from prefixkv.api.generation import Deltas, IndexedDelta
from prefixkv.api.history.answers import GrowingAnswer
from prefixkv.api.replies.bodies import dump_json
from prefixkv.api.replies.logprobs import ChatLogprobs
from prefixkv.outputs import Completion, OutputDelta, Usage

Finish = Callable[[Completion], dict[str, Any]]
"""Makes the final object of a response, and keeps what is to be kept of it."""


class ResponseEvents:
    """Encodes the events of one response; what the deltas of its text share is encoded once.

    Attributes:
        usages: the usage so far, none at first; it goes on with the stream.
    """

    def __init__(self, response: ResponseObject, logprobs: ChatLogprobs) -> None:
        self._response = response
        self._logprobs = logprobs
        self._number = 0
        self.usages: list[Usage] = []
        name = "response.output_text.delta"
        place = dump_json({"type": name, **self._place()})[:-1]
        self._delta_head = f'event: {name}\ndata: {place},"delta":'

    def opening(self) -> bytes:
        """Return what precedes the text."""
        body = self._response.body("in_progress", [])
        item = self._response.empty_message("in_progress")
        return b"".join(
            [
                self._event("response.created", response=body),
                self._event("response.in_progress", response=body),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event(
                    "response.content_part.added", **self._place(), part=text_part("", None)
                ),
            ]
        )

    def more(self, delta: OutputDelta) -> bytes:
        """Return what `delta` adds, perhaps nothing."""
        self.usages[:] = [delta.usage]
        if not delta.text and not delta.logprobs:
            return b""
        told = []
        if delta.logprobs:
            told = response_logprobs(self._logprobs(delta.logprobs)["content"])
        number, self._number = self._number, self._number + 1
        scores = dump_json(told) if told else "[]"
        return (
            f'{self._delta_head}{dump_json(delta.text)},"logprobs":{scores},'
            f'"sequence_number":{number}}}\n\n'
        ).encode()

    def closing(self, body: dict[str, Any]) -> bytes:
        """Return what follows the text; `body` is the response's final object."""
        (item,) = body["output"]
        (part,) = item["content"]
        place = self._place()
        done = {"text": part["text"], "logprobs": part["logprobs"]}
        return b"".join(
            [
                self._event("response.output_text.done", **place, **done),
                self._event("response.content_part.done", **place, part=part),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{body['status']}", response=body),
            ]
        )

    def failure(self, error: Exception) -> bytes:
        """Return the failed response, and the error once more: some clients raise on that only."""
        told = describe(error)["error"]
        body = self._response.failed(answer_to(error).status, told["message"])
        flat = {name: told[name] for name in ("code", "message", "param")}
        failed = self._event("response.failed", response=body)
        return failed + self._event("error", **flat, error=told)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._response.message_id, "output_index": 0, "content_index": 0}

    def _event(self, name: str, **members: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        data = dump_json({"type": name, "sequence_number": number, **members})
        return f"event: {name}\ndata: {data}\n\n".encode()


async def response_events(
    first: IndexedDelta, rest: Deltas, events: ResponseEvents, finish: Finish
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a response whose first delta is there already.

    An error that comes now is told as an event: the status 200 is on its way.
    """
    answer = GrowingAnswer()
    delta = first[1]
    async with aclosing(rest):
        try:
            yield events.opening()
            while True:
                answer.add(delta)
                if event := events.more(delta):
                    yield event
                if delta.finish_reason is not None:
                    break
                _, delta = await anext(rest)
            completion = Completion(
                delta.request_id, delta.usage, [answer.output()], cache_report=delta.cache_report
            )
            yield events.closing(finish(completion))
        except Exception as error:
            yield events.failure(error)
