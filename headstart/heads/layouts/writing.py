"""Writes block drafters in published layouts: DFlash (z-lab's), DSpark (with DeepSpec's and SpecForge's keys, so that
vLLM and SGLang both find theirs), and speculators' container for both.

Features that a layout cannot express are refused by name. Causal blocks are declared by `is_causal`, which vLLM reads.
speculators allows causal blocks only in layers with a window, so layers without one get a window as long as the
context.
"""

from collections.abc import Callable, Mapping
from typing import Any

from headstart.errors import ModelError
from headstart.formats.sizes import FULL, SLIDING
from headstart.heads.base import BlockSpec
from headstart.heads.kind import HeadCheckpoint, plain_parts, transformer_keys
from headstart.heads.layouts.names import theirs, vocabulary_maps
from headstart.heads.published import Arrays
from headstart.layers.decoder import tapped_layers

POSITIONS = 1 << 17  # max_position_embeddings of a drafter whose trunk does not say its own: engines size tables by it
ANCHORS = 512  # num_anchors of DeepSpec's training; its config class requires the key
Written = tuple[dict[str, Any], dict[str, Any]]  # config.json, and arrays under published names
HINT = "headstart runs this head (--head DIR); for other engines train a new one: headstart train --kind block"


def as_dflash(head: HeadCheckpoint, arrays: Arrays) -> Written:
    """z-lab's layout. Raises ModelError for a DSpark head, and for layers that are no Qwen3 blocks."""
    block = _block(head)
    if block.anchor_predicts or block.markov_rank or block.confidence:
        what = "DFlash has no Markov or confidence head, and its first row drafts nothing"
        raise ModelError(what, "--to vllm-dspark")
    dflash = {"mask_token_id": block.mask_token_id, "target_layer_ids": _outputs(head), **_causal(block)}
    document = {
        "architectures": ["DFlashDraftModel"], **_transformer(head), **_common(head),
        "num_target_layers": head.trunk_layers, "block_size": block.rows_for(block.block_size),
        "dflash_config": dflash | ({"attention_sink_bias": True} if block.sinks else {}),
    }  # fmt: skip
    return document, _named(head, arrays)


def as_dspark(head: HeadCheckpoint, arrays: Arrays) -> Written:
    """DeepSpec's and SpecForge's layout. Raises ModelError for a head without a Markov head, and for layers that are no
    Qwen3 blocks."""
    block = _block(head)
    if not (block.anchor_predicts and block.markov_rank):
        raise ModelError("DSpark has a Markov head, and its first row drafts too", "--to vllm-dflash")
    common = {"mask_token_id": block.mask_token_id, "target_layer_ids": _outputs(head), **_dspark(block)}
    document = {
        "architectures": ["Qwen3DSparkModel"], **_transformer(head), **_common(head),
        "num_target_layers": head.trunk_layers, "block_size": block.block_size, "num_anchors": ANCHORS, **common,
        **({"is_causal": block.causal} if _causal(block) else {}),
        "dflash_config": {"projector_type": "dspark", **common, **_causal(block)},
    }  # fmt: skip
    return document, _named(head, arrays)


def as_speculators(head: HeadCheckpoint, arrays: Arrays) -> Written:
    """vllm-project/speculators' layout. Raises ModelError for features that it cannot express, and for layers that are
    no Qwen3 blocks."""
    block = _block(head)
    kind = "dspark" if block.anchor_predicts or block.markov_rank else "dflash"
    for wrong, what in (
        (block.interleaved, "an interleaved RoPE"),
        (block.logit_scale != 1, f"a logit_scale of {block.logit_scale}"),
        (block.sinks, "attention sinks"),
        (block.mask_embedding, "an embedding of the mask's own"),
        (any(block.windows) and block.causal and not all(block.windows), "causal layers with and without a window"),
    ):
        if wrong:
            raise ModelError(f"speculators has no place for {what}", "--to vllm-dflash or vllm-dspark may have")
    causal = block.all_causal
    inner = _transformer(head)
    if causal and not any(block.windows):
        inner |= {"layer_types": [SLIDING] * block.num_layers, "use_sliding_window": True}
        inner["sliding_window"] = inner["max_position_embeddings"]
    document = {
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_config": speculators_config(kind, block.block_size, head.trunk, []),
        "aux_hidden_state_layer_ids": list(tapped_layers(head.spec.tap)),
        "block_size": block.rows_for(block.block_size),
        "mask_token_id": block.mask_token_id,
        "sample_from_anchor": block.anchor_predicts,
        "sliding_window_non_causal": not causal and not block.causal_windows,
        **(_dspark(block) if kind == "dspark" else {}),
        **_sizes(head),
        "tie_word_embeddings": False,
        "transformer_layer_config": inner,
    }
    return document, _named(head, arrays)


