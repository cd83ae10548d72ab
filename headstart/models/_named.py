"""From a checkpoint's model_type to its family."""

from __future__ import annotations

from collections.abc import Mapping

from headstart import registry
from headstart.errors import ModelError
from headstart.models._family import Family

_INDEXER = "sparse attention with an indexer (DSA)"
_STREAMS = "hyper-connections (several residual streams)"
UNSUPPORTED: Mapping[str, str] = {
    "deepseek_v32": _INDEXER, "deepseek32": _INDEXER, "glm_moe_dsa": _INDEXER, "glm-dsa": _INDEXER,
    "glm5_next": f"Kimi delta attention and {_INDEXER}", "glm5-next": f"Kimi delta attention and {_INDEXER}",
    "deepseek_v4": _STREAMS, "deepseek4": _STREAMS, "qwen4_exp": _STREAMS, "qwen4exp": _STREAMS,
    "mimo_v2": "attention sinks", "mimo_v2_flash": "attention sinks", "mimo2": "attention sinks",
    "gpt_oss": "attention sinks", "gpt-oss": "attention sinks",
    "nemotron_h": "Mamba2 layers", "nemotron_h_moe": "Mamba2 layers", "mamba2": "Mamba2 layers",
    "step3p5": "gated sliding-window attention", "step35": "gated sliding-window attention",
    "gemma3": "sliding-window attention", "gemma4": "sliding-window attention",
    "glm4_moe_lite": "GLM's latent attention", "kimi_k3": "Kimi delta attention",
    "minimax_m3": "block-sparse attention", "bailing_hybrid": "lightning attention",
}  # fmt: skip
"""model_type (or llama.cpp's architecture) of a family that is not here -> what it has and no family here has."""


def family_named(model_type: str) -> Family:
    """By the file's name, or one of the aliases that families declare. Raises ModelError, naming the feature that is
    missing where that is known."""
    names = registry.available("models")
    if model_type.replace("-", "_") not in names:
        for name in names:
            other: Family = registry.find("models", name).FAMILY
            if model_type in other.aliases:
                return other
    if model_type not in names and (feature := UNSUPPORTED.get(model_type)):
        raise ModelError(f"{model_type} models need {feature}, which is not supported", f"known: {', '.join(names)}")
    family: Family = registry.find("models", model_type).FAMILY
    return family


def is_known(model_type: str) -> bool:
    """Does a family here serve it?"""
    try:
        family_named(model_type)
    except ModelError:
        return False
    return True
