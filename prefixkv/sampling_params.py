"""How a request wants its tokens chosen, and when it wants to stop."""

import math
from dataclasses import dataclass

from prefixkv.errors import InvalidRequest

MAX_STOP_STRINGS = 64
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request; validated once, here.

    The draw of a token depends only on (seed, branch, position), so a request with a seed gives
    the same tokens whatever else is in its batch, up to the last bits of the logits.

    Args:
        temperature: 0 means greedy.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches top_p; in (0, 1].
        min_p: drop tokens less likely than min_p times the likeliest; in [0, 1].
        seed: None draws one at random per request.
        max_tokens: None means all that the context and the pool leave.
        stop: strings that end the output; they are not part of it.
        stop_token_ids: tokens that end the output besides the model's own end tokens.
        ignore_eos: go on after the model's end tokens (not after `stop_token_ids`).

    Raises:
        InvalidRequest: naming the field, its value and the allowed range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check = _refuse_unless
        check(_finite(self.temperature) and self.temperature >= 0, "temperature", self.temperature,
              "a finite number >= 0")  # fmt: skip
        check(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "an integer >= -1")
        check(_finite(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        check(_finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        if self.seed is not None:
            check(_is_int(self.seed) and abs(self.seed) <= MAX_SEED, "seed", self.seed,
                  f"an integer of at most {MAX_SEED} in magnitude")  # fmt: skip
        if self.max_tokens is not None:
            check(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens,
                  "an integer >= 1")  # fmt: skip
        check(_is_texts(self.stop), "stop", self.stop, "a tuple of non-empty strings")
        check(len(self.stop) <= MAX_STOP_STRINGS, "stop", len(self.stop),
              f"at most {MAX_STOP_STRINGS} strings")  # fmt: skip
        check(all(_is_int(t) and t >= 0 for t in self.stop_token_ids), "stop_token_ids",
              self.stop_token_ids, "token ids >= 0")  # fmt: skip

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0 or self.top_k == 1


def _finite(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)  # type: ignore[arg-type] # narrowed just above


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)


def _refuse_unless(ok: bool, param: str, value: object, allowed: str) -> None:
    if not ok:
        raise InvalidRequest(f"{param} is {value!r:.200}; it must be {allowed}", param)
