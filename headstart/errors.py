"""Errors shown to users: what was wrong, which value, what to do. Any other exception is a bug."""

import copyreg
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


def quoted(value: object) -> str:
    """A value as an error quotes it: its repr, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class HeadstartError(Exception):
    """Base of all errors shown to users: one line, and a hint unless empty. Both may hold options (wording.py)."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without the arguments of `__init__`, which differ by class: process pools pickle errors."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


class UsageError(HeadstartError):
    """A flag, parameter or request value is wrong."""


class ParameterError(UsageError):
    """The value of one parameter is wrong. The message begins with the parameter's name."""

    def __init__(self, param: str, problem: str, hint: str = "") -> None:
        super().__init__(param + " " + problem, hint)  # an f-string would drop the options
        self.param = param
        self.problem = problem

    def renamed(self, param: str) -> "ParameterError":
        """The error under the name that the caller of another interface gave."""
        return ParameterError(param, self.problem, self.hint)


class ModelError(HeadstartError):
    """A checkpoint, head or tokenizer cannot be read, is unknown or does not fit."""


class CapacityError(HeadstartError):
    """A well-formed request that does not fit this engine's context length or memory."""


class ContextError(CapacityError):
    """A prompt that is longer than the context. Agents know such errors by the words "prompt is too long"."""

    def __init__(self, found: str, context: int, hint: str) -> None:
        """found: the prompt's length in words; context: tokens."""
        super().__init__(f"the prompt is too long: {found}, but the context holds {context} tokens", hint)


class CheckFailed(HeadstartError):
    """A check ran to its end and its answer is no."""


class BusyError(HeadstartError):
    """The server is overloaded or shutting down."""

    def __init__(self, message: str, hint: str = "", seconds: float = 1.0) -> None:
        super().__init__(message, hint)
        self.seconds = seconds  # until the client should try again


class LimitError(HeadstartError):
    """The client has used up its quota."""

    def __init__(
        self, message: str, hint: str = "", seconds: float = 1.0, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message, hint)
        self.seconds = seconds  # until the client should try again
        self.headers = dict(headers or {})  # of the response: the quota and what is left


class TimeLimitError(HeadstartError):
    """A request took longer than its time limit."""


class GenerationError(HeadstartError):
    """A text broke off: no token was left to choose, the logits were not finite, or a step failed."""


class DeadEndError(GenerationError):
    """A text broke off because its constraint, or its banned tokens, left no token to choose."""


@dataclass(frozen=True)
class Status:
    """Exit code of a command and HTTP status of a response."""

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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint with the known word that is most like an unknown one; empty if none is."""
    from difflib import get_close_matches  # slow to import

    return next((f"did you mean {each}?" for each in get_close_matches(word, sorted(known), n=1)), "")


def status_of(error: BaseException) -> Status:
    """The exit code and HTTP status of `error`; internal error if no row of the table fits."""
    return next((status for kind, status in STATUS.items() if isinstance(error, kind)), INTERNAL)
