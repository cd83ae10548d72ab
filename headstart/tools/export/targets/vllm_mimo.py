"""Trunk and MTP head as one MiMo checkpoint for vLLM: {"method": "mtp"}.

MiMo is a trunk with q, k and v biases, an LM head of its own, and `model.mtp_layers.0`: input_proj reads [hidden ;
embedding], hidden being the stream before the trunk's final norm, later the head's own normed output (vLLM 0.32,
`model_executor/models/mimo.py` and `mimo_mtp.py`). A trunk without biases gets zeros; a tied embedding is written
twice. The directory brings the code that declares the type to transformers.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.safetensors import Planned, bfloat16
from headstart.formats.sizes import text_config
from headstart.heads.kind import plain_parts
from headstart.kernels.ops import AttentionSpec, RawTensor
from headstart.layers.attention import AttentionConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.mlp import MLPConfig
from headstart.layers.rope import rope_base, scaling_of
from headstart.models.families import family_named
from headstart.tools.export.plan import Plan, single_file
from headstart.tools.export.source import ExportRequest, ExportSource, add_text_side

Convert = Callable[[NDArray[np.float32]], NDArray[np.float32]]
USE = (
    "vllm serve {out} --trust-remote-code --speculative-config "
    """'{{"method": "mtp", "num_speculative_tokens": {depth}}}'"""
)
MODULE = "configuration_mimo"
PREFIX = "model.mtp_layers.0"
NAMES = family_named("mimo").names
ROPE_KEYS = ("rope_theta", "rope_parameters", "rope_scaling", "original_max_position_embeddings")
CONFIGURATION = '''"""Declares the model type for transformers: a Qwen2 configuration with MTP layers."""

from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"

    def __init__(self, num_nextn_predict_layers=1, **kwargs):
        self.num_nextn_predict_layers = num_nextn_predict_layers
        super().__init__(**kwargs)
'''


def check(source: ExportSource) -> None:
    head, layers = source.head, source.sizes.layers
    if head.spec.kind != "mtp" or head.spec.layer is None:
        hint = "--to vllm-eagle3 and vllm-dspark write other kinds of heads"
        raise ModelError(f"the head {source.head_path} is of kind {head.spec.kind}, not mtp", hint)
    attentions = [each.mixer for each in layers if isinstance(each.mixer, AttentionConfig)]
    turned = [each.rope and each.rope.rotary_dim == each.spec.head_dim for each in attentions]
    mlps = [each.mlp for each in layers if isinstance(each.mlp, MLPConfig)]
    wrong = [
        (head.spec.num_modules != 1, f"the head has {head.spec.num_modules} modules"),
        (head.spec.tap != "pre_norm", "the head reads the trunk's state after its final norm"),
        (head.spec.recycle != "post_norm", "the head recycles a vector before its own norm"),
        (plain_parts(head.spec.layer)[0].qk_norm or any(each.qk_norm for each in attentions), "q and k are normed"),
        (any(each.o_bias for each in attentions), "attention's output has a bias"),
        (any(each.bias for each in mlps), "there are biases in feed-forward parts"),
        (len(mlps) < len(layers), "there are experts"),
        (any(each.gated for each in attentions), "attention is gated"),
        (len(attentions) < len(layers), "there are layers with latent or linear attention"),
        (not all(turned), "a part of each head is not rotated"),
        (len(set(layers)) > 1 or not _is_qwen2s(layers[0]), "its layers are not all as Qwen2's"),
    ]
    for holds, what in wrong:
        if holds:
            raise _refusal(source, what)
    if not _is_alike(head.spec.layer, layers[0]):
        raise _refusal(source, "the head's block differs from its layers")


def _refusal(source: ExportSource, what: str) -> ModelError:
    return ModelError(f"{source.name} cannot be written as MiMo: {what}", "choose another layout with --to")


def _is_qwen2s(layer: LayerConfig) -> bool:
    """Returns whether a layer differs from Qwen2's only in sizes, RoPE and biases of q, k and v."""
    mixer, mlp = layer.mixer, layer.mlp
    if not (isinstance(mixer, AttentionConfig) and isinstance(mlp, MLPConfig)):
        return False
    spec = AttentionSpec(mixer.spec.num_heads, mixer.spec.num_kv_heads, mixer.spec.head_dim, mixer.spec.head_dim**-0.5)
    plain = AttentionConfig(spec=spec, rope=mixer.rope, qkv_bias=mixer.qkv_bias)
    return layer == LayerConfig(mixer=plain, mlp=MLPConfig(inner=mlp.inner), eps=layer.eps)


