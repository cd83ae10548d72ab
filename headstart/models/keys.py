"""Reads keys of config.json into layer configs. Each function raises ModelError for a missing or impossible value, and
for a value that selects an unsupported variant."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from headstart.errors import ModelError
from headstart.formats.sizes import FULL as FULL, LINEAR as LINEAR, MAX_SIZE, SLIDING as SLIDING, first_value
from headstart.kernels.ops import Activation, AttentionSpec, RouterSpec
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.mlp import MLPConfig
from headstart.layers.moe import MoEConfig
from headstart.layers.parts import FeedForwardConfig, MixerConfig
from headstart.layers.rope import max_rope_length, rope_spec
from headstart.models.mtp import declared
from headstart.models.reading import Reading

Config = Mapping[str, Any]


def inside(config: Config, inner: Mapping[str, Any]) -> Reading:
    """The config with the keys of `inner`, an object inside it, which take precedence."""
    return (config if isinstance(config, Reading) else Reading(config, {})).inside(inner)


def text_config(config: Config) -> Reading:
    """The text part of a multimodal wrapper's config, or a text model's config. Either may say that the LM head is
    tied."""
    inner = config.get("text_config") or {}
    if not isinstance(inner, dict):
        raise ModelError("config.json: text_config is not an object")
    tied = flag(config, "tie_word_embeddings") or flag(inner, "tie_word_embeddings")
    return inside(config, {**inner, "tie_word_embeddings": tied})


def number(config: Config, *keys: str, default: int | None = None, least: int = 1, needs: str = "") -> int:
    """Whole number under the first of these keys that is present. least: minimum. needs: the part of the model that
    requires the key, for the error's hint."""
    value = default if (found := first_value(config, keys)) is None else found
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        hint = f"{needs} needs it" if needs else "is this a model directory?"
        raise ModelError(f"config.json: {keys[0]} is missing or not a number", hint)
    if not least <= value < MAX_SIZE:
        raise ModelError(f"config.json: {keys[0]} is {value}, but must be at least {least} and below 2^40")
    return int(value)


def flag(config: Config, key: str, default: bool = False) -> bool:
    """A boolean; `default` if the key is absent or null. Raises ModelError for another value."""
    value = config.get(key)
    if value not in (None, True, False):
        raise ModelError(f"config.json: {key} is {value!r}, but must be true or false")
    return default if value is None else bool(value)


def real(config: Config, key: str, default: float) -> float:
    """A number above 0; `default` if the key is absent or null. Raises ModelError for another value."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"config.json: {key} is {value!r}, but must be a number above 0")
    return float(value)


def refuse_others(config: Config, served: Mapping[str, Any]) -> None:
    """Raises ModelError if a key has another value than the supported one. served: key -> supported value."""
    for key, only in served.items():
        if config.get(key, only) != only:
            raise ModelError(f"config.json: {key} is {config[key]!r}, which is not supported", f"known: {only!r}")


def renamed(config: Config, names: Mapping[str, str]) -> Reading:
    """The config with values under the usual keys. names: usual key -> the family's own, which takes precedence."""
    return inside(config, {key: config[own] for key, own in names.items() if config.get(own) is not None})


def filled(written: Config, defaults: Config) -> dict[str, Any]:
    """`written` with `defaults` for keys that are absent or null."""
    return {**defaults, **{key: value for key, value in written.items() if value is not None}}


def check_preparation(preparation: Config, needed: Mapping[str, Any]) -> None:
    """Raises ModelError if preprocessor_config.json has another value than the vision tower needs. needed: key ->
    value."""
    for key, only in needed.items():
        if preparation.get(key, only) != only:
            what = f"preprocessor_config.json: {key} is {preparation[key]!r}"
            raise ModelError(what, f"the vision tower takes {only!r}")


CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def image_statistics(preparation: Config) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of red, green and blue in preprocessor_config.json; by default CLIP's."""
    usual = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
    found = [preparation.get(key) or default for key, default in usual.items()]
    if not all(isinstance(each, list | tuple) and len(each) == 3 for each in found) or min(found[1]) <= 0:
        raise ModelError(f"preprocessor_config.json: image_mean and image_std are {found}", "give three numbers each")
    mean, std = (tuple(map(float, each)) for each in found)
    return mean, std


