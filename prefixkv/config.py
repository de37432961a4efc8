"""Options of the engine, validated once."""

from dataclasses import dataclass

from prefixkv.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of the queue.

    Args:
        max_num_seqs: requests that may run at once.
        max_num_batched_tokens: the token budget of a step.
        max_model_len: prompt and output tokens of one request, at most.
        max_num_waiting: requests that may wait; None means any number.
    """

    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_waiting: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            require_positive(name, getattr(self, name))
        if self.max_num_waiting is not None:
            require_positive("max_num_waiting", self.max_num_waiting)


def require_positive(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is an integer >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be an integer >= 1")
