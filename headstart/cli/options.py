"""The options that several commands share, each declared once, in groups.

A command asks for a group by annotating a parameter with it; `expand` turns the group into single options:

    @expand
    def generate(model: Model = None, *, sampling: SamplingOptions, engine: EngineOptions) -> int: ...
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Set
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args, get_type_hints

import typer

from headstart.config import Depth, EngineConfig, config_fields, flag_of, parse_speculative_config
from headstart.core import SamplingParams
from headstart.errors import UsageError

Model = Annotated[
    str | None,
    typer.Argument(help="A path, a .gguf file, a Hugging Face repo id or an alias; none: the default model."),
]
DEFAULTS = SamplingParams()
T = TypeVar("T")


def _option(*flags: str, help: str, panel: str = "Options", **more: Any) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel=panel, **more)


class OptionGroup:
    """A frozen dataclass whose fields are `Annotated[type, typer.Option(...)]`."""

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        hints = get_type_hints(cls, include_extras=True)
        return [_parameter(item.name, hints[item.name], item.default) for item in fields(cls)]  # type: ignore[arg-type]

    @classmethod
    def collect(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    empty = inspect.Parameter.empty
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=empty if default is MISSING else default, annotation=annotation)


def expand(command: Callable[..., int]) -> Callable[..., int]:
    """Replace each parameter annotated with an OptionGroup by that group's options."""
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters
    groups = {name: hints[name] for name in own if _is_group(hints[name])}
    shown = [item.replace(annotation=hints[name]) for name, item in own.items() if name not in groups]
    members = {name: group.parameters() for name, group in groups.items()}
    shown += [member for group in members.values() for member in group]

    @functools.wraps(command)
    def run(**values: Any) -> int:
        for name, group in groups.items():
            values[name] = group.collect({member.name: values.pop(member.name) for member in members[name]})
        return command(**values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    run.__signature__ = inspect.Signature([item.replace(kind=keyword) for item in shown])  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in shown}
    return run


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, OptionGroup)


@dataclass(frozen=True, kw_only=True)
class OutputOptions(OptionGroup):
    """How a result is shown."""

    as_json: Annotated[bool, _option("--json", help="Print exactly one JSON document on stdout.")] = False


@dataclass(frozen=True, kw_only=True)
class PromptOptions(OptionGroup):
    """Where the prompt comes from."""

    prompt: Annotated[str | None, _option("--prompt", "-p", help="The prompt.")] = None
    prompt_file: Annotated[
        str | None, _option("--prompt-file", help="File that holds the prompt; - reads stdin.", metavar="PATH")
    ] = None
    raw: Annotated[bool, _option("--raw", help="Continue the text as it is, without the chat template.")] = False

    def text(self) -> str:
        """The one prompt. Without an option it is read from stdin when that is not a terminal."""
        if self.prompt is not None and self.prompt_file is not None:
            raise UsageError("--prompt and --prompt-file are both given", "give one of them")
        if self.prompt is not None:
            text = self.prompt
        elif self.prompt_file not in (None, "-"):
            text = read_text(Path(str(self.prompt_file)), "--prompt-file")
        elif self.prompt_file == "-" or not sys.stdin.isatty():
            text = sys.stdin.read()
        else:
            raise UsageError("no prompt", "give --prompt TEXT or --prompt-file PATH, or pipe text into stdin")
        if not text.strip():
            raise UsageError("the prompt is empty", "give --prompt some text")
        return text


