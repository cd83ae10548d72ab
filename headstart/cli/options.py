"""Groups of options, and those that several commands share, each declared once.

A command asks for a group by annotating a parameter with it; `expand` turns the group into single options:

    @expand
    def generate(model: Model = None, *, sampling: SamplingOptions, engine: EngineOptions) -> int: ...
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Set
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args, get_type_hints

import typer

from headstart.cli.help import MORE
from headstart.cli.render import finish, progress
from headstart.cli.settings import CONFIG
from headstart.config import Depth, DraftVocab, EngineConfig, config_fields, flag_of, parse_speculative_config
from headstart.core import Progress, Report, SamplingParams
from headstart.errors import UsageError


def model_names(incomplete: str) -> list[str]:
    """Built-in models, for a shell that completes."""
    from headstart import hub

    return [name for name in hub.builtin_names() if name.startswith(incomplete)]


Model = Annotated[
    str | None,
    typer.Argument(
        help="A path, a .gguf file, a Hugging Face repo id or an alias; none: the default model.",
        autocompletion=model_names,
    ),
]
DEFAULTS = SamplingParams()
NUMBERS_OR_WORDS = frozenset({"depth", "draft_vocab"})
"""Fields of EngineConfig that take either."""
CONFIG_FILE = "config_file"
CONFIG_HELP = "TOML file with settings. Default: headstart.toml here, else in the user's folder for settings."
T = TypeVar("T")


REQUIRED: Any = MISSING


def option(doc: str, *flags: str, default: Any = None, **more: Any) -> Any:
    """A field of an OptionGroup. Without `flags` its flag is the field's name; `more`: typer's own settings."""
    return field(default=default, metadata={"flags": flags, "shown": {"help": doc, **more}})


class OptionGroup:
    """A frozen dataclass whose fields are `option(...)`; `--help` shows them in its panel."""

    panel: ClassVar[str] = "Options"

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        hints = get_type_hints(cls)
        return [
            parameter(
                item.name,
                hints[item.name],
                item.default,
                *_flags(item),
                **{"panel": cls.panel, **item.metadata["shown"]},
            )
            for item in fields(cls)  # type: ignore[arg-type]
        ]

    @classmethod
    def collect(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)

    def chosen(self) -> dict[str, Any]:
        """By name, what was given or has a default; of an option that may be repeated a tuple."""
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(self).items()}
        return {name: value for name, value in values.items() if value is not None}

    def parsed(self, **parsers: Callable[[str], Any]) -> dict[str, Any]:
        """All values by name, those with a parser read as comma-separated lists. Raises UsageError."""
        flags = {item.name: _flags(item)[0] for item in fields(self)}  # type: ignore[arg-type]
        lists = {name: comma_list(flags[name], getattr(self, name), parse) for name, parse in parsers.items()}
        return vars(self) | lists


def _flags(item: Field[Any]) -> tuple[str, ...]:
    return item.metadata["flags"] or (f"--{item.name.replace('_', '-')}",)


def parameter(name: str, kind: Any, default: Any, *flags: str, panel: str, **shown: Any) -> inspect.Parameter:
    """An option of a command, of type `kind`."""
    shown_as = typer.Option(*flags, rich_help_panel=panel, **shown)
    default = inspect.Parameter.empty if default is REQUIRED else default
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=Annotated[kind, shown_as])


def expand(command: Callable[..., int]) -> Callable[..., int]:
    """Replace each parameter annotated with an OptionGroup by that group's options."""
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters
    groups = {name: hints[name] for name in own if _is_group(hints[name])}
    shown = [item.replace(annotation=hints[name]) for name, item in own.items() if name not in groups]
    members = {name: group.parameters() for name, group in groups.items()}
    shown += [member for group in members.values() for member in group]
    shown.append(parameter(CONFIG_FILE, Path | None, None, CONFIG, panel=f"{MORE}Settings", help=CONFIG_HELP))

    @functools.wraps(command)
    def run(**values: Any) -> int:
        del values[CONFIG_FILE]  # read before the others were
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

    as_json: bool = option("Print exactly one JSON document on stdout.", "--json", default=False)

    def run(
        self, what: str, work: Callable[[Progress], Report], table: Callable[[dict[str, Any]], None] | None = None
    ) -> int:
        """Work under a progress bar that says `what`, then show the report, for people below a table; the exit code."""
        with progress(what, quiet=self.as_json) as report_progress:
            report = work(report_progress)
        return finish(report, self.as_json, table)


@dataclass(frozen=True, kw_only=True)
class PromptOptions(OptionGroup):
    """Where the prompt comes from."""

    prompt: str | None = option("The prompt.", "--prompt", "-p")
    prompt_file: str | None = option("File that holds the prompt; - reads stdin.", metavar="PATH")
    raw: bool = option("Continue the text as it is, without the chat template.", default=False)

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


