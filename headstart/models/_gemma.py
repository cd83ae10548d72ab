"""Common part of the Gemma families: tensor names (the text part of multimodal wrappers is loaded) and config keys."""

from collections.abc import Sequence

from headstart.errors import ModelError
from headstart.kernels.ops import RawTensor
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.mlp import MLPConfig
from headstart.models import keys
from headstart.models.keys import Config
from headstart.models.names import PREFIXES, Names
from headstart.models.reading import Reading

OUTSIDE = (
    "vision_tower.", "multi_modal_projector.", "embed_vision.", "audio_tower.", "embed_audio.", "vision_embedder.",
)  # fmt: skip
NAMES = Names({**PREFIXES, **dict.fromkeys(OUTSIDE)})
"""Names in text models and in multimodal models, whose vision and audio tensors are ignored."""
DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "tie_word_embeddings": True,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "hidden_size": 2304, "intermediate_size": 9216,
}  # fmt: skip
HARMLESS = {
    "hidden_act": "given by hidden_activation",
    **dict.fromkeys(("mm_tokens_per_image", "vision_soft_tokens_per_image"), "of images"),
    **dict.fromkeys(
        ("boi_token_index", "eoi_token_index", "image_token_index", "boi_token_id", "eoi_token_id", "boa_token_id",
         "eoa_token_id", "eoa_token_index"),
        "of images and sounds",
    ),
    "rope_local_base_freq": "given by rope_parameters",
    "rope_theta": "given by rope_parameters",
    "sliding_window_pattern": "given by layer_types",
}  # fmt: skip


def refuse_bidirectional(config: Config, served: object = None) -> None:
    """Raises ModelError for bidirectional attention (`use_bidirectional_attention`). served: a supported value."""
    if config.get("use_bidirectional_attention") not in (None, False, served):
        keys.refuse_others(config, {"use_bidirectional_attention": False})


def score_scalar(config: Config, layers_27b: int) -> int:
    """query_pre_attn_scalar s: scores are q . k / sqrt(s). GGUF files have 0: s is then head_dim, except in the 27B
    model (recognized by `layers_27b` layers), where it is hidden_size / heads."""
    if written := keys.number(config, "query_pre_attn_scalar", least=0):
        return written
    hidden, heads = keys.number(config, "hidden_size"), keys.number(config, "num_attention_heads")
    return hidden // heads if keys.num_layers(config) == layers_27b else keys.number(config, "head_dim")


def shared_layer(kinds: Sequence[str], first: int, index: int) -> int | None:
    """The layer whose keys and values layer `index` reads: None (its own) below `first`, else the last layer below
    `first` of the same kind. Raises ModelError if there is none."""
    if index < first:
        return None
    before = [i for i in range(max(first, 0)) if kinds[i] == kinds[index]]
    if not before:
        raise ModelError(f"config.json: no {kinds[index]} layer is left whose keys layer {index} could read",
                         "see num_kv_shared_layers")  # fmt: skip
    return before[-1]


def mlp(config: Reading, index: int) -> MLPConfig:
    """The MLP of layer `index`; `intermediate_size` may be a list. Raises ModelError for a list that is too short."""
    inner = config.get("intermediate_size")
    if isinstance(inner, list):
        if len(inner) <= index:
            raise ModelError(f"intermediate_size has widths of {len(inner)} layers, not of layer {index}")
        config = config.inside({"intermediate_size": inner[index]})
    return keys.mlp(config)


def attention(config: Reading, window: int, source_layer: int | None, keys_are_values: bool = False) -> AttentionConfig:
    """Attention of Gemma 3n and 4: scores are not scaled; q, k and v are normalized. window: 0 in full layers."""
    return keys.attention(
        config, scale=1.0, window=window, **keys.biases(config), qk_norm=True, v_norm=True,
        keys_are_values=keys_are_values, source_layer=source_layer,
    )  # fmt: skip


def own_keys(tensors: dict[str, RawTensor], config: DecoderConfig) -> dict[str, RawTensor]:
    """The tensors without unused K and V projections of layers that read another layer's keys and values."""
    sharing = {f"layers.{i}" for i, each in enumerate(config.layers) if each.mixer.source_layer is not None}
    parts = ((name, name.partition(".self_attn.")) for name in tensors)
    return {
        name: tensors[name] for name, (layer, _, part) in parts if layer not in sharing or part[:2] not in ("k_", "v_")
    }
