"""The one layer of a head whose config.json is that of a Llama model."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from headstart.errors import ModelError
from headstart.heads.kind import Document
from headstart.kernels.ops import AttentionSpec
from headstart.layers.attention import AttentionConfig
from headstart.layers.decoder import LayerConfig, Norms
from headstart.layers.mlp import MLPConfig
from headstart.layers.rope import rope_spec


def plain_block(
    document: Document, named: Container[str], path: Path, norms: Norms, what: str
) -> tuple[LayerConfig, int, int]:
    """Its layer, of biases that are among its tensors, its hidden size and the target's vocabulary. Raises ModelError
    for values that are missing or wrong; `what`: whose they are."""
    where = path / "config.json"
    try:
        hidden, heads = int(document["hidden_size"]), int(document["num_attention_heads"])
        vocab_size = int(document.get("target_vocab_size") or document["vocab_size"])
        head_dim = int(document.get("head_dim") or hidden // heads)
        spec = AttentionSpec(heads, int(document.get("num_key_value_heads") or heads), head_dim, head_dim**-0.5)
        activation = str(document.get("hidden_act") or "silu")
        if min(hidden, heads, vocab_size, head_dim, spec.num_kv_heads) < 1 or heads % spec.num_kv_heads:
            raise ValueError("a size")
        layer = LayerConfig(
            mixer=AttentionConfig(
                spec=spec,
                rope=rope_spec(document, head_dim),
                qkv_bias="block.self_attn.q_proj.bias" in named,
                o_bias="block.self_attn.o_proj.bias" in named,
            ),
            mlp=MLPConfig(inner=int(document["intermediate_size"])),
            eps=float(document.get("rms_norm_eps", 1e-6)),
            norms=norms,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{where}: {error} is missing or wrong", f"is this {what}?") from error
    except ModelError as error:
        raise ModelError(f"{path}: {error.message}", error.hint) from error
    if activation != "silu":
        raise ModelError(f"{where}: hidden_act is {activation!r}, which is not known of {what}", "known: silu")
    return layer, hidden, vocab_size
