"""Groups of options that several commands share."""

import sys
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_origin, get_type_hints

from headstart.cli.render import finish, progress, text_stdin
from headstart.config import (
    AUTO,
    SPELLINGS,
    Depth,
    DraftVocab,
    EngineConfig,
    config_fields,
    parse_speculative_config,
)
from headstart.errors import HeadstartError, ParameterError, UsageError
from headstart.files import read_text
from headstart.options import Option, OptionGroup, option
from headstart.params import Parameter, SamplingParams, parameters
from headstart.wording import LEAVE_OUT, flag_of

if TYPE_CHECKING:
    from headstart.core import Progress, Report
    from headstart.text.chat import ChatTemplate

NUMBERS_OR_WORDS = frozenset({"depth", "draft_vocab"})  # fields of EngineConfig that take a number or a word


@dataclass(frozen=True, kw_only=True)
class OutputOptions(OptionGroup):
    """How a result is shown."""

    as_json: bool = option("Print exactly one JSON document on stdout.", "--json", default=False)

    def run(
        self, what: str, work: "Callable[[Progress], Report]", table: Callable[[dict[str, Any]], None] | None = None
    ) -> int:
        """Run `work` under a progress bar named `what` and show its report, below a table; returns the exit code."""
        with progress(what) as report_progress:
            report = work(report_progress)
        return finish(report, self.as_json, table)


@dataclass(frozen=True, kw_only=True)
class PromptOptions(OptionGroup):
    """Where the prompt comes from."""

    prompt: str | None = option("The prompt.", "--prompt", "-p")
    prompt_file: str | None = option("File that holds the prompt; - reads stdin.", metavar="PATH")
    raw: bool = option("Continue the text as it is, without the chat template.", default=False)

    def text(self) -> str:
        """Returns the prompt; without an option it is read from stdin. Raises UsageError for a terminal, an empty
        prompt, or two prompts."""
        if self.prompt is not None and self.prompt_file is not None:
            raise UsageError("--prompt and --prompt-file are both given", "give one of them")
        if self.prompt is not None:
            text = self.prompt
        elif self.prompt_file not in (None, "-"):
            text = read_text(str(self.prompt_file), flag="--prompt-file")
        elif self.prompt_file == "-" or not sys.stdin.isatty():
            with text_stdin() as stdin:
                text = stdin.read()
        else:
            raise UsageError("no prompt", "give --prompt TEXT or --prompt-file PATH, or pipe text into stdin")
        if not text.strip():
            raise UsageError("the prompt is empty", "give --prompt some text")
        return text


def read_template(name: str | None) -> "ChatTemplate | None":
    """The template of --chat-template, read before the model is loaded. Raises UsageError or ModelError."""
    from headstart.text.chat import ChatTemplate

    return ChatTemplate.from_name(name) if name else None


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(OptionGroup):
    """SamplingParams from the command line. --seed belongs to EngineOptions."""

    panel = "Sampling"
    refused: ClassVar[frozenset[str]] = frozenset()  # parameters that the command refuses; no help shows them
    given: Mapping[str, Any]  # fields of SamplingParams, without those whose default the model may set

    @classmethod
    def options(cls) -> list[Option]:
        return [cls._sampling_option(row) for row in parameters().values() if row.flag]

    @classmethod
    def _sampling_option(cls, row: Parameter) -> Option:
        assert row.flag
        kind, is_list, more = SAMPLING_KINDS[row.kind]
        doc, default = row.help, None if is_list else row.default
        if row.in_generation_config:
            doc, default = f"{doc} Default: the model's, else {row.default:g}.", None
        elif is_list:
            doc = f"{doc} May be repeated."
        is_refused = row.name in cls.refused
        more = {"kind": kind, "is_list": is_list, "panel": cls.panel, **more}
        more |= {"is_hidden": is_refused, "is_refused": is_refused}
        return Option(name=row.name, help=doc, flags=(row.flag,), default=default, **more)

    @classmethod
    def collect(cls, values: Mapping[str, Any]) -> Self:
        given = {name: value for name, value in values.items() if value is not None}
        return cls(given=given | {"logit_bias": dict(given.get("logit_bias", ()))})

    def params(self, seed: int | None, recommended: Mapping[str, Any] | None = None) -> SamplingParams:
        """With the model's recommended values where none is given. Raises ParameterError for a value out of range."""
        return SamplingParams(**{**(recommended or {}), **self.given}, seed=seed)


def by_flag(error: HeadstartError) -> HeadstartError:
    """The error with the flag of a sampling parameter instead of its name."""
    if isinstance(error, ParameterError) and (row := parameters().get(error.param)) and row.flag:
        return error.renamed(row.flag)
    return error


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise UsageError(f"--logit-bias is {text!r}, which is not TOKEN_ID=BIAS", "for example 1234=-5") from None


