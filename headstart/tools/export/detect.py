"""Which of the declared layouts a config.json asks for, in the order and by the tests of xLLM's own tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headstart.errors import ModelError
from headstart.formats.mtp_families import MOST_MODULES
from headstart.tools.export.drafts import COUNT_KEYS, NESTED, UNLIKE, DraftCheckpoint

Config = Mapping[str, Any]
INDEXER_KEYS = ("index_n_heads", "index_head_dim", "index_topk")


def nested(config: Config) -> Config:
    """The language model's own section; an empty one where the config has none."""
    inner = config.get(NESTED)
    return inner if isinstance(inner, dict) else {}


def architectures(config: Config) -> list[str]:
    listed = config.get("architectures")
    return [str(each) for each in listed] if isinstance(listed, list) else []


def detect_model_type(config: Config) -> str:
    """The key of DRAFTS, or the model_type itself. Raises ModelError where there is nothing to go by, and for types
    that only look like a declared one."""
    outer = str(config.get("model_type") or "").lower()
    named = [each.lower() for each in architectures(config)]
    everything = [outer, str(nested(config).get("model_type") or "").lower(), *named]
    for unlike, why in UNLIKE.items():
        if any(each.startswith(unlike) for each in everything[:2]):
            raise ModelError(f"model type {unlike} cannot be written as a draft of xLLM", why)
    if _any("deepseek", [outer, *named]):
        if _any("v4", [outer, *named]):
            return "deepseek_v4"
        return "deepseek_v32" if any(key in config for key in INDEXER_KEYS) else "deepseek_v3"
    if _any("glm4", [outer, *named]):
        return "glm4_moe" if positive(config.get("n_routed_experts")) else "glm4"
    if _any("mimo", everything):
        return "mimo"
    if _any("qwen3_5", everything):
        experts = [nested(config).get(key) for key in ("n_routed_experts", "num_experts")]
        return "qwen3_5_moe" if _any("moe", everything) or any(map(positive, experts)) else "qwen3_5"
    if not outer:
        raise ModelError("config.json names neither model_type nor architectures", "say it with --model-type")
    return outer


def _any(word: str, names: Sequence[str]) -> bool:
    return any(word in name for name in names)


def positive(value: object) -> bool:
    try:
        return int(value) > 0  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError, OverflowError):
        return False


def count_modules(config: Config, draft: DraftCheckpoint) -> int:
    """How many MTP modules the config promises; the first key that is there decides. Raises ModelError for none, and
    for more than the layout has room for."""
    inner = [(f"{NESTED}.{key}", nested(config).get(key)) for key in COUNT_KEYS]
    places = [(key, config.get(key)) for key in COUNT_KEYS] + inner
    if draft.several:
        (plain_n, plain_m), (inner_n, inner_m) = places[:2], inner
        places = [inner_m, plain_m, inner_n, plain_n]
    where, value = next(((key, each) for key, each in places if each is not None), ("", None))
    if not where:
        hint = "the config promises no MTP head; graft one with headstart graft"
        raise ModelError(f"config.json has none of {', '.join(key for key, _ in places)}", hint)
    if not positive(value):
        raise ModelError(f"config.json: {where} is {value!r}: the model has no MTP head", "see headstart graft --help")
    count = int(value)  # type: ignore[arg-type]
    if count > MOST_MODULES:
        raise ModelError(f"config.json: {where} is {count}, but at most {MOST_MODULES} MTP modules make sense")
    if count != 1 and not draft.several:
        raise ModelError(f"config.json: {where} is {count}, but this draft layout has room for one module")
    return count


def draft_config(config: Config, model_type: str, draft: DraftCheckpoint, count: int) -> dict[str, Any]:
    """config.json of the draft: the model's own with what describes the one module."""
    changes = {
        "num_hidden_layers": count,
        "num_nextn_predict_layers": count,
        "architectures": [draft.architecture],
        "model_type": f"{model_type.removesuffix('_text')}_mtp",
        "quantization_config": "",
        "first_k_dense_replace": 0,
        **_filled(draft.config, count),
        **(_sparse_indexer(config) if draft.sparse_indexer else {}),
    }
    written = {**config, **changes}
    if nested(config):
        written[NESTED] = {**nested(config), **_filled(draft.nested_config, count)}
        if "quantization_config" in written[NESTED]:
            written[NESTED]["quantization_config"] = ""
    return written


def _filled(declared: Mapping[str, object], count: int) -> dict[str, Any]:
    """`count` stands for the number of modules; a list of one is one value for each."""
    values = {key: count if value == "count" else value for key, value in declared.items()}
    return {key: value * count if isinstance(value, list) else value for key, value in values.items()}


def _sparse_indexer(config: Config) -> dict[str, Any]:
    """The draft computes its own top-k rows once and shares them between its steps."""
    if not all(positive(config.get(key)) for key in INDEXER_KEYS) or not config.get("index_share_for_mtp_iteration"):
        return {}
    every = config.get("index_topk_freq") or 1
    if not positive(every):
        raise ModelError(f"config.json: index_topk_freq is {every!r}, not a number of layers")
    changes = {
        "index_share_for_mtp_iteration": True,
        "index_topk_freq": max(int(every), 2),
        "index_skip_topk_offset": 0,
        "index_topk_pattern": "S",
        "indexer_types": ["full"],
    }
    return {key: value for key, value in changes.items() if key in config}