def _is_alike(head: LayerConfig, layer: LayerConfig) -> bool:
    """Returns whether the keys of config.json that describe a layer describe the head's block, too."""
    own, theirs = plain_parts(head)[0], plain_parts(layer)[0]
    same = replace(head, mixer=replace(own, qkv_bias=theirs.qkv_bias, rope=theirs.rope)) == layer
    if not (same and own.rope and theirs.rope):
        return False
    return np.allclose(own.rope.inv_freq, theirs.rope.inv_freq, rtol=1e-6, atol=0)  # other versions round differently


def _layer(source: ExportSource) -> tuple[AttentionConfig, MLPConfig]:
    mixer, mlp = source.sizes.layers[0].mixer, source.sizes.layers[0].mlp
    assert isinstance(mixer, AttentionConfig) and isinstance(mlp, MLPConfig)
    return mixer, mlp


def plan(request: ExportRequest) -> Plan:
    """Plans trunk and head under MiMo's names, in bfloat16. Raises ModelError for a formula that MiMo lacks."""
    source = request.source("mtp")
    check(source)
    tensors = {name: tensor for name, tensor in source.tensors.items() if not name.startswith("mtp.")}
    planned = [_matrix(NAMES.theirs(name), each) for name, each in tensors.items()]
    if "lm_head.weight" not in tensors:
        planned.append(_matrix("lm_head.weight", tensors["embed_tokens.weight"]))
    planned += _head(source)
    known = {each.name for each in planned}
    for prefix in (*(f"model.layers.{layer}" for layer in range(source.sizes.num_layers)), PREFIX):
        planned += [each for each in _biases(source, prefix) if each.name not in known]
    plan = single_file(planned, config(source), USE)
    plan.is_model = True
    plan.texts[f"{MODULE}.py"] = CONFIGURATION
    add_text_side(plan, source)
    return plan


def _matrix(name: str, tensor: RawTensor, convert: Convert = lambda values: values) -> Planned:
    return Planned(name, "BF16", tuple(tensor.shape), lambda: [bfloat16(convert(tensor.float32()))[0]])


def _biases(source: ExportSource, prefix: str) -> list[Planned]:
    spec = _layer(source)[0].spec
    planned = []
    for name, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads), ("v", spec.num_kv_heads)):
        zeros = np.zeros(heads * spec.head_dim, np.uint16)
        planned.append(Planned(f"{prefix}.self_attn.{name}_proj.bias", "BF16", zeros.shape, partial(list, [zeros])))
    return planned


def _head(source: ExportSource) -> list[Planned]:
    planned = []
    for name, tensor in source.head.tensors.items():
        turned = name.startswith("mtp.0.projection.") and not source.head.spec.hidden_first
        planned.append(_matrix(NAMES.theirs(name), tensor, *([_swap_halves] if turned else [])))
    return planned


def _swap_halves(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Reorders the columns of a projection from [embedding ; hidden] to [hidden ; embedding]."""
    half = values.shape[1] // 2
    return np.hstack((values[:, half:], values[:, :half]))


def config(source: ExportSource) -> dict[str, Any]:
    sizes, (mixer, mlp) = source.sizes, _layer(source)
    spec = mixer.spec
    own = text_config(source.checkpoint.config)
    assert mixer.rope
    if scaling_of(own)["rope_type"] == "rope_freqs":
        raise _refusal(source, "its RoPE is scaled by a GGUF file's factors")
    rope = {key: own[key] for key in ROPE_KEYS if own.get(key) is not None}
    return {
        "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "auto_map": {"AutoConfig": f"{MODULE}.MiMoConfig"},
        "num_nextn_predict_layers": 1, "vocab_size": sizes.vocab_size, "hidden_size": sizes.hidden_size,
        "intermediate_size": mlp.inner, "num_hidden_layers": sizes.num_layers, "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "hidden_act": "silu",
        "attention_bias": True, "tie_word_embeddings": False, "rms_norm_eps": sizes.eps,
        **(rope or {"rope_theta": round(rope_base(mixer.rope), 6)}), "max_position_embeddings": sizes.max_length,
        "layer_types": ["full_attention"] * sizes.num_layers, "use_sliding_window": False,
        "bos_token_id": own.get("bos_token_id"), "eos_token_id": own.get("eos_token_id"), "dtype": "bfloat16",
    }  # fmt: skip


EXPORT = plan