def read_text(path: Path, flag: str) -> str:
    """The text of a file that the user named with `flag`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"{flag}: cannot read {path}: {reason}", "is the path right?") from None


def comma_list(flag: str, text: str | None, parse: Callable[[str], T]) -> tuple[T, ...]:
    """The values of a comma-separated list, each once; none for an option that is not given."""
    if text is None:
        return ()
    try:
        return tuple(dict.fromkeys(parse(item.strip()) for item in text.split(",")))
    except (ValueError, KeyError):
        raise UsageError(f"{flag} is {text!r}, which is not a list of such values", f"see {flag} in --help") from None


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(OptionGroup):
    """How tokens are picked; defaults are SamplingParams'. `--seed` belongs to EngineOptions."""

    max_tokens: Annotated[int, _option("--max-tokens", help="Longest output, in tokens.", panel="Sampling")] = (
        DEFAULTS.max_tokens
    )
    min_tokens: Annotated[int, _option("--min-tokens", help="Shortest output.", panel="Sampling")] = DEFAULTS.min_tokens
    temperature: Annotated[float, _option("--temperature", "-t", help="0 is greedy.", panel="Sampling")] = (
        DEFAULTS.temperature
    )
    top_k: Annotated[int, _option("--top-k", help="Keep the k likeliest tokens; 0 is off.", panel="Sampling")] = (
        DEFAULTS.top_k
    )
    top_p: Annotated[float, _option("--top-p", help="Keep the likeliest tokens of this mass.", panel="Sampling")] = (
        DEFAULTS.top_p
    )
    min_p: Annotated[float, _option("--min-p", help="Drop tokens below this share of the best.", panel="Sampling")] = (
        DEFAULTS.min_p
    )
    repetition_penalty: Annotated[
        float, _option("--repetition-penalty", help="Divides logits of tokens seen before; 1 is off.", panel="Sampling")
    ] = DEFAULTS.repetition_penalty
    presence_penalty: Annotated[
        float, _option("--presence-penalty", help="Subtracted once from tokens already put out.", panel="Sampling")
    ] = DEFAULTS.presence_penalty
    frequency_penalty: Annotated[
        float, _option("--frequency-penalty", help="Subtracted per earlier occurrence.", panel="Sampling")
    ] = DEFAULTS.frequency_penalty
    logit_bias: Annotated[
        list[str] | None,
        _option("--logit-bias", help="TOKEN_ID=BIAS; may be repeated.", panel="Sampling", metavar="ID=BIAS"),
    ] = None
    stop: Annotated[
        list[str] | None, _option("--stop", help="Stop before this text; may be repeated.", panel="Sampling")
    ] = None
    stop_token_ids: Annotated[
        list[int] | None, _option("--stop-token-id", help="Stop at this token; may be repeated.", panel="Sampling")
    ] = None
    ignore_eos: Annotated[
        bool, _option("--ignore-eos", help="Go on past the model's end of text.", panel="Sampling")
    ] = DEFAULTS.ignore_eos
    logprobs: Annotated[
        int | None, _option("--logprobs", help="Report so many likeliest tokens per position.", panel="Sampling")
    ] = DEFAULTS.logprobs
    n: Annotated[int, _option("--n", "-n", help="Number of outputs.", panel="Sampling")] = DEFAULTS.n

    def params(self, seed: int | None) -> SamplingParams:
        """Checked SamplingParams; raises UsageError for a value outside its range."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["logit_bias"] = dict(_bias(text) for text in self.logit_bias or ())
        values["stop"] = tuple(self.stop or ())
        values["stop_token_ids"] = tuple(self.stop_token_ids or ())
        return SamplingParams(**values, seed=seed)


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise UsageError(f"--logit-bias is {text!r}, which is not TOKEN_ID=BIAS", "for example 1234=-5") from None


@dataclass(frozen=True, kw_only=True)
class EngineOptions(OptionGroup):
    """EngineConfig from the command line: one option per field, plus vLLM's JSON and `--no-mtp`."""

    config: EngineConfig
    given: frozenset[str] = frozenset()
    """Names of the EngineConfig fields that the user set."""
    load_tests: ClassVar[bool] = False
    """May speed be measured on texts that are not the model's?"""

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        hints = get_type_hints(EngineConfig)
        engine = [
            _parameter(name, Annotated[_as_option(hints[name]) | None, _engine_option(name, cls.hidden(name))], None)
            if hints[name] is not bool
            else _parameter(name, Annotated[bool, _engine_option(name)], False)
            for name in config_fields()
        ]
        extra = {
            "speculative_config": (str | None, None, "--speculative-config", "vLLM's JSON for method, depth and head."),
            "no_mtp": (bool, False, "--no-mtp", "Plain decoding; the same as --depth 0."),
        }
        return engine + [
            _parameter(name, Annotated[kind, _option(flag, help=doc, panel="Engine")], default)
            for name, (kind, default, flag, doc) in extra.items()
        ]

    @classmethod
    def hidden(cls, name: str) -> bool:
        """Refused, saying why, rather than shown."""
        return name == "synthetic_acceptance" and not cls.load_tests

    @classmethod
    def collect(cls, values: Mapping[str, Any]) -> Self:
        given: dict[str, Any] = {
            name: not item.default if values[name] is True else values[name]  # a switch turns its default around
            for name, item in config_fields().items()
            if values[name] is not None and values[name] is not False
        }
        if "depth" in given:
            given["depth"] = as_depth(given["depth"])
        overrides = parse_speculative_config(values["speculative_config"]) if values["speculative_config"] else {}
        if twice := sorted(given.keys() & overrides.keys()):
            raise UsageError(f"{flag_of(twice[0])} and --speculative-config both set {twice[0]}", "give one of them")
        given |= overrides
        if values["no_mtp"]:
            if given.get("depth"):
                raise UsageError(f"--no-mtp and a depth of {given['depth']} contradict each other", "give one of them")
            given["depth"] = 0
        config = EngineConfig(**given)
        if config.synthetic_acceptance and not cls.load_tests:
            raise UsageError("--synthetic-acceptance is for load tests", "use it with generate, serve or bench")
        return cls(config=config, given=frozenset(given))

    def refuse_others(self, used: Set[str], purpose: str) -> None:
        """Raises UsageError for an option that was given but has no meaning for `purpose`."""
        if unused := sorted(self.given - used):
            raise UsageError(f"{flag_of(unused[0])} has no meaning for {purpose}", "leave it out")


@dataclass(frozen=True, kw_only=True)
class LoadTestOptions(EngineOptions):
    """EngineOptions of a command that load tests are made with."""

    load_tests: ClassVar[bool] = True


def _engine_option(name: str, hidden: bool = False) -> Any:
    item = config_fields()[name]
    flag, doc = item.metadata["flag"], item.metadata["doc"]
    if item.default is True:  # only switching it off says something new
        flag, doc = f"--no-{flag.removeprefix('--')}", f"Do not: {doc[0].lower()}{doc[1:]}"
    doc = doc if item.default is None or isinstance(item.default, bool) else f"{doc} Default: {item.default}."
    return _option(flag, help=doc, panel="Engine", show_default=False, hidden=hidden)


def _as_option(hint: Any) -> Any:
    """The type to parse: `X | None` is X; EngineConfig itself checks choices, so that each error has one wording."""
    members = [member for member in get_args(hint) if member is not type(None)]
    if members and all(isinstance(member, str) for member in members):
        return str
    return str if hint == Depth else members[0] if members else hint


def as_depth(text: str) -> Any:
    """A number where it is one; EngineConfig refuses other words."""
    return int(text) if text.lstrip("-").isdigit() else text