def _recommended(doc: str, *flags: str, else_: float) -> Any:
    """An option whose default the model may say."""
    return option(f"{doc} Default: what the model recommends, else {else_:g}.", *flags, show_default=False)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(OptionGroup):
    """How tokens are picked; defaults are SamplingParams', or the model's own. `--seed` belongs to EngineOptions."""

    panel = "Sampling"

    max_tokens: int = option("Longest output, in tokens.", default=DEFAULTS.max_tokens)
    min_tokens: int = option("Shortest output.", default=DEFAULTS.min_tokens)
    temperature: float | None = _recommended("0 is greedy.", else_=DEFAULTS.temperature)
    top_k: int | None = _recommended("Keep the k likeliest tokens; 0 is off.", else_=DEFAULTS.top_k)
    top_p: float | None = _recommended("Keep the likeliest tokens of this mass.", else_=DEFAULTS.top_p)
    min_p: float | None = _recommended("Drop tokens below this share of the best.", else_=DEFAULTS.min_p)
    repetition_penalty: float | None = _recommended(
        "Divides logits of tokens seen before; 1 is off.", else_=DEFAULTS.repetition_penalty
    )
    presence_penalty: float = option("Subtracted once from tokens already put out.", default=DEFAULTS.presence_penalty)
    frequency_penalty: float = option("Subtracted per earlier occurrence.", default=DEFAULTS.frequency_penalty)
    logit_bias: list[str] | None = option("TOKEN_ID=BIAS; may be repeated.", metavar="ID=BIAS")
    stop: list[str] | None = option("Stop before this text; may be repeated.")
    stop_token_ids: list[int] | None = option("Stop at this token; may be repeated.", "--stop-token-id")
    ignore_eos: bool = option("Go on past the model's end of text.", default=DEFAULTS.ignore_eos)
    logprobs: int | None = option("Report so many likeliest tokens per position.", default=DEFAULTS.logprobs)
    n: int = option("Number of outputs.", default=DEFAULTS.n)

    def params(self, seed: int | None, recommended: Mapping[str, Any] | None = None) -> SamplingParams:
        """Checked SamplingParams, with what the model recommends where nothing was said; raises UsageError for a value
        outside its range."""
        values = {**(recommended or {}), **self.chosen()}
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

    panel = "Engine"
    config: EngineConfig
    given: frozenset[str] = frozenset()
    """Names of the EngineConfig fields that the user set."""
    usual: ClassVar[frozenset[str]] = frozenset({"threads", "drafter", "head", "depth", "quantization", "seed"})
    """Fields that --help shows; the others come with --help-all."""
    load_tests: ClassVar[bool] = False
    """May speed be measured on texts that are not the model's?"""

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        more = f"{MORE}{cls.panel}, more"
        return [
            *(cls._engine_option(name, hint) for name, hint in get_type_hints(EngineConfig).items()),
            parameter("speculative_config", str | None, None, "--speculative-config", panel=more,
                      help="vLLM's JSON for method, depth and head."),
            parameter("no_mtp", bool, False, "--no-mtp", panel=cls.panel if "depth" in cls.usual else more,
                      help="Plain decoding; the same as --depth 0."),
        ]  # fmt: skip

    @classmethod
    def _engine_option(cls, name: str, hint: Any) -> inspect.Parameter:
        item = config_fields()[name]
        flag, doc = item.metadata["flag"], item.metadata["doc"]
        if item.default is True:  # only switching it off says something new
            flag, doc = f"--no-{flag.removeprefix('--')}", f"Do not: {doc[0].lower()}{doc[1:]}"
        doc = doc if item.default is None or isinstance(item.default, bool) else f"{doc} Default: {item.default}."
        kind, default = (bool, False) if hint is bool else (_as_option(hint) | None, None)
        hidden = name == "synthetic_acceptance" and not cls.load_tests  # refused, saying why, rather than shown
        panel = cls.panel if name in cls.usual else f"{MORE}{cls.panel}, more"
        return parameter(name, kind, default, flag, panel=panel, help=doc, show_default=False, hidden=hidden)

    @classmethod
    def collect(cls, values: Mapping[str, Any]) -> Self:
        given: dict[str, Any] = {
            name: not item.default if values[name] is True else values[name]  # a switch turns its default around
            for name, item in config_fields().items()
            if values[name] is not None and values[name] is not False
        }
        for name in NUMBERS_OR_WORDS & given.keys():
            given[name] = as_depth(given[name])
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
        if config.kv_spill is not None and not config.enable_prefix_caching:
            raise UsageError("--kv-spill keeps prompts, --no-enable-prefix-caching keeps none", "give one of them")
        return cls(config=config, given=frozenset(given))

    def refuse_others(self, used: Set[str], purpose: str) -> None:
        """Raises UsageError for an option that was given but has no meaning for `purpose`."""
        if unused := sorted(self.given - used):
            raise UsageError(f"{flag_of(unused[0])} has no meaning for {purpose}", "leave it out")


@dataclass(frozen=True, kw_only=True)
class LoadTestOptions(EngineOptions):
    """EngineOptions of a command that load tests are made with."""

    load_tests: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class ServingOptions(LoadTestOptions):
    """EngineOptions of a server: how much it takes at a time counts there."""

    usual: ClassVar[frozenset[str]] = EngineOptions.usual | {
        "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_blocks", "kv_cache_dtype",
    }  # fmt: skip


def _as_option(hint: Any) -> Any:
    """The type to parse: `X | None` is X; EngineConfig itself checks choices, so that each error has one wording."""
    members = [member for member in get_args(hint) if member is not type(None)]
    if members and all(isinstance(member, str) for member in members):
        return str
    return str if hint in (Depth, DraftVocab) else members[0] if members else hint


def as_depth(text: str) -> Any:
    """A number where it is one; EngineConfig refuses other words."""
    return int(text) if text.lstrip("-").isdigit() else text