def attention(
    config: Config, *, scale: float | None = None, window: int = 0, softcap: float = 0.0, value_dim: int = 0,
    chunk: int = 0, rotated: bool = True, **switches: Any,
) -> AttentionConfig:  # fmt: skip
    """Grouped-query attention. scale (None: 1 / sqrt(head_dim)), window, softcap, value_dim and chunk: as in
    AttentionSpec; rotated: whether it has RoPE; switches: other fields of AttentionConfig."""
    heads = number(config, "num_attention_heads")
    kv_heads = number(config, "num_key_value_heads", default=heads)
    head_dim = number(config, "head_dim", default=number(config, "hidden_size") // heads)
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} query heads are no multiple of {kv_heads} kv heads")
    spec = AttentionSpec(
        heads, kv_heads, head_dim, scale or head_dim**-0.5, value_dim, window=window, softcap=softcap, chunk=chunk
    )
    rope = rope_spec(config, head_dim)
    return AttentionConfig(spec=spec, rope=rope if rotated else None, **switches)


def biases(config: Config, *, default: bool = False, own_output: bool = False) -> dict[str, bool]:
    """`qkv_bias` and `o_bias` of AttentionConfig from `attention_bias`; default: its value where it is absent.
    own_output: for the output projection `attention_out_bias` takes precedence."""
    bias = flag(config, "attention_bias", default)
    return {"qkv_bias": bias, "o_bias": flag(config, "attention_out_bias", bias) if own_output else bias}


def windows(config: Config, slides: Callable[[int, int], bool] = operator.ge) -> list[int]:
    """Sliding window of each layer in positions, 0: unlimited; by Qwen2's keys. `layer_types` names the layers with a
    window; without it they are those from `max_window_layers` on. slides: (layer, max_window_layers) -> another rule
    for the latter."""
    count = num_layers(config)
    written = number(config, "sliding_window", default=0, least=0)  # unused in most files
    window = written if flag(config, "use_sliding_window") else 0
    first = number(config, "max_window_layers", default=0, least=0)
    unlisted = [SLIDING if window and slides(i, first) else FULL for i in range(count)]
    kinds = layer_kinds(config, (FULL, SLIDING) if window else (FULL,), unlisted)
    return [window if kind == SLIDING else 0 for kind in kinds]


def kinds_in_turn(config: Config, every: int) -> list[str]:
    """SLIDING or FULL for each layer, from `layer_types`. Without it each `sliding_window_pattern`th layer is full, by
    default each `every`th. GGUF files may have a list of flags (True: sliding) instead of that number."""
    kinds, count = config.get("layer_types"), num_layers(config)
    if kinds is None:
        written = config.get("sliding_window_pattern")
        if isinstance(written, str) and written:  # a repeated pattern such as LLLG
            written = [letter == "L" for letter in (written * count)[:count]]
        if isinstance(written, bool):  # GGUF file: one flag for all layers
            written = [written] * count
        if isinstance(written, list):
            kinds = [SLIDING if sliding else FULL for sliding in written]
        else:
            every = number(config, "sliding_window_pattern", default=every, least=0) or every
            kinds = [FULL if (i + 1) % every == 0 else SLIDING for i in range(count)]
    check_kinds(kinds, count, (FULL, SLIDING))
    return list(kinds)


ROPES: Mapping[str, str] = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
"""Kind of layer -> config key of its RoPE base."""


def by_kind(config: Config, bases: Mapping[str, str] = ROPES) -> dict[str, Reading]:
    """Kind of layer -> the config with the RoPE keys of that kind. Source: `rope_parameters` by kind (transformers 5),
    or in older files `rope_scaling`, which is for full layers only. bases: kind -> key of its RoPE base."""
    written = config.get("rope_parameters")
    ropes = {FULL: config.get("rope_scaling")} if written is None else written
    if not isinstance(ropes, dict) or not all(isinstance(rope, dict | None) for rope in ropes.values()):
        raise ModelError(f"config.json: rope_parameters is {written!r}, but must have a rope for each kind of layer")
    if unknown := sorted(set(ropes) - set(bases)):
        raise ModelError(f"config.json: rope_parameters has {unknown[0]!r}", f"known are layers of {', '.join(bases)}")
    return {
        kind: inside(config, {"rope_parameters": ropes.get(kind), "rope_scaling": None, "rope_theta": config.get(base)})
        for kind, base in bases.items()
    }


