"""The library's front door: a model that takes prompts and gives completions."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from prefixkv.config import DEFAULT_MODEL, EngineConfig
from prefixkv.engine import Engine
from prefixkv.errors import InvalidRequest, StepFailed
from prefixkv.outputs import BranchOutput, Completion, OutputDelta
from prefixkv.sampling_params import SamplingParams

Chat = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Chat
"""A text, token ids, or the messages of a chat."""


class LLM:
    """A model with its engine and its cache, for use in one thread.

        llm = LLM("smollm2-135m")
        llm.generate("The capital of France is")[0].text

    Args:
        model: a local folder, a GGUF file, a hub id, or the name of the default model.
        options: fields of `EngineConfig`.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        self._adopt(Engine.load(EngineConfig(model=model, **options), progress=True))

    @classmethod
    def from_engine(cls, engine: Engine) -> "LLM":
        """Wrap an engine that is built already; nobody else may step it."""
        llm = cls.__new__(cls)
        llm._adopt(engine)
        return llm

    def _adopt(self, engine: Engine) -> None:
        self.engine = engine
        # a step moves all requests, whoever asked for it: each keeps what its caller has not read
        self._unread: dict[str, deque[OutputDelta]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Complete one prompt or several, batched; the answers stand in the order of the prompts.

        Args:
            prompts: texts, lists of token ids and chats, mixed as you like.
            params: one for all, or one for each; None takes the model's own sampling defaults.
            use_tqdm: show a progress bar on a terminal.

        Raises:
            InvalidRequest: if one of them cannot be served; none is run then.
            StepFailed: if a step failed; all are ended then.
        """
        batch = _as_list(prompts)
        each = self._params_for(len(batch), params)
        completions: list[Completion] = []
        try:
            for prompt, one in zip(batch, each, strict=True):
                completions.append(self._submit(prompt, one))
            with _progress(len(batch), shown=use_tqdm) as advance:
                for completion in completions:
                    for delta in self._deltas(completion.request_id, len(completion.outputs)):
                        completion.add(delta)
                    advance()
        finally:
            for completion in completions:
                self._end(completion.request_id)
        return completions

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[OutputDelta]:
        """Yield the deltas of one prompt as they come; closing the iterator aborts it.

        With n > 1 they are of several outputs, mixed; `index` says of which.
        """
        completion = self._submit(prompt, self._params_for(1, params)[0])
        try:
            yield from self._deltas(completion.request_id, len(completion.outputs))
        finally:
            self._end(completion.request_id)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt; a chat goes through the model's template."""
        if isinstance(prompt, str):
            return self.engine.tokenizer.encode(prompt)
        if prompt and isinstance(prompt[0], Mapping):
            return self.engine.tokenizer.render_chat(prompt)  # type: ignore[arg-type] # a chat
        return list(prompt)  # type: ignore[arg-type] # token ids

    def _params_for(
        self, count: int, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams(**self.engine.model.facts.sampling_defaults)  # type: ignore[arg-type]
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise InvalidRequest(f"{len(params)} sampling params for {count} prompts")
        return list(params)

    def _submit(self, prompt: Prompt, params: SamplingParams) -> Completion:
        token_ids = self.tokenize(prompt)
        request = self.engine.add(token_ids, params)
        self._unread[request.request_id] = deque()
        return Completion(
            request_id=request.request_id,
            usage=request.usage,
            outputs=[BranchOutput(index) for index in range(params.n)],
            prompt_token_ids=token_ids,
        )

    def _deltas(self, request_id: str, num_open: int) -> Iterator[OutputDelta]:
        """Yield the deltas of a request, running steps whenever there is none to read."""
        unread = self._unread[request_id]
        while num_open:
            while not unread:
                if not self.engine.has_work:
                    raise StepFailed(f"{request_id} was ended by somebody else")
                for delta in self.engine.step():
                    if delta.request_id in self._unread:
                        self._unread[delta.request_id].append(delta)
            delta = unread.popleft()
            if delta.finish_reason == "error":
                raise StepFailed(delta.error)
            num_open -= delta.finish_reason is not None
            yield delta

    def _end(self, request_id: str) -> None:
        """Forget a request; abort it if it still runs."""
        del self._unread[request_id]
        self.engine.abort(request_id)


Advance = Callable[[], None]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is a text, ids or messages; anything else is several."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int | Mapping)):
        return [prompts]  # type: ignore[list-item] # narrowed by the line above
    return list(prompts)  # type: ignore[arg-type] # likewise


@contextlib.contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Advance]:
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    shown = shown and console.is_terminal
    with Progress(*columns, console=console, disable=not shown, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)
