"""Every error that a caller can see, as one tree.

    PrefixKVError
    ├── ConfigError              an option that cannot be honoured (also a ValueError)
    ├── ModelError               a model that cannot be loaded, or not be served right
    │   └── WeightsError         its files are missing, cut short or not what was pinned
    ├── InvalidRequest           a field of a request is wrong (also a ValueError)   HTTP 400
    │   ├── ContextLengthExceeded    the model's context is too short for it         HTTP 400
    │   └── RequestTooLarge          the pool can never hold it                      HTTP 400
    ├── ModelNotFound            no served model has that name                       HTTP 404
    ├── QueueFull                too many requests are waiting                       HTTP 429
    ├── StepFailed               the step that computed the request failed           HTTP 500
    ├── EngineStopped            starting, draining or stopped                       HTTP 503
    ├── StaleSequence            used after its release, or after its weights were replaced
    └── InvariantViolation       a fault of prefixkv itself, found by check_invariants()

"Not now" is a value (`False`, `None`), never one of these; "impossible" is an `assert`.
Messages carry the numbers that decided.
"""


class PrefixKVError(Exception):
    """Base of every error that prefixkv raises on purpose."""


class ConfigError(PrefixKVError, ValueError):
    """An option is out of range or does not go with another one."""


class ModelError(PrefixKVError):
    """A model cannot be loaded, or cannot be served right; the message says why."""


class WeightsError(ModelError):
    """The files of a model are missing, cut short or not the pinned ones."""


class InvalidRequest(PrefixKVError, ValueError):
    """A field of a request is wrong.

    Args:
        message: one sentence with the offending value and the allowed range.
        param: the name of the field, as the client spelled it; None where no single field is.
    """

    code: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output do not fit into the model's context."""

    code = "context_length_exceeded"


class RequestTooLarge(InvalidRequest):
    """The pool can never hold the request, however long it waits."""

    code = "request_too_large"


class ModelNotFound(PrefixKVError):
    """No served model has the requested name."""


class QueueFull(PrefixKVError):
    """The waiting queue is at its limit; try again later."""


class StepFailed(PrefixKVError):
    """The step that computed a request failed; nothing of it was published."""


class EngineStopped(PrefixKVError):
    """The engine is not running (any more)."""


class StaleSequence(PrefixKVError):
    """A sequence was used after its release, or after its weights were replaced."""


class InvariantViolation(PrefixKVError, AssertionError):
    """The books contradict themselves: a fault of prefixkv; the message names the invariant."""