def speculators_config(kind: str, depth: int, trunk: str, architectures: list[str]) -> dict[str, Any]:
    """`speculators_config` of config.json: the algorithm, tokens per draft and the verifier."""
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depth}],
        "verifier": {"name_or_path": trunk, "architectures": architectures},
    }


LAYOUTS: Mapping[str, Callable[[HeadCheckpoint, Arrays], Written]] = {
    "dflash": as_dflash, "dspark": as_dspark, "speculators": as_speculators,
}  # fmt: skip


def _block(head: HeadCheckpoint) -> BlockSpec:
    """The head's BlockSpec. Raises ModelError if the head is no block drafter, or its layers are no Qwen3 blocks."""
    block, (attention, mlp) = head.spec.block, plain_parts(head.spec.layer)
    if block is None:
        raise ModelError(f"the head is of kind {head.spec.kind}, no block drafter", "headstart train --kind block")
    for wrong, what in (
        (not attention.qk_norm, "q and k are not normed"),
        (attention.gated, "attention is gated"),
        (mlp.bias, "there are biases in feed-forward parts"),
        (block.markov_kind == "selector", "it is a DFlash2 drafter, which is published as it is"),
        (attention.qkv_bias != attention.o_bias, "some of attention's projections have a bias, others not"),
        (attention.spec.scale != attention.spec.head_dim**-0.5, f"scores are multiplied by {attention.spec.scale:.4g}"),
    ):
        if wrong:
            raise ModelError(f"no DFlash or DSpark layout has a place for this head: {what}", HINT)
    return block


def _transformer(head: HeadCheckpoint) -> dict[str, Any]:
    """Keys of the layers' sizes, as in transformers' Qwen3 config."""
    block = head.spec.block
    assert block
    common = transformer_keys(head, block.num_layers, HINT)
    windows = [block.window(i) for i in range(block.num_layers)]
    if len({*windows} - {0}) > 1:
        raise ModelError(f"the head's layers have windows of {windows}: published layouts have one for all", HINT)
    return {
        **common, "model_type": "qwen3", "attention_dropout": 0.0, "max_position_embeddings": POSITIONS,
        "max_window_layers": block.num_layers, "layer_types": [SLIDING if window else FULL for window in windows],
        "use_sliding_window": any(windows), "sliding_window": max(windows) or None, "dtype": "bfloat16",
    }  # fmt: skip


def _common(head: HeadCheckpoint) -> dict[str, Any]:
    """Further keys that vLLM reads at the top level; written only if they differ from the common default."""
    block = head.spec.block
    assert block
    more: dict[str, Any] = {} if not block.interleaved else {"is_neox_style": False}
    if block.logit_scale != 1:
        more["logit_scale"] = block.logit_scale
    return more | (_sizes(head) if head.draft_token_ids is not None else {})


def _sizes(head: HeadCheckpoint) -> dict[str, Any]:
    return {"draft_vocab_size": head.draft_vocab_size, "target_hidden_size": head.hidden_size}


def _dspark(block: BlockSpec) -> dict[str, Any]:
    return {
        "markov_rank": block.markov_rank,
        "markov_head_type": block.markov_kind,
        "enable_confidence_head": block.confidence,
        "confidence_head_with_markov": block.confidence and block.confidence_markov,
    }


def _causal(block: BlockSpec) -> dict[str, bool]:
    """The key `causal`; empty for the default: causal in layers with a window, bidirectional in others."""
    causal = [block.is_causal(i) for i in range(block.num_layers)]
    if causal == [block.window(i) > 0 for i in range(block.num_layers)]:
        return {}
    if len({*causal}) > 1:
        raise ModelError(f"the head's layers differ in causality ({causal}): published layouts have one value", HINT)
    return {"causal": causal[0]}


def _outputs(head: HeadCheckpoint) -> list[int]:
    """Ids of the layers whose outputs the head reads, from 0; -1 is the embedding."""
    return [layer - 1 for layer in tapped_layers(head.spec.tap)]


def _named(head: HeadCheckpoint, arrays: Arrays) -> dict[str, Any]:
    return {theirs(name): array for name, array in arrays.items()} | vocabulary_maps(
        head.draft_token_ids, head.vocab_size
    )
