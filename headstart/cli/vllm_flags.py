"""vLLM's flags on the command line of `serve`: translated to headstart's options, applied, or refused with a hint."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from headstart.cli.parser import HELP, HELP_ALL
from headstart.config import SPECULATIVE, SPECULATIVE_FLAGS, EngineConfig, depth_rows
from headstart.errors import UsageError
from headstart.options import Option, OptionGroup

if TYPE_CHECKING:
    from headstart.tools.launch.arguments import ArgumentTable

OTHER = "--vllm"  # hidden option for vLLM flags without a headstart option, as NAME or NAME=VALUE
ENGINE = "--engine"
ENGINE_VALUES = {
    "--quantization", "--kv-cache-dtype", "--dtype", "--device", "--max-model-len", "--block-size",
    "--allowed-media-domains",
}  # fmt: skip
"""Options whose values are vLLM's if --engine names another engine."""
VLLM_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "--quantization": ("none",), "--kv-cache-dtype": ("auto",), "--dtype": ("auto",), "--max-model-len": ("auto", "-1"),
}  # fmt: skip
"""Option -> vLLM's values that mean the same as leaving the option out."""
VLLM_VALUES: Mapping[str, tuple[str, ...]] = {"--dtype": ("half", "float16")}
"""Option -> vLLM's values that are refused with HINTS."""
SIZED = ("--max-model-len", "--max-num-batched-tokens")
SIZES = {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}
SPECULATIVE_KEYS: Mapping[str, tuple[str, type]] = {
    **SPECULATIVE_FLAGS,
    "--spec-method": ("method", str),
    "--spec-model": ("model", str),
    "--spec-tokens": ("num_speculative_tokens", int),
}
"""Flags that each set one key of SPECULATIVE's JSON -> the key and its type."""
LOAD_FORMATS = ("auto", "safetensors", "gguf", "hf")
SPILL_CONNECTORS = ("SharedStorageConnector", "ExampleConnector", "OffloadingConnector", "LMCacheConnectorV1")
"""vLLM's KV connectors that keep prompts in files or memory, as --kv-spill does."""
SPILL_HINT = "--kv-spill DIR keeps prompts in files, which servers of a machine share; --kv-spill-gb limits them"
DISAGGREGATION_HINT = (
    "start two servers with one --kv-spill DIR: one with --role prefill, one with --prefill http://HOST:PORT"
)
ONE_COPY = "headstart runs one copy of a model on one machine: leave it out, or add --engine vllm for several GPUs"


@dataclass(frozen=True)
class VllmFlag:
    """A vLLM flag that --help-all lists."""

    help: str
    hint: str | None = None  # what to do instead; None: the flag changes nothing
    takes_value: bool = False
    allowed: tuple[str | bool, ...] = ()  # values that change nothing; True: the bare flag


