"""Where each model type keeps its MTP module, and what xLLM calls the draft made of it: declared data.

Source: xLLM `tools/export_mtp.py` (2026-08), checked against vLLM 0.32's loaders of the same checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headstart.errors import ModelError

COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
NESTED = "text_config"
LINKING = {"enorm", "hnorm", "eh_proj"}


@dataclass(frozen=True, kw_only=True)
class DraftCheckpoint:
    """One model type.

    `prefixes`: how names of the module's tensors begin; {n} is num_hidden_layers. `parts`: what stands for the first
    part of the rest (or all of it) in the draft; `block`: what stands before every other rest; None: names stay.
    `embedding`, `lm_head`: names of the trunk's own tensors that the draft takes along.
    `needed`: rests without which there is no module. `config`: more keys of the draft's config; a list of one is
    repeated for each module. `nested_config`: keys of text_config. `several`: there
    may be more than one module. `fp8_blocks`: xLLM's own tool turns FP8 blocks back for this type.
    """

    architecture: str
    prefixes: tuple[str, ...]
    needed: tuple[str, ...]
    parts: Mapping[str, str] = field(default_factory=dict)
    block: str | None = None
    embedding: tuple[str, ...] = ()
    lm_head: tuple[str, ...] = ()
    shared_needed: bool = False
    config: Mapping[str, object] = field(default_factory=dict)
    nested_config: Mapping[str, object] = field(default_factory=dict)
    several: bool = False
    sparse_indexer: bool = False
    fp8_blocks: bool = False


TRAILING = DraftCheckpoint(
    architecture="",
    prefixes=("model.layers.{n}.",),
    needed=("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "input_layernorm.weight"),
    parts={part: f"model.{part}" for part in ("embed_tokens", "shared_head", *sorted(LINKING))},
    block="model.layers.0.",
)
"""DeepSeek's layout: the module is the layer after the trunk's last."""

SUBTREE = DraftCheckpoint(
    architecture="Qwen3_5MtpForCausalLM",
    prefixes=("mtp.", "model.mtp."),
    needed=("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight", "norm.weight"),
    embedding=(
        "model.language_model.embed_tokens.weight",
        "language_model.model.embed_tokens.weight",
        "model.embed_tokens.weight",
        "embed_tokens.weight",
    ),
    lm_head=(
        "lm_head.weight",
        "model.lm_head.weight",
        "language_model.lm_head.weight",
        "model.language_model.lm_head.weight",
    ),
    shared_needed=True,
    config={"mtp_num_hidden_layers": "count"},
    nested_config={"num_hidden_layers": "count", "mtp_num_hidden_layers": "count", "layer_types": ["full_attention"]},
    several=True,
)
"""Qwen's layout: the module stands under a name of its own."""

DRAFTS: Mapping[str, DraftCheckpoint] = {
    "deepseek_v3": replace(TRAILING, architecture="DeepseekMTPForCausalLM", fp8_blocks=True),
    "deepseek_v32": replace(TRAILING, architecture="DeepseekV32MtpForCausalLM", fp8_blocks=True, sparse_indexer=True),
    "deepseek_v4": DraftCheckpoint(
        architecture="DeepseekV4MtpForCausalLM",
        prefixes=("mtp.0.",),
        needed=("enorm.weight", "hnorm.weight", "e_proj.weight", "h_proj.weight", "norm.weight", "attn_norm.weight"),
        block="model.layers.0.",
        config={"num_hash_layers": 0},
        fp8_blocks=True,
    ),
    "glm4_moe": replace(TRAILING, architecture="Glm4MoeMtpForCausalLM"),
    "glm_moe_dsa": replace(TRAILING, architecture="GlmMoeDsaMtpForCausalLM", sparse_indexer=True),
    "mimo": DraftCheckpoint(
        architecture="MiMoMtpForCausalLM",
        prefixes=("model.mtp_layers.0.",),
        needed=(
            "token_layernorm.weight",
            "hidden_layernorm.weight",
            "input_proj.weight",
            "final_layernorm.weight",
            "input_layernorm.weight",
        ),
    ),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), SUBTREE),
}

UNLIKE = {
    "mimo_v2": "its modules stand under model.mtp.layers and are of another formula",
    "deepseek_v41": "its mtp tensors are a DSpark drafter",
    "glm4_moe_lite": "its module has latent attention, which xLLM's glm4_moe_mtp does not",
    "glm5_next": "xLLM has no draft of this type",
}
"""Model types that share a name with one of DRAFTS, and why they are not it."""


EAGLE_TYPES = ("deepseek_v3",)
"""Types whose module is an EAGLE drafter of vLLM: EagleDeepSeekMTPModel. V3.2's block wants an indexer it has not."""
SPECULATORS_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Types of text models for which speculators has an MTP layer."""
GGUF_ARCHITECTURES = (
    "qwen35", "qwen35moe", "qwen3next", "qwen4exp", "glm4moe", "deepseek2", "deepseek32", "glm-dsa", "mimo2",
    "nemotron_h_moe", "step35", "hy-v3", "bailingmoe3", "cohere2moe",
)  # fmt: skip
"""Architectures of llama.cpp with a graph for their MTP blocks."""
GGUF_WITHOUT = {
    "deepseek_v3": "its converter drops the module",
    "kimi_k2": "its converter drops the module",
    "mimo": "its converter does not know the type",
    "ernie4_5_moe": "its converter drops the module",
    "longcat_flash": "its converter does not know the type",
    "exaone_moe": "the module is converted, but not run",
    "glm5_next": "its graph is not written yet",
}
"""Types whose head no file for llama.cpp can hold, and why."""


def draft_of(model_type: str) -> DraftCheckpoint:
    """Raises ModelError for a type that is not declared here."""
    if model_type in DRAFTS:
        return DRAFTS[model_type]
    raise ModelError(f"model type {model_type!r} has no draft layout in xLLM", f"known are {', '.join(DRAFTS)}")