def windows_in_turn(config: Config, every: int = 1) -> list[int]:
    """Sliding window of each layer in positions, 0: unlimited. Kinds of layers as in `kinds_in_turn`; with every = 1
    and no key that names kinds, all layers are sliding."""
    window, count = number(config, "sliding_window", default=0, least=0), num_layers(config)
    if not window:
        return [0] * count
    written = config.get("layer_types") is not None or bool(config.get("sliding_window_pattern"))
    kinds = kinds_in_turn(config, every) if written or every > 1 else [SLIDING] * count
    return [window if kind == SLIDING else 0 for kind in kinds]


def layer_kinds(config: Config, known: Sequence[str], unlisted: Sequence[str]) -> list[str]:
    """Kind of each layer, from `layer_types`; without that key `unlisted`. Raises ModelError for kinds that are not in
    `known`."""
    kinds = config.get("layer_types")
    kinds = [*unlisted] if kinds is None else kinds
    check_kinds(kinds, num_layers(config), known)
    return list(kinds)


def check_kinds(kinds: object, count: int, known: Sequence[str]) -> None:
    """Raises ModelError unless `kinds` is a list of `count` known kinds."""
    if not isinstance(kinds, list) or len(kinds) != count:
        raise ModelError(f"config.json: layer_types must name {count} layers")
    if unknown := sorted({str(kind) for kind in kinds} - {*known}):
        raise ModelError(f"config.json: layer type {unknown[0]!r} is not supported", f"known: {', '.join(known)}")


def attending(config: Config) -> tuple[list[bool] | None, Any]:
    """(for each layer, whether it is attention; number of KV heads). The list is None if the config has one number for
    all layers. GGUF files have a list, with 0 for layers without attention."""
    written = config.get("num_key_value_heads")
    if not isinstance(written, list):
        return None, written
    numbers = all(isinstance(each, int) for each in written)
    if not numbers or len(written) != num_layers(config) or len({each for each in written if each}) > 1:
        raise ModelError(f"config.json: num_key_value_heads is {written}, but must be 0 or one number by layer")
    return [bool(each) for each in written], max(written)


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu", "relu2": "relu2",
}  # fmt: skip
"""Hugging Face's name of an activation -> that of Ops."""


def activation(config: Config) -> Activation:
    """Activation of the MLP, from `hidden_act` or Gemma's `hidden_activation`."""
    name = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in ACTIVATIONS:
        hint = f"known: {', '.join(ACTIVATIONS)}"
        raise ModelError(f"config.json: hidden_act is {name!r}, which is not supported", hint)
    return ACTIVATIONS[name]


def mlp(config: Config, **switches: Any) -> MLPConfig:
    """MLPConfig of a config. switches: further fields of MLPConfig."""
    return MLPConfig(inner=number(config, "intermediate_size"), activation=activation(config), **switches)


def layer(config: Config, mixer: MixerConfig, feed_forward: FeedForwardConfig, **more: Any) -> LayerConfig:
    """LayerConfig of these parts, with the config's epsilon. more: further fields of LayerConfig."""
    fields = {"eps": real(config, "rms_norm_eps", 1e-6), **more}
    return LayerConfig(mixer=mixer, mlp=feed_forward, **fields)


def stack(
    config: Config, *, windows: Sequence[int] = (), windowed: Config | None = None, rotated: Sequence[bool] = (),
    mixer: Mapping[str, Any] = MappingProxyType({}), layers: Mapping[str, Any] = MappingProxyType({}),
    feed_forward: FeedForwardConfig | None = None, **more: Any,
) -> DecoderConfig:  # fmt: skip
    """A decoder of equal layers, except for windows and RoPE. windows: of each layer; empty: none. rotated: whether
    each layer has RoPE; empty: all have. windowed: the config for layers with a window; None: `config`. feed_forward:
    None: an MLP. mixer: arguments of `attention`; layers: fields of LayerConfig; more: fields of DecoderConfig."""
    feed = feed_forward or mlp(config)

    def one(index: int) -> LayerConfig:
        window = windows[index] if windows else 0
        read = config if windowed is None or not window else windowed
        attending = attention(read, window=window, rotated=not rotated or rotated[index], **mixer)
        return layer(config, attending, feed, **layers)

    return decoder(config, [one(index) for index in range(num_layers(config))], **more)