FLAGS: Mapping[str, VllmFlag] = {
    "--enable-prefix-caching": VllmFlag("No effect: always on."),
    "--enable-chunked-prefill": VllmFlag("No effect: always on."),
    "--enable-auto-tool-choice": VllmFlag("No effect: always on."),
    "--disable-log-requests": VllmFlag("No effect: prompts are never logged."),
    "--no-enable-log-requests": VllmFlag("No effect: prompts are never logged."),
    "--enable-log-requests": VllmFlag("Refused: prompts are never logged.", "leave it out"),
    "--enforce-eager": VllmFlag("No effect: nothing is compiled or captured."),
    "--trust-remote-code": VllmFlag("No effect: no code is run from checkpoints."),
    "--enable-lora": VllmFlag("No effect: always on. --lora names the adapters."),
    "--max-loras": VllmFlag("No effect: there is no limit.", takes_value=True),
    "--max-cpu-loras": VllmFlag("No effect: there is no limit.", takes_value=True),
    "--max-lora-rank": VllmFlag("No effect: there is no limit.", takes_value=True),
    "--swap-space": VllmFlag("No effect: preempted sequences are computed again.", takes_value=True),
    "--tensor-parallel-size": VllmFlag("Must be 1.", ONE_COPY, True, ("1",)),
    "--pipeline-parallel-size": VllmFlag("Must be 1.", ONE_COPY, True, ("1",)),
    "--data-parallel-size": VllmFlag("Must be 1.", ONE_COPY, True, ("1",)),
    "--speculative-disable-by-batch-size": VllmFlag("No drafts while more sequences run.", takes_value=True),
    "--load-format": VllmFlag(
        "auto, safetensors or gguf.", "safetensors and GGUF are recognized: leave it out", True, LOAD_FORMATS
    ),
    "--tokenizer": VllmFlag("Refused.", "the checkpoint's own tokenizer is used: leave it out", True),
    "--revision": VllmFlag("Refused.", "write MODEL@REVISION", True),
}
ALLOWED_VALUES: Mapping[str, tuple[str | bool, ...]] = {
    "--tokenizer-mode": ("auto", "hf"), "--config-format": ("auto", "hf"), "--runner": ("auto", "generate"),
    "--convert": ("auto", "none"), "--task": ("auto", "generate"), "--scheduling-policy": ("fcfs",),
    "--disable-log-stats": (True,), "--nnodes": ("1",), "--node-rank": ("0",), "--api-server-count": ("1",),
    "--generation-config": ("auto",), "--safetensors-load-strategy": ("lazy",), "--enable-reasoning": (True,),
    "--chat-template-content-format": ("auto",), "--no-enable-log-outputs": (True,), "--disable-access-log": (True,),
    "--disable-uvicorn-access-log": (True,), "--use-v2-block-manager": (True,),
    "--no-enable-lora": (True,), "--no-enforce-eager": (True,), "--no-trust-remote-code": (True,),
    "--no-async-scheduling": (True,), "--async-scheduling": (True,), "--allow-credentials": (True,),
    "--no-enable-expert-parallel": (True,), "--logprobs-mode": ("raw_logprobs",),
    "--no-enable-sleep-mode": (True,), "--cpu-offload-gb": ("0",),
}  # fmt: skip
"""Other vLLM flags -> values that change nothing; True: the bare flag."""
HINTS: tuple[tuple[str, str], ...] = (
    (r"lora", "--lora NAME=PATH names an adapter, and may be repeated: leave this out"),
    (r"mm-|media|image|video|audio|vision|multimodal|language-model-only",
     "headstart reads text and images, without settings: leave it out"),
    (r"parallel|nnodes|node-rank|master-|expert|eplb|all2all|distributed|numa|dcp|pcp|worker|ray|headless|ep-",
     ONE_COPY),
    (r"cuda-?graph|compilation|optimization|enforce-eager|kernel|backend|fuse|performance|jit|autotune",
     "nothing is compiled or captured: leave it out"),
    (r"cpu-offload", "weights are in the machine's memory: leave it out, or round them by --quantization int8 or int4"),
    (r"kv-offload|kv-transfer|lmcache", SPILL_HINT),
    (r"kv-|offload|swap|mamba|cache|transfer|hybrid", "--kv-blocks sizes the KV cache, which is one: leave it out"),
    (r"per-request-spec", "usage.speculation of each answer has the counts: leave it out"),
    (r"speculative|spec-|ngram", "--speculative-config takes method, model and num_speculative_tokens"),
    (r"structured|guided|reasoning-config", "grammars and schemas work without a setting: leave it out"),
    (r"ssl-|uds|grpc|root-path|middleware|h11|uvicorn", "put a proxy in front of it, such as nginx"),
    (r"pool|embed|convert|runner", "headstart generates text only: leave it out"),
    (r"logits-proc", "headstart runs no external code: leave it out"),
    (r"log(?!p)|trace|otlp|profil|metric|stats|observ", "/metrics and --access-log replace it: leave it out"),
    (r"tool|chat|template|response-role", "--tool-call-parser and --chat-template replace it: leave it out"),
    (r"schedul|prefill|batch|stream|async|queue", "--max-num-seqs and --max-num-batched-tokens size passes"),
    (r"memory|device", "--kv-blocks and --threads replace it: leave it out"),
    (r"load|download|safetensors|hf-|tokenizer|config|model|revision|quantization|dtype|rope",
     "the checkpoint's own files decide it: leave it out"),
)  # fmt: skip
"""Patterns in the names of other vLLM flags -> what to do instead; the first match counts."""
NO_COUNTERPART = "headstart has no counterpart: leave it out, or serve with --engine vllm"


def hint_of(flag: str) -> str:
    """Returns the hint for a vLLM flag without a headstart option."""
    from headstart.tools.launch.launcher import engine_data

    if why := engine_data("vllm")["removed"].get(flag):
        return f"{why}: leave it out"
    return next((hint for words, hint in HINTS if re.search(f"(?<![a-z])(?:{words})", flag)), NO_COUNTERPART)


