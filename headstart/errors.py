"""User errors: what was wrong, which value, what to do. Everything else is a bug and may raise as it likes.

HeadstartError
  UsageError       a flag, parameter or request value is wrong
  ModelError       a checkpoint, head or tokenizer cannot be read or does not fit
  CapacityError    the request is well formed but does not fit this engine (context, memory)
  CheckFailed      a check ran and its answer is no (verify, doctor)
  BusyError        the server has too much to do, or is about to end
  LimitError       whoever asks has had what there is for him
  TimeLimitError   a request took longer than it may
  GenerationError  a text could not be finished: NaN in the logits, a fault in a step
    DeadEndError   what the request demands left no token to choose
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class HeadstartError(Exception):
    """Base of all errors shown to users: one line and, where there is one, a hint."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


class UsageError(HeadstartError):
    """A flag, parameter or request value is wrong."""


class ModelError(HeadstartError):
    """A checkpoint, head or tokenizer cannot be read, is unknown or does not fit."""


class CapacityError(HeadstartError):
    """A well-formed request that does not fit this engine: context length or memory."""


class CheckFailed(HeadstartError):
    """A check ran to its end and its answer is no."""


class BusyError(HeadstartError):
    """The server has too much to do, or is about to end: later, or somewhere else. `seconds`: after which to try."""

    def __init__(self, message: str, hint: str = "", seconds: float = 1.0) -> None:
        super().__init__(message, hint)
        self.seconds = seconds


class LimitError(HeadstartError):
    """Whoever asks has had what there is for him. `seconds`: after which to try; `headers`: what he is told of it."""

    def __init__(
        self, message: str, hint: str = "", seconds: float = 1.0, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message, hint)
        self.seconds, self.headers = seconds, dict(headers or {})


class TimeLimitError(HeadstartError):
    """A request took longer than it may."""


class GenerationError(HeadstartError):
    """A text broke off: no token was left to choose, the logits were not finite, or a step failed. Others ran on."""


class DeadEndError(GenerationError):
    """A text broke off because of what its request demands: a constraint, or bans that left no token to choose."""


@dataclass(frozen=True)
class Status:
    """What an error means to the outside: process exit code and HTTP status."""

    exit_code: int
    http: int


STATUS: dict[type[BaseException], Status] = {
    CheckFailed: Status(1, 500),
    UsageError: Status(2, 400),
    ModelError: Status(2, 404),
    CapacityError: Status(2, 400),
    BusyError: Status(3, 503),
    LimitError: Status(3, 429),
    TimeLimitError: Status(3, 504),
    DeadEndError: Status(2, 400),
    GenerationError: Status(3, 500),
    KeyboardInterrupt: Status(130, 499),
}
INTERNAL = Status(3, 500)


def status_of(error: BaseException) -> Status:
    """The exit code and HTTP status of `error`; internal error if no row of the table fits."""
    return next((status for kind, status in STATUS.items() if isinstance(error, kind)), INTERNAL)