def decoder(config: Config, layers: Sequence[LayerConfig], **more: Any) -> DecoderConfig:
    """DecoderConfig of these layers. more: further fields of DecoderConfig."""
    fields = {
        "vocab_size": number(config, "vocab_size"),
        "hidden_size": number(config, "hidden_size"),
        "layers": tuple(layers),
        "eps": real(config, "rms_norm_eps", 1e-6),
        "max_length": max_rope_length(config, number(config, "max_position_embeddings", default=2048)),
        "tied": flag(config, "tie_word_embeddings"),
    }
    return DecoderConfig(**{**fields, **more})


MAX_LAYERS = 10_000
MAX_TAPS = 16  # of a causal convolution


def num_layers(config: Config, key: str = "num_hidden_layers") -> int:
    """Number of layers under `key`. Raises ModelError for more than MAX_LAYERS."""
    count = number(config, key)
    if count > MAX_LAYERS:
        raise ModelError(f"config.json: {key} is {count}, but at most {MAX_LAYERS} make sense")
    return count


DENSE, SPARSE = "dense", "sparse"


def feed_kinds(
    config: Config, *first: str, default: int = 0, known: tuple[str, str] = (DENSE, SPARSE), listed: bool = True
) -> list[str]:
    """Kind of each layer's feed-forward part, from `mlp_layer_types` (if listed). Without that key it is known[0] in
    the first layers, whose number is under one of the keys `first`, and known[1] in the others."""
    count, kinds = num_layers(config), config.get("mlp_layer_types") if listed else None
    begin = min(number(config, *first, default=default, least=0), count)
    if kinds is None:
        kinds = [known[0]] * begin + [known[1]] * (count - begin)
    check_kinds(kinds, count, known)
    return list(kinds)


def dense_or_sparse(
    config: Config, mixer: MixerConfig, sparse: LayerConfig, *, listed: bool = True
) -> list[LayerConfig]:
    """All layers: `sparse`, or where `feed_kinds` says DENSE the same mixer with an MLP."""
    kinds = feed_kinds(config, "first_k_dense_replace", listed=listed)
    dense = layer(config, mixer, mlp(config)) if DENSE in kinds else sparse
    return [dense if kind == DENSE else sparse for kind in kinds]


def mixed_layers(
    config: Config, mixers: Sequence[MixerConfig], dense: FeedForwardConfig, sparse: FeedForwardConfig, *,
    feeds: Sequence[str] | None = None, **more: Any,
) -> list[LayerConfig]:  # fmt: skip
    """One layer for each mixer, with `dense` where `feeds` has DENSE, else `sparse`. feeds: of each layer; None: by
    `first_k_dense_replace`. more: further fields of LayerConfig."""
    feeds = feed_kinds(config, "first_k_dense_replace") if feeds is None else feeds
    parts = (dense if feed == DENSE else sparse for feed in feeds)
    return [layer(config, mixer, part, **more) for mixer, part in zip(mixers, parts, strict=True)]


def layer_flags(config: Config, key: str, flags: object) -> list[bool]:
    """A flag for each layer from `flags`, the value of `key`: 0 or 1 for at least so many layers. Raises ModelError."""
    count = num_layers(config)
    if not isinstance(flags, list) or len(flags) < count or any(each not in (0, 1) for each in flags):
        raise ModelError(f"config.json: {key} must be a list of 0 and 1 for {count} layers")
    return [bool(each) for each in flags[:count]]


def with_feed_kinds(config: Config) -> Config:
    """The config with `mlp_layer_types` where it has `moe_layer_freq`, a list with 1 for layers with experts."""
    flags = config.get("moe_layer_freq")
    if flags is None or config.get("mlp_layer_types") is not None:
        return config
    kinds = [SPARSE if each else DENSE for each in layer_flags(config, "moe_layer_freq", flags)]
    return inside(config, {"mlp_layer_types": kinds})