@dataclass(frozen=True, kw_only=True)
class VllmFlags(OptionGroup):
    """vLLM flags that were given."""

    panel = "vLLM's spellings"
    given: Mapping[str, str | bool] = field(default_factory=dict)  # flag -> value; True: a switch

    @classmethod
    def options(cls) -> list[Option]:
        listed = [
            Option(name=flag, help=each.help, flags=(flag,), kind=str if each.takes_value else bool, panel=cls.panel,
                   is_rare=True)
            for flag, each in FLAGS.items()
        ]  # fmt: skip
        return [*listed, Option(name=OTHER, help="", flags=(OTHER,), is_list=True, is_hidden=True)]

    @classmethod
    def collect(cls, values: Mapping[str, Any]) -> Self:
        given = {flag: values[flag] for flag in FLAGS if values[flag] not in (None, False)}
        for word in values[OTHER] or ():
            flag, equals, value = word.partition("=")
            given[flag] = value if equals else True
        return cls(given=given)

    def apply(self, config: EngineConfig) -> EngineConfig:
        """The config with the values of vLLM flags. Raises UsageError for a refused flag."""
        self.check()
        text = self.given.get("--speculative-disable-by-batch-size")
        if text is None:
            return config
        rows = depth_rows("--speculative-disable-by-batch-size", text)
        if config.depth_by_batch is not None:
            raise UsageError("--speculative-disable-by-batch-size and a table by batch size are both given", "give one")
        return replace(config, depth_by_batch=json.dumps(rows))

    def check(self) -> None:
        """Raise UsageError for a refused flag."""
        for flag, value in self.given.items():
            entry = FLAGS.get(flag) or VllmFlag("", hint_of(flag), True, ALLOWED_VALUES.get(flag, ()))
            if entry.hint and value not in entry.allowed:
                shown = flag if value is True else f"{flag} {value}"
                raise UsageError(f"{shown} cannot be honoured", entry.hint)


def rewrite(words: list[str], options: Mapping[str, Option]) -> list[str]:
    """Returns the command line with vLLM's flags replaced by `options` (by flag) or OTHER. Raises UsageError for flags
    that contradict each other."""
    return _Rewriter(words, options).run()


class _Rewriter:
    def __init__(self, words: list[str], options: Mapping[str, Option]) -> None:
        self.rest, self.options = list(words), options
        self.is_other_engine = any(word.partition("=")[0] == ENGINE for word in words)
        self.words: list[str] = []  # rewritten
        self.speculative: dict[str, Any] = {}  # keys of SPECULATIVE's JSON

    def run(self) -> list[str]:
        while self.rest:
            word = self.rest.pop(0)
            if word == "--":
                self.words += [word, *self.rest]
                break
            if not word.startswith("-") or word in (*HELP, HELP_ALL):
                self.words.append(word)
                continue
            flag, equals, value = word.partition("=")
            self._take(with_dashes(flag), value if equals else None, word)
        if self.speculative:
            if any(word.partition("=")[0] == SPECULATIVE for word in self.words):
                raise UsageError(f"{SPECULATIVE} and flags for its keys are both given", "give one of them")
            self.words += [SPECULATIVE, json.dumps(self.speculative)]
        return self.words

    def _take(self, flag: str, value: str | None, word: str) -> None:
        if self._is_own(flag):
            self._take_own(flag, value)
        elif flag in SPECULATIVE_KEYS:
            self._take_speculative(flag, self._value(flag, value))
        elif flag.startswith(f"{SPECULATIVE}."):
            text: Any = self._value(flag, value)
            with suppress(json.JSONDecodeError):
                text = json.loads(text)
            self.speculative[flag.partition(".")[2].replace("-", "_")] = text
        elif name := vllm_name(flag):
            self._take_vllm(flag, name, value)
        else:
            self.words.append(word)

    def _is_own(self, flag: str) -> bool:
        return flag in self.options and not (self.is_other_engine and flag in ENGINE_VALUES)

    def _take_own(self, flag: str, value: str | None) -> None:
        takes_value = not self.options[flag].is_switch
        if takes_value and value is None and self.rest:
            value = self.rest.pop(0)
        if value is None:
            self.words.append(flag)
            return
        if value.lower() in VLLM_DEFAULTS.get(flag, ()):
            return
        if value in VLLM_VALUES.get(flag, ()):
            self.words += [OTHER, f"{flag}={value}"]
            return
        if flag in SIZED:
            value = plain_size(value)
        if flag == "--quantization":
            value = value.lower()
        self.words += [flag, value] if takes_value else [f"{flag}={value}"]

    def _take_vllm(self, flag: str, name: str, value: str | None) -> None:
        """Adds a vLLM flag: as headstart's option if there is one, else under OTHER."""
        if name == "--model":
            self.words.append(self._value(flag, value))
            return
        if _takes_value(name):
            value = self._value(flag, value)
        if self._is_own(name):
            self._take_own(name, value)
        elif name == "--lora-modules" and not self.is_other_engine:
            values = [value or ""]
            while self.rest and not self.rest[0].startswith("-"):
                values.append(self.rest.pop(0))
            self.words += [word for each in values for word in ("--lora", adapter_option(each))]
        elif name == "--kv-transfer-config" and not self.is_other_engine:
            self.words += transfer_options(value or "")
        else:
            self.words += [OTHER, name if value is None else f"{name}={value}"]

    def _take_speculative(self, flag: str, value: str) -> None:
        key, kind = SPECULATIVE_KEYS[flag]
        if (key, value) == ("model", "[ngram]"):
            key, value = "method", "ngram"
        if kind is int and not value.isdecimal():
            raise UsageError(f"{flag} is {value!r}, which is not a number", "for example 3")
        self.speculative[key] = kind(value)

    def _value(self, flag: str, value: str | None) -> str:
        if value is None and self.rest:
            value = self.rest.pop(0)
        if value is None:
            raise UsageError(f"{flag} needs a value", f"write {flag} VALUE, or leave it out")
        return value