SAMPLING_KINDS: Mapping[str, tuple[type, bool, dict[str, Any]]] = {
    "number": (float, False, {}),
    "integer": (int, False, {}),
    "boolean": (bool, False, {}),
    "texts": (str, True, {}),
    "token_ids": (int, True, {}),
    "token_numbers": (str, True, {"metavar": "ID=BIAS", "parse": _bias}),
}
"""Kind of a sampling parameter -> type of a value, may the option be repeated, other fields of Option."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions(OptionGroup):
    """EngineConfig from the command line: one option per field, plus vLLM's JSON and `--no-mtp`."""

    panel = "Engine"
    config: EngineConfig
    given: frozenset[str] = frozenset()  # names of the EngineConfig fields that the user set
    common: ClassVar[frozenset[str]] = frozenset({"threads", "drafter", "head", "depth", "quantization", "seed"})
    """Fields that --help shows; --help-all shows the others."""
    refused: ClassVar[frozenset[str]] = frozenset({"synthetic_acceptance"})
    """Fields that the command refuses with a reason; no help shows them."""

    @classmethod
    def options(cls) -> list[Option]:
        return [
            *(cls._engine_option(name, hint) for name, hint in get_type_hints(EngineConfig).items()),
            cls._option("speculative_config", "--speculative-config", "vLLM's JSON for method, depth and head."),
            cls._option("no_mtp", "--no-mtp", "Plain decoding; the same as --depth 0.", bool),
        ]

    @classmethod
    def _option(cls, name: str, flag: str, doc: str, hint: Any = str, **more: Any) -> Option:
        of_field = name if name != "no_mtp" else "depth"
        is_rare, is_refused = of_field not in cls.common, of_field in cls.refused
        panel, default = f"{cls.panel}, more" if is_rare else cls.panel, False if hint is bool else None
        more |= {"panel": panel, "is_rare": is_rare, "is_hidden": is_refused, "is_refused": is_refused}
        return Option.of_type(hint, name=name, help=doc, flags=(flag,), default=default, **more)

    @classmethod
    def _engine_option(cls, name: str, hint: Any) -> Option:
        item = config_fields()[name]
        flag, doc = flag_of(name), item.metadata["doc"]
        if item.default is True:  # the option switches it off
            flag, doc = f"--no-{flag.removeprefix('--')}", f"Do not: {doc[0].lower()}{doc[1:]}"
        if item.default is not None and not isinstance(item.default, bool):
            doc += f" Default: {item.default}."
        if hint == tuple[str, ...] | None:
            hint = list[str]
        if hint in (Depth, DraftVocab) or get_origin(hint) is Literal:
            hint = str  # EngineConfig checks these values
        more: dict[str, Any] = {"metavar": item.metadata["metavar"]} if item.metadata["metavar"] else {}
        if spellings := SPELLINGS.get(name):
            more["parse"] = lambda text: spellings.get(text, text)
        return cls._option(name, flag, doc, hint, **more)

    @classmethod
    def collect(cls, values: Mapping[str, Any]) -> Self:
        given: dict[str, Any] = {
            name: not item.default if values[name] is True else values[name]  # a switch inverts its default
            for name, item in config_fields().items()
            if values[name] is not None and values[name] is not False
        }
        for name in NUMBERS_OR_WORDS & given.keys():
            given[name] = number_or_word(given[name])
        overrides = parse_speculative_config(values["speculative_config"]) if values["speculative_config"] else {}
        if twice := sorted(given.keys() & overrides.keys()):
            raise UsageError(f"{flag_of(twice[0])} and --speculative-config both set {twice[0]}", "give one of them")
        given |= overrides
        if values["no_mtp"]:
            if given.get("depth"):
                raise UsageError(f"--no-mtp and a depth of {given['depth']} contradict each other", "give one of them")
            given["depth"] = 0
        config = EngineConfig(**given)
        if config.synthetic_acceptance and "synthetic_acceptance" in cls.refused:
            raise UsageError("--synthetic-acceptance is for load tests", "use it with generate, serve or bench")
        if config.kv_spill is not None and not config.enable_prefix_caching:
            raise UsageError("--kv-spill keeps prompts, --no-enable-prefix-caching keeps none", "give one of them")
        return cls(config=config, given=frozenset(given))

    def refuse_others(self, used: Set[str], purpose: str) -> None:
        """Raise UsageError for a given option without a meaning for `purpose`. `used`: the others."""
        if unused := sorted(self.given - used):
            raise UsageError(f"{flag_of(unused[0])} has no meaning for {purpose}", LEAVE_OUT)


@dataclass(frozen=True, kw_only=True)
class LoadTestOptions(EngineOptions):
    """EngineOptions of commands for load tests."""

    refused: ClassVar[frozenset[str]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class ServingOptions(LoadTestOptions):
    """EngineOptions of a server, with limits of its load in --help."""

    common: ClassVar[frozenset[str]] = EngineOptions.common | {
        "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_blocks", "kv_cache_dtype",
    }  # fmt: skip


def number_or_word(text: str) -> int | str:
    """A whole number where the text is one, else the text; EngineConfig refuses unknown words."""
    return int(text) if text.removeprefix("-").isdecimal() else text


def with_adapted(model: str | None, config: EngineConfig) -> EngineConfig:
    """The config with the model's adapted head, unless the user has named a head; prints the head."""
    from headstart.tools.saved import find_adapted_head

    if (found := find_adapted_head(model, config)) is None:
        return config
    path, adapted = found
    print(f"headstart: adapted head: {adapted}", file=sys.stderr)
    # an adapted head has its own draft vocabulary
    vocabulary = AUTO if isinstance(config.draft_vocab, int) else config.draft_vocab
    return replace(config, head=str(path), draft_vocab=vocabulary)
