"""How long requests wait, and how long their tokens take: histograms, as the engine's thread sees.

A request arrives when the event loop is asked for it; it is admitted with the step that first takes
a part of its prompt; a token is there when its step is over. So a wait for the engine's thread
counts as waiting, and what a slow client does to its own stream does not count. All times are
seconds of `time.monotonic`.

Where outputs are ranked (`best_of`, beams) nothing is told before all is there: such a request has
a first token when it is over, and no times of prefill, decode and tokens.
"""

from collections import Counter
from collections.abc import Iterable

from prefixkv.histogram import Histogram, one_two_five
from prefixkv.outputs import OutputDelta
from prefixkv.request import Request

# bounds are vLLM's, so that its dashboards show what they show there
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_OUTPUTS = (1, 2, 5, 10, 20)


class RequestTimes:
    """Follows requests from their arrival to their end.

    Attributes:
        histograms: by their names on `/metrics`; of tokens, or of seconds where the name says so.
        num_finished: requests that are over, by why: what ended their last output, "error" if a
            step failed, "abort" if the client left.
    """

    def __init__(self, max_model_len: int) -> None:
        tokens = one_two_five(max_model_len)
        self.histograms = {
            "time_to_first_token_seconds": Histogram(FIRST_TOKEN_S),
            "inter_token_latency_seconds": Histogram(TOKEN_S),
            "request_time_per_output_token_seconds": Histogram(TOKEN_S),
            "e2e_request_latency_seconds": Histogram(REQUEST_S),
            "request_queue_time_seconds": Histogram(REQUEST_S),
            "request_prefill_time_seconds": Histogram(REQUEST_S),
            "request_decode_time_seconds": Histogram(REQUEST_S),
            "request_prompt_tokens": Histogram(tokens),
            "request_generation_tokens": Histogram(tokens),
            "request_prefill_kv_computed_tokens": Histogram(tokens),
            "request_params_n": Histogram(NUM_OUTPUTS),
            "iteration_tokens_total": Histogram(STEP_TOKENS),
        }
        self.num_finished: Counter[str] = Counter()
        self._clocks: dict[str, _Clock] = {}
        self._waiting: dict[str, _Clock] = {}

    def arrived(self, request: Request, at: float) -> None:
        """Begin to follow a request that was asked for a while ago, and is queued now."""
        clock = _Clock(request, at)
        self._clocks[request.request_id] = self._waiting[request.request_id] = clock

    def admitted(self, at: float) -> None:
        """Note who was admitted; O(waiting), to be called if anybody was."""
        for request_id, clock in list(self._waiting.items()):
            if clock.request.admission is not None:
                clock.admitted = at
                del self._waiting[request_id]

    def stepped(self, num_tokens: int, deltas: Iterable[OutputDelta], at: float) -> None:
        """Note what a step computed and told; costs a few lookups for each delta."""
        if num_tokens:
            self.histograms["iteration_tokens_total"].observe(num_tokens)
        clocks = self._clocks
        since: dict[float, int] = {}  # how many tokens came after one of then
        for delta in deltas:
            clock = clocks.get(delta.request_id)
            if clock is None:
                continue
            before = clock.last.get(delta.index)
            if before is not None:
                since[before] = since.get(before, 0) + 1
            elif clock.first is None:
                clock.first = at
                self._observe("time_to_first_token_seconds", at - clock.arrived)
            clock.last[delta.index] = at
            if delta.finish_reason is not None:
                self._ended(clock, delta, at)
        for before, times in since.items():
            self.histograms["inter_token_latency_seconds"].observe(at - before, times)

    def aborted(self, request_id: str) -> None:
        """Note that a request was ended before its time."""
        self._forget(request_id)
        self.num_finished["abort"] += 1

    def copy(self) -> dict[str, Histogram]:
        """Return the histograms as of now."""
        return {name: histogram.copy() for name, histogram in self.histograms.items()}

    def _ended(self, clock: "_Clock", delta: OutputDelta, at: float) -> None:
        """Note the end of an output, and perhaps of its request."""
        clock.num_open -= 1
        if delta.finish_reason != "error":
            if clock.num_open:
                return
            self._observe_request(clock, delta, at)
        self.num_finished[delta.finish_reason or ""] += 1
        self._forget(delta.request_id)

    def _observe_request(self, clock: "_Clock", delta: OutputDelta, at: float) -> None:
        usage, params = delta.usage, clock.request.params
        self._observe("e2e_request_latency_seconds", at - clock.arrived)
        self._observe("request_queue_time_seconds", clock.admitted - clock.arrived)
        self._observe("request_prompt_tokens", usage.num_prompt_tokens)
        self._observe("request_generation_tokens", usage.num_completion_tokens)
        num_computed = usage.num_prompt_tokens - usage.num_cached_tokens
        self._observe("request_prefill_kv_computed_tokens", num_computed)
        self._observe("request_params_n", params.n)
        if params.is_ranked or clock.first is None:
            return
        self._observe("request_prefill_time_seconds", clock.first - clock.admitted)
        self._observe("request_decode_time_seconds", at - clock.first)
        num_gaps = usage.num_completion_tokens - len(clock.last)
        if num_gaps > 0:
            all_outputs = sum(clock.last.values()) - len(clock.last) * clock.first
            self._observe("request_time_per_output_token_seconds", all_outputs / num_gaps)

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)

    def _forget(self, request_id: str) -> None:
        self._clocks.pop(request_id, None)
        self._waiting.pop(request_id, None)


class _Clock:
    """When what happened to one request."""

    __slots__ = ("admitted", "arrived", "first", "last", "num_open", "request")

    def __init__(self, request: Request, arrived: float) -> None:
        self.request = request
        self.arrived = self.admitted = arrived
        self.first: float | None = None
        self.last: dict[int, float] = {}  # by output
        self.num_open = request.params.n
