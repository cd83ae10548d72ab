"""`EngineConfig`: the single source of engine flags, their defaults and their documentation."""

from __future__ import annotations

import json
from dataclasses import Field, dataclass, field, fields
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, get_args

from headstart import registry
from headstart.errors import UsageError

Quantization = Literal["int8", "int4"]
KVDtype = Literal["float32", "bfloat16", "int8"]
Dtype = Literal["float32", "float64", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
Numa = Literal["auto", "replicate", "interleave", "off"]
Rule = Literal["exact", "rejection"]
Depth = int | Literal["auto"]
DraftVocab = int | Literal["auto", "full"]

AUTO: Literal["auto"] = "auto"
MAX_DEPTH = 16
FIXED_DEPTH = 3
"""Where auto will not do."""
MOST_THREADS, MOST_BLOCK = 1024, 4096
"""Larger numbers of threads, or of positions in a block, are mistakes."""
MOST = {"max_num_seqs": 2**16, "max_num_batched_tokens": 2**20, "kv_blocks": 2**31, "ngram_min": 1024}
"""So are larger ones of these: lists of such a length would be made before anything could say so."""
MOST_GB = 10**6
DRAFTER_WORDS = ("auto", "none")
"""Values of `drafter` that are not names of drafters: what the model offers best, and plain decoding."""


def _flag(default: Any, flag: str, doc: str) -> Any:
    return field(default=default, metadata={"flag": flag, "doc": doc})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs. Raises UsageError, naming the flag, for a value outside its range."""

    backend: str = _flag(
        "auto",
        "--backend",
        "What computes: cuda (Triton, a GPU), native (compiled, CPU), reference (plain torch), or auto to choose.",
    )
    quantization: Quantization | None = _flag(
        None, "--quantization", "Round weights to int8 or int4 at load. Default: the file's own precision."
    )
    kv_cache_dtype: KVDtype | None = _flag(
        None,
        "--kv-cache-dtype",
        "Keys and values: bfloat16 (default), int8 (native), or float32 (cuda rounds nothing to bfloat16 then).",
    )
    dtype: Dtype = _flag("float32", "--dtype", "Arithmetic of the reference backend.")
    device: Device = _flag("auto", "--device", "Where the model runs: cpu, cuda, or auto, where its backend does.")
    threads: int | None = _flag(None, "--threads", "CPU threads. Default: what affinity and cgroup quota allow.")
    numa: Numa | None = _flag(
        None,
        "--numa",
        "Weights on machines with several nodes of memory: auto (default; each core's share beside it), replicate "
        "(all of them on each node), interleave (pages in turn) or off. One node: nothing to do.",
    )
    drafter: str = _flag(
        "auto",
        "--drafter",
        "What proposes tokens: auto, mtp, eagle3, medusa, block, draft_model, ngram, mixed, none or a plug-in's.",
    )
    head: str | None = _flag(
        None,
        "--head",
        "What drafts: a directory with a trained head, or a smaller model of the same tokens, by path or name.",
    )
    depth: Depth = _flag(
        AUTO,
        "--depth",
        f"Tokens drafted per pass, 0 (plain decoding) to {MAX_DEPTH}, or auto: what pays, step by step.",
    )
    draft_vocab: DraftVocab = _flag(
        AUTO,
        "--draft-vocab",
        "Tokens that a head without a draft vocabulary of its own drafts: full (all), N of the most frequent, or auto: "
        "all, found by a sketch of the LM head where that pays.",
    )
    depth_by_batch: str | None = _flag(
        None, "--depth-by-batch", "Deepest draft by running sequences, as JSON [[from, to, depth], ...]."
    )
    rule: Rule = _flag("exact", "--rule", "exact: the text is that of plain decoding; rejection: same distribution.")
    synthetic_acceptance: str | None = _flag(
        None,
        "--synthetic-acceptance",
        "Load tests only: accept drafts at these rates whatever the model says, the share of drafts whose first 1, 2, "
        "... tokens are all accepted, such as 0.8,0.6,0.4. The text is not the model's.",
    )
    max_model_len: int | None = _flag(
        None,
        "--max-model-len",
        "Longest prompt plus output. Default: the model's own; with ropes that depend on it (longrope, dynamic), "
        "that of the first training.",
    )
    max_num_seqs: int = _flag(64, "--max-num-seqs", "Sequences that run at the same time.")
    max_num_batched_tokens: int = _flag(
        512, "--max-num-batched-tokens", "Rows per pass; longer prompts are computed in chunks."
    )
    block_size: int = _flag(16, "--block-size", "Token positions per KV cache block.")
    kv_blocks: int | None = _flag(None, "--kv-blocks", "KV cache blocks. Default: sized from free memory.")
    enable_prefix_caching: bool = _flag(
        True, "--enable-prefix-caching", "Keep computed prompts for later requests that begin the same."
    )
    kv_spill: str | None = _flag(
        None,
        "--kv-spill",
        "Directory that keeps computed prompts beyond memory and process; servers of a machine may share one.",
    )
    kv_spill_gb: float = _flag(10.0, "--kv-spill-gb", "GB that --kv-spill takes at most; the oldest go first.")
    ngram_min: int = _flag(2, "--ngram-min", "Shortest n-gram that the ngram drafter looks up.")
    ngram_max: int = _flag(4, "--ngram-max", "Longest n-gram that the ngram drafter looks up.")
    shared_lookup: bool = _flag(
        True, "--shared-lookup", "Draft also from what earlier requests of the same API key were answered."
    )
    seed: int | None = _flag(None, "--seed", "Seed of requests that bring none. Default: drawn at random, reported.")

    def __post_init__(self) -> None:
        self._check_types()
        if self.backend != AUTO and self.backend not in (backends := registry.available("backends")):
            self._check_choice("backend", (AUTO, *backends))
        for name, choices in {"quantization": Quantization, "kv_cache_dtype": KVDtype, "numa": Numa}.items():
            if getattr(self, name) is not None:
                self._check_choice(name, get_args(choices))
        self._check_choice("dtype", get_args(Dtype))
        self._check_choice("device", get_args(Device))
        self._check_choice("rule", get_args(Rule))
        if self.drafter not in DRAFTER_WORDS:
            names = {*registry.available("drafters"), *registry.available("heads")}
            self._check_choice("drafter", (*DRAFTER_WORDS, *sorted(names)))
        if self.synthetic_rates and self.rule != "exact":
            raise UsageError(f"--synthetic-acceptance takes the place of --rule {self.rule}", "leave --rule out")
        if self.depth == AUTO and self.rule == "rejection":  # its text depends on drafts: these must not follow a clock
            object.__setattr__(self, "depth", FIXED_DEPTH)
        if self.depth != AUTO:
            self._check_range("depth", 0, MAX_DEPTH, "or auto")
        if self.draft_vocab not in (AUTO, "full"):
            self._check_range("draft_vocab", 1, hint="or auto, or full")
        _depth_table(self.depth_by_batch)
        self._check_range("threads", 1, MOST_THREADS)
        self._check_range("max_model_len", 2, hint="a prompt and its answer have a token each")
        self._check_range("block_size", 1, MOST_BLOCK)
        for name, most in MOST.items():
            self._check_range(name, 1, most)
        self._check_range("ngram_max", self.ngram_min, MOST["ngram_min"], hint="it cannot be below --ngram-min")
        self._check_range("seed", 0, 2**64 - 1)
        self._check_spill()

    @property
    def synthetic_rates(self) -> tuple[float, ...]:
        """Of `synthetic_acceptance`; none where the model decides."""
        return _rates(self.synthetic_acceptance)

    def depth_limit(self, running: int) -> int:
        """The deepest draft while so many sequences run."""
        depths = [depth for start, depth in _depth_table(self.depth_by_batch) if start <= running]
        return depths[-1] if depths else MAX_DEPTH

    def _check_spill(self) -> None:
        if not isinstance(self.kv_spill_gb, int | float) or not 0 < self.kv_spill_gb <= MOST_GB:
            what = f"--kv-spill-gb is {self.kv_spill_gb}, but must be above 0 and at most {MOST_GB}"
            raise UsageError(what, "10 is the default")

    def _check_types(self) -> None:
        """Of texts and switches, and that only what may be left open is None."""
        for name, item in config_fields().items():
            value, words = getattr(self, name), str(item.type)
            if value is None and "None" not in words:
                raise UsageError(f"{flag_of(name)} is None, but must be given", f"its default is {item.default}")
            if words == "bool" and not isinstance(value, bool):
                raise UsageError(f"{flag_of(name)} is {value!r}, but must be True or False")
            if words.startswith("str") and not isinstance(value, str | None):
                raise UsageError(f"{flag_of(name)} is {value!r}, but must be a text")

    def _check_choice(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise UsageError(f"{flag_of(name)} is {value!r}, which is unknown", f"choose from: {', '.join(allowed)}")

    def _check_range(self, name: str, low: int, high: int | None = None, hint: str = "") -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{flag_of(name)} is {value!r}, but must be a whole number", hint)
        if value < low or (high is not None and value > high):
            bound = f"at least {low}" if high is None else f"between {low} and {high}"
            raise UsageError(f"{flag_of(name)} is {value}, but must be {bound}", hint)


@lru_cache
def _depth_table(text: str | None) -> tuple[tuple[int, int], ...]:
    """(first number of sequences, depth), ascending; a gap goes on with the depth before it, as in vLLM."""
    if text is None:
        return ()
    hint = "for example [[1, 4, 3], [5, 64, 0]]"
    try:
        rows = [tuple(row) for row in json.loads(text)]
    except (ValueError, RecursionError, TypeError):
        raise UsageError(f"--depth-by-batch is {text[:200]!r}, which is not a JSON list of lists", hint) from None
    for row in rows:
        whole = len(row) == 3 and all(isinstance(value, int) and not isinstance(value, bool) for value in row)
        if not whole or not 1 <= row[0] <= row[1] or not 0 <= row[2] <= MAX_DEPTH:
            raise UsageError(f"--depth-by-batch has the row {list(row)}, which is not [from, to, depth]", hint)
    return tuple((row[0], row[2]) for row in sorted(rows))


@lru_cache
def _rates(text: str | None) -> tuple[float, ...]:
    """Rates in [0, 1], none above the one before it."""
    if text is None:
        return ()
    hint = "for example 0.8,0.6,0.4: the share of drafts whose first 1, 2 and 3 tokens are all accepted"
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"--synthetic-acceptance is {text!r}, which is not a list of numbers", hint) from None
    if not all(0 <= rate <= before for before, rate in pairwise((1.0, *rates))) or len(rates) > MAX_DEPTH:
        wanted = f"at most {MAX_DEPTH} rates between 0 and 1, none above the one before it"
        raise UsageError(f"--synthetic-acceptance is {text}, but must be {wanted}", hint)
    return rates


def config_fields() -> dict[str, Field[Any]]:
    """All fields by name, in order; `metadata` has `flag` and `doc`."""
    return {item.name: item for item in fields(EngineConfig)}


def flag_of(name: str) -> str:
    """The command-line spelling of a field."""
    return str(config_fields()[name].metadata["flag"])


_SPECULATIVE_KEYS: dict[str, tuple[str, type]] = {
    "method": ("drafter", str),
    "num_speculative_tokens": ("depth", int),
    "model": ("head", str),
    "prompt_lookup_max": ("ngram_max", int),
    "prompt_lookup_min": ("ngram_min", int),
    "num_speculative_tokens_per_batch_size": ("depth_by_batch", list),
    "synthetic_acceptance_rates": ("synthetic_acceptance", list),
}


def parse_speculative_config(text: str) -> dict[str, Any]:
    """vLLM's `--speculative-config` JSON as EngineConfig overrides. Raises UsageError for anything it does not know."""
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
    overrides: dict[str, Any] = {}
    for key, value in given.items():
        if key not in _SPECULATIVE_KEYS:
            raise UsageError(f"--speculative-config has the unknown key {key!r}", known)
        name, kind = _SPECULATIVE_KEYS[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            kinds = {str: "a string", int: "a whole number", list: "a list"}
            raise UsageError(f"--speculative-config: {key} is {json.dumps(value)}, but must be {kinds[kind]}", known)
        overrides[name] = json.dumps(value) if kind is list else value
    if rates := overrides.get("synthetic_acceptance"):
        overrides["synthetic_acceptance"] = rates.strip("[]")
    if str(overrides.get("drafter", "")).endswith("_mtp"):  # vLLM's older, per-family spellings of "mtp"
        overrides["drafter"] = "mtp"
    return overrides