def rotated_layers(config: Config, flags: object) -> list[bool]:
    """For each layer, whether it has RoPE: by flags, or (None) all but each `no_rope_layer_interval`th."""
    count, every = num_layers(config), number(config, "no_rope_layer_interval", default=4)
    if flags is None:
        return [(i + 1) % every != 0 for i in range(count)]
    return layer_flags(config, "no_rope_layers", flags)


def num_mtp(config: Config) -> int:
    """Number of MTP modules that the config declares under any of the known keys."""
    return declared(config).modules


def mtp_recycle(
    config: Config, default: Literal["post_norm", "pre_norm"] = "post_norm"
) -> Literal["post_norm", "pre_norm"]:
    """HeadSpec.recycle of the MTP module, from the key `mtp_recycle`; `default` without it."""
    recycle = config.get("mtp_recycle", default)
    if recycle not in ("post_norm", "pre_norm"):
        raise ModelError(f"config.json: mtp_recycle is {recycle!r}", "known: post_norm, pre_norm")
    return "pre_norm" if recycle == "pre_norm" else "post_norm"


def softmax_experts(config: Config, *, shared: int = 0, inner: int = 0) -> MoEConfig:
    """Mixture of experts with a softmax router. inner: intermediate size of an expert; 0: `moe_intermediate_size`.
    shared: intermediate size of the gated shared expert; 0: none."""
    router = RouterSpec(
        num_experts=number(config, "num_local_experts", "num_experts", needs="a mixture of experts"),
        top_k=number(config, "num_experts_per_tok", needs="a mixture of experts"),
        normalize=flag(config, "norm_topk_prob", True),
    )
    return experts(config, router, inner=inner, shared=shared, shared_gate=shared > 0)


def has_experts(config: Config, index: int) -> bool:
    """True if layer `index` has experts (Qwen's keys `decoder_sparse_step` and `mlp_only_layers`)."""
    step = number(config, "decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(each, int) for each in dense):
        raise ModelError(f"config.json: mlp_only_layers is {dense!r}, but must be a list of layers")
    return (index + 1) % step == 0 and index not in dense


SIGMOID = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "expert_gating_func": 2,  # llama.cpp's number of the sigmoid
}


def sigmoid_experts(config: Config) -> MoEConfig:
    """Mixture of experts with DeepSeek-V3's router: sigmoid scores, selection bias, groups of experts."""
    refuse_others(config, SIGMOID)
    router = RouterSpec(
        num_experts=number(config, "n_routed_experts", "num_experts", needs="a mixture of experts"),
        top_k=number(config, "num_experts_per_tok", needs="a mixture of experts"),
        scoring="sigmoid",
        normalize=flag(config, "norm_topk_prob", True),
        scale=real(config, "routed_scaling_factor", 1.0),
        num_groups=number(config, "n_group", default=1, least=0) or 1,
        top_groups=number(config, "topk_group", default=1, least=0) or 1,
    )
    count, groups_ = router.num_experts, router.num_groups
    if count % groups_ or router.top_groups > groups_:
        what = f"{count} experts do not make {groups_} groups of which {router.top_groups} count"
        raise ModelError(f"config.json: {what}")
    shared = number(config, "n_shared_experts", default=0, least=0)
    bias = flag(config, "use_expert_bias", True)
    return experts(config, router, shared=shared * number(config, "moe_intermediate_size"), bias=bias)


def experts(config: Config, router: RouterSpec, *, inner: int = 0, **more: Any) -> MoEConfig:
    """MoEConfig of a router. inner: intermediate size of an expert; 0: `moe_intermediate_size`. more: further fields of
    MoEConfig. Raises ModelError for a router that selects more experts than there are."""
    among = router.num_experts // router.num_groups * router.top_groups
    if router.top_k > among:
        raise ModelError(f"config.json: a token cannot take {router.top_k} of {among} experts")
    inner = inner or number(config, "moe_intermediate_size", needs="a mixture of experts")
    if "activation" not in more:
        more["activation"] = activation(config)
    return MoEConfig(router=router, inner=inner, **more)