def transfer_options(text: str) -> list[str]:
    """vLLM's --kv-transfer-config JSON as options. Raises UsageError for a connector without a counterpart."""
    try:
        given = json.loads(text)
        connector, more = given["kv_connector"], given.get("kv_connector_extra_config", {})
        path = more.get("shared_storage_path")
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UsageError(f"--kv-transfer-config is {text!r}, which names no kv_connector", SPILL_HINT) from None
    if connector in SPILL_CONNECTORS and path:
        return ["--kv-spill", str(path)]
    hint = SPILL_HINT if connector in SPILL_CONNECTORS else DISAGGREGATION_HINT
    raise UsageError(f"--kv-transfer-config with {connector} cannot be honoured", hint)


def adapter_option(text: str) -> str:
    """A value of vLLM's --lora-modules, NAME=PATH or JSON, as one of --lora. Raises UsageError for other JSON."""
    if not text.startswith("{"):
        return text
    try:
        given = json.loads(text)
        return f"{given['name']}={given['path']}"
    except (ValueError, KeyError):
        raise UsageError(f"--lora-modules is {text!r}, without a name and a path", "write --lora NAME=PATH") from None


def plain_size(text: str) -> str:
    """A size as a number: 32k is 32000, 32K is 32768."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", text)
    return str(int(float(size[1]) * SIZES[size[2]])) if size else text


def with_dashes(flag: str) -> str:
    """A long flag with dashes for underscores; other words as they are."""
    return flag.replace("_", "-") if flag.startswith("--") else flag


def vllm_name(flag: str) -> str:
    """The first spelling of a current or removed vLLM flag (with its --no-); empty for other words."""
    from headstart.tools.launch.arguments import published

    table, data = _vllm_tables()
    known = published("vllm")
    flag = data["renamed"].get(flag, flag)
    base = flag.partition(".")[0]
    if base in table.aliases:
        return table.aliases[base]
    is_old = base in data["removed"] or (known is not None and base in known.arguments)
    return flag if table.exact(base) or is_old else ""


def _takes_value(name: str) -> bool:
    table, data = _vllm_tables()
    is_switch = table.kinds.get(name.partition(".")[0]) in ("switch", "boolean")
    return not is_switch and not name.startswith("--no-") and name not in data["switches"]


def _vllm_tables() -> "tuple[ArgumentTable, Mapping[str, Any]]":
    from headstart.tools.launch.arguments import argument_table
    from headstart.tools.launch.launcher import engine_data

    table = argument_table("vllm")
    assert table is not None
    return table, engine_data("vllm")
