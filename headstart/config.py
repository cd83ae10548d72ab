"""`EngineConfig`: the single source of engine flags, their defaults and their documentation."""

import json
import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from functools import cache, lru_cache
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from headstart import registry
from headstart.errors import ParameterError, UsageError
from headstart.files import user_path
from headstart.wording import LEAVE_OUT, option

Quantization = Literal["int8", "int4"]
WeightFormat = Literal[
    Quantization, "awq", "gptq", "fp8", "compressed-tensors", "bitsandbytes", "mxfp4", "nvfp4", "gguf"
]
KVDtype = Literal["float32", "bfloat16", "int8", "fp8"]
WEIGHT_SPELLINGS = {
    "awq_marlin": "awq", "gptq_marlin": "gptq", "auto-round": "gptq", "auto_round": "gptq", "modelopt": "fp8",
    "modelopt_fp4": "nvfp4", "fbgemm_fp8": "fp8", "compressed_tensors": "compressed-tensors",
}  # fmt: skip
"""vLLM's spellings of a WeightFormat."""
KV_SPELLINGS = {"bf16": "bfloat16", "fp8_e4m3": "fp8"}  # other engines' spellings of a KVDtype
SPELLINGS = {"quantization": WEIGHT_SPELLINGS, "kv_cache_dtype": KV_SPELLINGS}
"""Fields of EngineConfig -> other spellings of their values."""
Dtype = Literal["float32", "float64", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
Numa = Literal["auto", "replicate", "interleave", "off"]
Rule = Literal["exact", "rejection"]
Depth = int | Literal["auto"]
DraftVocab = int | Literal["auto", "full"]

AUTO: Literal["auto"] = "auto"
MAX_DEPTH = 16
FIXED_DEPTH = 3  # depth where auto cannot be used
MAX_GB = 10**6
MAX_NGRAM = 1024
_WORDS = {"backend": ("auto",), "drafter": ("auto", "none")}
"""Fields whose values are names of plug-ins -> their values that are no names."""


def _flag(
    default: Any, doc: str, low: int | None = None, high: int | None = None, hint: str = "", metavar: str = ""
) -> Any:
    """A field with its help text. low, high: smallest and largest number. hint: added to the error for other values.
    metavar: name of the value in --help."""
    return field(default=default, metadata={"doc": doc, "range": (low, high, hint), "metavar": metavar})


def _exists(path: str) -> bool:
    try:
        return user_path(path).exists()
    except (OSError, ValueError):  # too long, or with a zero
        return False


def one_adapter(path: Path | None) -> tuple[str, ...] | None:
    """EngineConfig.lora with the adapter at this path alone, or without one."""
    return None if path is None else (f"adapter={path}",)


def _is_file(path: str) -> bool:
    return _exists(path) and user_path(path).is_file()


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs. Raises UsageError, naming the flag, for a value outside its range."""

    backend: str = _flag(
        "auto", "cuda (Triton, on a GPU), native (compiled, on the CPU), reference (plain torch), or auto to choose."
    )
    quantization: WeightFormat | None = _flag(
        None,
        "Round weights to int8 or int4 at load. A format (awq, gptq, fp8, ...) must be that of the file. Default: as "
        "the file is.",
        metavar="int8|int4|FORMAT",
    )  # fmt: skip
    kv_cache_dtype: KVDtype | None = _flag(
        None,
        "KV cache: bfloat16 (default), int8 or fp8 (E4M3; both native, a scale per token and head), or float32 (cuda "
        "then computes without bfloat16).",
        metavar="TYPE",
    )
    dtype: Dtype = _flag("float32", "Arithmetic of the reference backend.")
    device: Device = _flag("auto", "Where the model runs: cpu, cuda, or auto to follow the backend.")
    threads: int | None = _flag(None, "CPU threads. Default: as many as affinity and cgroup quota allow.", 1, 1024)
    numa: Numa | None = _flag(
        None,
        "Weights on machines with several NUMA nodes: auto (default; each core's share on its own node), replicate "
        "(all weights on each node), interleave (pages in turn) or off.",
    )
    portable_bits: bool = _flag(
        False,
        "The same text on every processor. The instructions of AMX and AVX512-BF16 are not used, as they round "
        "differently.",
    )
    drafter: str = _flag(
        "auto", "Drafter: auto, mtp, eagle3, medusa, block, draft_model, ngram, mixed, none or a plug-in's."
    )
    head: str | None = _flag(
        None,
        "Head or draft model: a directory with a trained head, or a smaller model of the same tokens, by path or name.",
    )
    slice: str | None = _flag(
        None,
        "Smaller model inside a nested one, cut at load: its config.json, folder or repo. The first channels, heads "
        "and experts stay.",
        metavar="CONFIG",
    )
    mmproj: str | None = _flag(
        None, "Vision tower of a GGUF model: llama.cpp's mmproj file. Default: the one in the model's folder."
    )
    depth: Depth = _flag(
        AUTO,
        f"Tokens drafted per pass, 0 (plain decoding) to {MAX_DEPTH}, or auto: chosen at each step by its speed.",
        0, MAX_DEPTH, "or auto",
    )  # fmt: skip
    draft_vocab: DraftVocab = _flag(
        AUTO,
        "Draft vocabulary of a head without one of its own: full, the N most frequent tokens, or auto: full, with a "
        "sketch of the LM head where that is faster.",
        1, hint="or auto, or full",
    )  # fmt: skip
    draft_width: int | None = _flag(
        None,
        "Candidates for each token that a head drafts; each after the first costs a row. Default: 1; with depth auto 3 "
        "where rows are cheap. Needs the native backend. Recurrent models and output with a grammar have one.",
        1, 4,
    )  # fmt: skip
    depth_by_batch: str | None = _flag(
        None, "Maximum depth by number of running sequences, as JSON [[from, to, depth], ...]."
    )
    rule: Rule = _flag("exact", "exact: the text of plain decoding; rejection: the same distribution.")
    synthetic_acceptance: str | None = _flag(
        None,
        "Load tests only: accept drafts at these rates instead of verifying them. Rate i is the share of drafts whose "
        "first i tokens are accepted, for example 0.8,0.6,0.4. The text is not the model's.",
    )
    max_model_len: int | None = _flag(
        None,
        "Longest prompt plus output, in tokens. Default: the model's maximum; with ropes that depend on the length "
        "(longrope, dynamic), the maximum of the first training.",
        2, hint="a prompt and its answer have at least a token each",
    )  # fmt: skip
    max_num_seqs: int = _flag(64, "Sequences that run at the same time.", 1, 2**16)
    max_num_batched_tokens: int = _flag(
        512, "Rows (token positions) per pass; longer prompts are computed in chunks.", 1, 2**20
    )
    enable_chunked_prefill: bool = _flag(
        True, "Compute long prompts in several passes, beside the tokens of other requests."
    )
    block_size: int = _flag(16, "Token positions per KV cache block.", 1, 4096)
    kv_blocks: int | None = _flag(None, "KV cache blocks. Default: sized from free memory.", 1, 2**31)
    gpu_memory_utilization: float | None = _flag(
        None,
        "Share of the machine's memory for weights and KV cache; on a GPU, of what weights leave. Sizes the KV cache.",
    )
    enable_prefix_caching: bool = _flag(True, "Keep the KV cache of prompts for later requests with the same prefix.")
    lora: tuple[str, ...] | None = _flag(
        None,
        "LoRA adapter: a PEFT directory or a GGUF file. May be repeated: requests name one, commands use the first.",
        metavar="NAME=PATH",
    )
    kv_spill: str | None = _flag(
        None, "Directory for KV cache blocks of prompts beyond memory and process; servers of a machine may share it."
    )
    kv_spill_gb: float = _flag(10.0, "Maximum GB of --kv-spill; the oldest files are removed first.")
    ngram_min: int = _flag(2, "Shortest n-gram that the ngram drafter looks up.", 1, MAX_NGRAM)
    ngram_max: int = _flag(4, "Longest n-gram that the ngram drafter looks up.")
    shared_lookup: bool = _flag(True, "Draft also from answers to earlier requests of the same API key.")
    lookup_corpus: str | None = _flag(
        None, "Text file that the ngram drafter looks up, too: code or documents that answers repeat. UTF-8."
    )
    seed: int | None = _flag(
        None, "Seed of requests without a seed. Default: drawn at random, and reported.", 0, 2**64 - 1
    )

    def __post_init__(self) -> None:
        for name in config_fields():
            object.__setattr__(self, name, _plain(getattr(self, name), SPELLINGS.get(name, {})))
            self._check(name)
        self._check_names()
        if self.synthetic_rates and self.rule != "exact":
            what = "takes the place of " + option("rule", self.rule)
            raise ParameterError(option("synthetic_acceptance"), what, "give one of them")
        if self.depth == AUTO and self.rule == "rejection":  # drafts change its text, so depth must not follow a clock
            object.__setattr__(self, "depth", FIXED_DEPTH)
        _depth_table(self.depth_by_batch)
        self._check_range("ngram_max", self.ngram_min, MAX_NGRAM, "it cannot be below " + option("ngram_min"))
        self._check_positive("kv_spill_gb", MAX_GB, "10 is the default")
        if self.gpu_memory_utilization is not None:
            self._check_positive("gpu_memory_utilization", 1, "for example 0.9")
            if self.kv_blocks is not None:
                what = option("gpu_memory_utilization") + " and " + option("kv_blocks") + " both size the KV cache"
                raise UsageError(what, "give one of them")

    def _check_names(self) -> None:
        for name, words in _WORDS.items():  # listing plug-ins takes 50 ms, so words come first
            if getattr(self, name) not in words and getattr(self, name) not in _choices(name):
                raise self._unknown(name)
        adapters = [name for name, _ in self.adapters]
        if twice := next((name for name in adapters if adapters.count(name) > 1), None):
            raise UsageError(option("lora") + f": two adapters are named {twice}", "give each a name of its own")
        if missing := next((path for _, path in self.adapters if not _exists(path)), None):
            hint = "give a PEFT directory or a GGUF adapter: NAME=PATH"
            raise UsageError(option("lora") + f": {missing} does not exist", hint)
        if self.mmproj is not None and not _is_file(self.mmproj):
            raise UsageError(option("mmproj") + f": {self.mmproj} is not a file", "give llama.cpp's mmproj-*.gguf")
        if self.lookup_corpus is not None and not _is_file(self.lookup_corpus):
            what = option("lookup_corpus") + f": {self.lookup_corpus} is not a file"
            raise UsageError(what, "give a text file in UTF-8")

    @property
    def adapters(self) -> list[tuple[str, str]]:
        """(name, path) of the adapters of `lora`. A path alone is named by its last part, without `.gguf`. Raises
        UsageError for other values than texts, and for an empty name or path."""
        given = () if self.lora is None else self.lora
        if not isinstance(given, tuple) or not all(isinstance(each, str) for each in given):
            hint = "such as ['sql=./sql-adapter']"
            raise ParameterError(option("lora"), f"is {given!r}, but must be a list of texts", hint)
        pairs = [each.partition("=") for each in given]
        found = [
            (name, path) if equals else (Path(name).name.removesuffix(".gguf"), name) for name, equals, path in pairs
        ]
        for name, path in found:
            if not name.strip() or not path.strip():
                what = option("lora") + f": {name}={path} has no name or no path"
                raise UsageError(what, "for example sql=./sql-adapter")
        return found

    @property
    def rounding(self) -> Quantization | None:
        """Format to which weights are rounded at load; None: they keep the file's precision."""
        return self.quantization if self.quantization in ("int8", "int4") else None

    @property
    def synthetic_rates(self) -> tuple[float, ...]:
        """The rates of `synthetic_acceptance`; empty if drafts are verified."""
        return _rates(self.synthetic_acceptance)

    def depth_limit(self, running: int) -> int:
        """The maximum depth while `running` sequences run."""
        depths = [depth for start, depth in _depth_table(self.depth_by_batch) if start <= running]
        return depths[-1] if depths else MAX_DEPTH

    def _check(self, name: str) -> None:
        """Raises UsageError for a value that the field's type, choices or range exclude."""
        value, item, kinds = getattr(self, name), config_fields()[name], _kinds()[name]
        choices = _literals(name)
        if value is None:
            if type(None) not in kinds:
                raise ParameterError(option(name), "is None, but must be given", f"its default is {item.default}")
        elif bool in kinds and not isinstance(value, bool):
            raise ParameterError(option(name), f"is {value!r}, but must be True or False")
        elif str in kinds and not isinstance(value, str):
            raise ParameterError(option(name), f"is {value!r}, but must be a text")
        elif int in kinds and value not in choices:
            self._check_range(name, *item.metadata["range"])
        elif choices and value not in choices:
            raise self._unknown(name)

    def _unknown(self, name: str) -> ParameterError:
        hint = f"choose from: {', '.join(_choices(name))}"
        return ParameterError(option(name), f"is {getattr(self, name)!r}, which is unknown", hint)

    def _check_positive(self, name: str, high: float, hint: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int | float) or not 0 < value <= high:
            raise ParameterError(option(name), f"is {value}, but must be above 0 and at most {high}", hint)

    def _check_range(self, name: str, low: int | None, high: int | None, hint: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ParameterError(option(name), f"is {value!r}, but must be a whole number", hint)
        if (low is not None and value < low) or (high is not None and value > high):
            bound = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ParameterError(option(name), f"is {value}, but must be {bound}", hint)


def _plain(value: Any, spellings: Mapping[str, str]) -> Any:
    """The value of a field: a path as text, an integer of numpy as Python's, a list as a tuple."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, list | tuple):
        return tuple(_plain(each, spellings) for each in value)
    return spellings.get(str(value), value)


@lru_cache
def _depth_table(text: str | None) -> tuple[tuple[int, int], ...]:
    """(first number of sequences, depth), ascending. A gap has the depth of the row before, as in vLLM."""
    if text is None:
        return ()
    hint = "for example [[1, 4, 3], [5, 64, 0]]"
    try:
        rows = [tuple(row) for row in json.loads(text)]
    except (ValueError, RecursionError, TypeError):
        what = f"is {text[:200]!r}, which is not a JSON list of lists"
        raise ParameterError(option("depth_by_batch"), what, hint) from None
    for row in rows:
        whole = len(row) == 3 and all(isinstance(value, int) and not isinstance(value, bool) for value in row)
        if not whole or not 1 <= row[0] <= row[1] or not 0 <= row[2] <= MAX_DEPTH:
            what = f"has the row {list(row)}, which is not [from, to, depth]"
            raise ParameterError(option("depth_by_batch"), what, hint)
    return tuple((row[0], row[2]) for row in sorted(rows))


@lru_cache
def _rates(text: str | None) -> tuple[float, ...]:
    """Rates in [0, 1], descending."""
    if text is None:
        return ()
    hint = "for example 0.8,0.6,0.4: the share of drafts whose first 1, 2 and 3 tokens are all accepted"
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError:
        what = f"is {text!r}, which is not a list of numbers"
        raise ParameterError(option("synthetic_acceptance"), what, hint) from None
    if not all(0 <= rate <= before for before, rate in pairwise((1.0, *rates))) or len(rates) > MAX_DEPTH:
        wanted = f"at most {MAX_DEPTH} rates between 0 and 1, none above the one before it"
        raise ParameterError(option("synthetic_acceptance"), f"is {text}, but must be {wanted}", hint)
    return rates


def config_fields() -> dict[str, Field[Any]]:
    """All fields by name, in order; `metadata["doc"]` describes the option."""
    return {item.name: item for item in fields(EngineConfig)}


@cache
def _kinds() -> dict[str, tuple[Any, ...]]:
    """The types of each field; of a union its members."""
    return {
        name: get_args(hint) or (hint,) if get_origin(hint) is not Literal else (hint,)
        for name, hint in get_type_hints(EngineConfig).items()
    }


def _literals(name: str) -> tuple[str, ...]:
    """The words of the field's type."""
    return tuple(choice for kind in _kinds()[name] if get_origin(kind) is Literal for choice in get_args(kind))


def _choices(name: str) -> tuple[str, ...]:
    """The words that the field takes, names of plug-ins among them."""
    if name == "drafter":
        return (*_WORDS[name], *sorted({*registry.available("drafters"), *registry.available("heads")}))
    return (*_WORDS[name], *registry.available("backends")) if name == "backend" else _literals(name)


_SPECULATIVE_KEYS: dict[str, tuple[str, type]] = {  # key -> field of EngineConfig, type
    "method": ("drafter", str),
    "num_speculative_tokens": ("depth", int),
    "model": ("head", str),
    "prompt_lookup_max": ("ngram_max", int),
    "prompt_lookup_min": ("ngram_min", int),
    "num_speculative_tokens_per_batch_size": ("depth_by_batch", list),
    "synthetic_acceptance_rates": ("synthetic_acceptance", list),
}
SPECULATIVE = "--speculative-config"
SPECULATIVE_FLAGS: dict[str, tuple[str, type]] = {
    "--speculative-model": ("model", str),
    "--num-speculative-tokens": ("num_speculative_tokens", int),
    "--ngram-prompt-lookup-max": ("prompt_lookup_max", int),
    "--ngram-prompt-lookup-min": ("prompt_lookup_min", int),
    "--speculative-draft-tensor-parallel-size": ("draft_tensor_parallel_size", int),
}
"""Flag of vLLM V0 -> the key of SPECULATIVE's JSON that it sets, and the key's type."""
_METHODS = {"suffix": "ngram", "ngram_gpu": "ngram", "dflash": "block", "dspark": "block", "nextn": "mtp"}
"""vLLM's and SGLang's names of methods -> drafters."""


def read_count(name: str, value: str | int | bool) -> int:
    """The value as a number. Raises UsageError unless it is a whole number above 0."""
    if not str(value).isdecimal() or int(value) < 1:
        raise UsageError(f"{name} is {value}, but must be a number above 0")
    return int(value)


MORE_SEQS = 1024  # sequences beyond a limit that the last row covers; other engines read its end


def depth_rows(name: str, limit: str | int | bool) -> list[list[int]]:
    """Rows of depth_by_batch: no drafts while more than `limit` sequences run. Raises UsageError for a limit that is no
    whole number above 0."""
    count = read_count(name, limit)
    return [[1, count, MAX_DEPTH], [count + 1, count + MORE_SEQS, 0]]


def parse_speculative_config(text: str) -> dict[str, Any]:
    """vLLM's `--speculative-config` JSON as fields of EngineConfig. Raises UsageError for unknown keys or types."""
    known = "known keys: " + ", ".join(_SPECULATIVE_KEYS)
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"--speculative-config is not valid JSON: {error}",
            """for example: '{"method": "mtp", "num_speculative_tokens": 3}'""",
        ) from None
    if not isinstance(given, dict):
        raise UsageError(f"--speculative-config must be a JSON object, not {type(given).__name__}", known)
    method = given.pop("rejection_sample_method", "standard")
    if method != (wanted := "synthetic" if "synthetic_acceptance_rates" in given else "standard"):
        raise UsageError(
            f"--speculative-config: rejection_sample_method is {json.dumps(method)}, but must be {wanted!r} here",
            "synthetic goes with synthetic_acceptance_rates",
        )
    _translate_keys(given)
    overrides: dict[str, Any] = {}
    for key, value in given.items():
        if key not in _SPECULATIVE_KEYS:
            raise UsageError(f"--speculative-config has the unknown key {key!r}", LEAVE_OUT + f"; {known}")
        name, kind = _SPECULATIVE_KEYS[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            kinds = {str: "a string", int: "a whole number", list: "a list"}
            raise UsageError(f"--speculative-config: {key} is {json.dumps(value)}, but must be {kinds[kind]}", known)
        overrides[name] = json.dumps(value) if kind is list else value
    if rates := overrides.get("synthetic_acceptance"):
        overrides["synthetic_acceptance"] = rates.strip("[]")
    return overrides


def _translate_keys(given: dict[str, Any]) -> None:
    """Replaces methods and keys of other engines by those of _SPECULATIVE_KEYS. Raises UsageError."""
    parallel = given.pop("draft_tensor_parallel_size", 1)
    if parallel != 1:
        hint = "headstart runs one copy of a model: " + LEAVE_OUT
        raise UsageError(f"--speculative-config: draft_tensor_parallel_size is {json.dumps(parallel)}", hint)
    if (limit := given.pop("disable_by_batch_size", None)) is not None:
        given.setdefault("num_speculative_tokens_per_batch_size", depth_rows("disable_by_batch_size", limit))
    method, depth = given.get("method"), given.get("num_speculative_tokens")
    if method == "suffix" and isinstance(depth, int):
        given["num_speculative_tokens"] = min(depth, MAX_DEPTH)  # vLLM's default is 32
    if isinstance(method, str):  # *_mtp: vLLM's older spellings of "mtp", one per family
        given["method"] = "mtp" if method.endswith("_mtp") else _METHODS.get(method, method)
