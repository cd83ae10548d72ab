"""Reads llama.cpp's files of block drafters (architecture `dflash`) as the published directory they were made from.

Source: llama.cpp `src/models/dflash.cpp` and `conversion/qwen.py`. Its target_layers are the layers whose inputs are
read (z-lab's ids + 1), d2t holds target ids instead of offsets, and DSpark's anchor drafts unless the file says
otherwise.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from headstart.errors import ModelError
from headstart.formats.base import Checkpoint, Tensor
from headstart.formats.gguf import rope_config
from headstart.formats.gguf_file import GgufFile, read
from headstart.formats.sizes import FULL, SLIDING
from headstart.heads.published import Document

ARCHITECTURE = "dflash"
TOP = {
    "fc": "fc", "enc.output_norm": "hidden_norm", "output_norm": "norm", "token_embd": "embed_tokens",
    "output": "lm_head", "markov_w1": "markov_head.markov_w1", "markov_w2": "markov_head.markov_w2",
    "conf_proj": "confidence_head.proj", "selector_hidden": "candidate_selector.hidden_projection",
    "selector_predecessor": "candidate_selector.predecessor_codebook",
    "selector_successor": "candidate_selector.successor_codebook",
}  # fmt: skip
LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj": "attention_conv.kernel_projection", "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
}  # fmt: skip
"""Names in the file -> published names, without `.weight`: of the drafter, and of a layer."""
SIZES = {
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps", "block_size": "block_size",
    "selector_rank": "selector_rank", "selector_top_k": "selector_top_k", "conv_kernel_size": "conv_kernel_size",
    "conv_group_size": "conv_group_size", "logit_scale": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping", "attention.sliding_window": "sliding_window",
}  # fmt: skip
"""Metadata key below the architecture's name -> key of config.json."""


def as_published(file: GgufFile) -> tuple[Document, dict[str, Tensor]]:
    """(config.json, tensors by published names) of a file of this architecture. Raises ModelError for one that is not
    supported."""
    found, tensors = file.metadata, file.tensors
    if "dflash.hyper_connection.count" in found:
        what = f"{file.path} is DeepSeek-V4's DSpark drafter in a file of its own, which is not read"
        raise ModelError(what, "use the checkpoint in safetensors, which holds the drafter")
    config: dict[str, Any] = {
        ours: found[key] for theirs, ours in SIZES.items() if (key := f"dflash.{theirs}") in found
    }
    markov, selects = tensors.get("markov_w1.weight"), "selector_hidden.weight" in tensors
    kind = "DFlash2DraftModel" if selects else "DSparkDraftModel" if markov else "DFlashDraftModel"
    rope = {"model_type": ARCHITECTURE, "rope_theta": found.get("dflash.rope.freq_base", 10000.0)}
    config |= {
        "architectures": [kind], "vocab_size": _vocabulary(file),
        "mask_token_id": found.get("tokenizer.ggml.mask_token_id"), "target_layer_ids": _taps(file),
        "sample_from_anchor": bool(found.get("dflash.sample_from_anchor", markov is not None)),
        **rope_config(found, tensors, {**rope, "head_dim": config.get("head_dim")}), **_windows(file, config),
    }  # fmt: skip
    if markov:
        config["markov_rank"] = markov.shape[1]
    if (ids := tensors.get("d2t")) is not None:
        config["draft_vocab_size"] = ids.shape[0]
    return config, _renamed(tensors)


def with_published_names(checkpoint: Checkpoint) -> Checkpoint:
    """A drafter's GGUF file on this machine with the config and tensor names of a published directory; others as they
    are. Raises as `as_published`."""
    if checkpoint.config.get("model_type") != ARCHITECTURE or not checkpoint.path.is_file():
        return checkpoint
    config, tensors = as_published(read(checkpoint.path))
    return replace(checkpoint, config=dict(config), tensors=tensors)


def _vocabulary(file: GgufFile) -> int:
    """Number of tokens: of the vocabulary in the file, else of a tensor's rows. Raises ModelError."""
    if tokens := file.metadata.get("tokenizer.ggml.tokens"):
        return len(tokens)
    for name in ("markov_w1.weight", "selector_predecessor.weight", "token_embd.weight"):
        if name in file.tensors:
            return file.tensors[name].shape[0]
    raise ModelError(f"{file.path} does not say how many tokens its target has", "convert the drafter again")


def _taps(file: GgufFile) -> list[int]:
    layers = file.metadata.get("dflash.target_layers")
    if not isinstance(layers, np.ndarray):
        raise ModelError(f"{file.path} has no dflash.target_layers", "convert the drafter again")
    return [int(each) - 1 for each in layers]


def _windows(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    pattern = file.metadata.get("dflash.attention.sliding_window_pattern")
    if not config.get("sliding_window") or pattern is None:
        return {}
    return {"layer_types": [SLIDING if each else FULL for each in pattern]}


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part, dot, suffix = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "")
        if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", part):
            sinks = {"attn_sinks": "self_attn.attention_sink_bias"}
            if match[2] in sinks:
                dot = suffix = ""
            part = f"layers.{match[1]}.{(LAYER | sinks).get(match[2], match[2])}"
        new = f"{TOP.get(part, part)}{dot}{suffix}"
        named[new] = replace(tensor, name=new)
    if (ids := named.get("d2t")) is not None:  # published files have offsets
        offsets = ids.numpy().astype(np.int64).reshape(-1) - np.arange(ids.shape[0])
        named["d2t"] = Tensor("d2t", offsets.shape, "I64", offsets.view(np.uint8), 0, offsets.nbytes)
    return {name: each for name, each in named.items() if not name.startswith(("rope_freqs", "rope_factors"))}
