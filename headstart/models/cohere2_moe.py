"""Cohere 2 with experts (Command A+, North Mini Code).

Formula: transformers 5.23 `models/cohere2_moe`; MTP module (full attention, rotary positions) and its tensor names:
llama.cpp `models/cohere2moe.cpp`. A module without a norm of its own takes the trunk's last one.
"""

from dataclasses import replace

from headstart.errors import ModelError
from headstart.heads.base import HeadSpec
from headstart.kernels.ops import RawTensor
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.moe import MoEConfig
from headstart.layers.parts import FeedForwardConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import DENSE, FULL, SLIDING, SPARSE, Config, number, real
from headstart.models.mtp import MTPLayout

SERVED = {"use_parallel_block": True, "use_gated_activation": True}
SHARES = {"average": 0.5, "sum": 1.0}  # how routed and shared experts are put together -> a factor of both
SCORES = {1: "softmax", 2: "sigmoid"}  # llama.cpp's numbers


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, SERVED)
    centered = config.get("rms_norm_eps") is None
    eps = real(config, "layer_norm_eps", 1e-5) if centered else real(config, "rms_norm_eps", 1e-5)
    window = number(config, "sliding_window", default=0, least=0)
    feeds = keys.feed_kinds(config, "first_k_dense_replace")
    prefix = number(config, "prefix_dense_sliding_window_pattern", default=1)
    width = number(config, "prefix_dense_intermediate_size", "intermediate_size")
    dense = keys.mlp(keys.inside(config, {"intermediate_size": width}))
    parts: dict[str, FeedForwardConfig] = {DENSE: dense, SPARSE: _experts(config)}

    def layer(kind: str, feed: str, *, rotated: bool) -> LayerConfig:
        slides = kind == SLIDING
        mixer = keys.attention(config, window=window if slides else 0, rotated=rotated or slides, **keys.biases(config))
        return keys.layer(config, mixer, parts[feed], norms="parallel", centered=centered, eps=eps)

    pairs = zip(_kinds(config, feeds, prefix), feeds, strict=True)
    return keys.decoder(
        config, [layer(kind, feed, rotated=feed == DENSE and prefix == 1) for kind, feed in pairs],
        logit_scale=real(config, "logit_scale", 0.0625), centered=centered, eps=eps,
        mtp_layer=layer(FULL, SPARSE, rotated=True),
    )  # fmt: skip


def _kinds(config: Config, feeds: list[str], prefix: int) -> list[str]:
    """SLIDING or FULL for each layer. The first layers, which have an MLP, follow a pattern of period `prefix`; after
    them the pattern of period `sliding_window_pattern` begins anew."""
    pattern = config.get("sliding_window_pattern")
    if config.get("layer_types") is not None or isinstance(pattern, list | bool):
        return keys.kinds_in_turn(config, 4)
    every, first = number(config, "sliding_window_pattern", default=4), feeds.count(DENSE)
    places = [*((i, prefix) for i in range(first)), *((i, every) for i in range(len(feeds) - first))]
    return [FULL if (i + 1) % turn == 0 else SLIDING for i, turn in places]


def _experts(config: Config) -> MoEConfig:
    """The experts. The softmax is over the selected experts, so weights are normalized despite `norm_topk_prob`."""
    inner = number(config, "moe_intermediate_size", default=0, least=0) or number(config, "intermediate_size")
    experts = keys.softmax_experts(config, inner=inner)
    declared = config.get("expert_selection_fn") or SCORES.get(number(config, "expert_gating_func", default=0, least=0))
    if declared not in SCORES.values():
        raise ModelError(f"config.json: expert_selection_fn is {declared!r}", f"known: {', '.join(SCORES.values())}")
    sigmoid = declared == "sigmoid"
    shared = number(config, "num_shared_experts", "n_shared_experts", default=0, least=0)
    strategy = config.get("shared_expert_combination_strategy", "average")
    if strategy not in SHARES:
        known = ", ".join(SHARES)
        raise ModelError(f"config.json: shared_expert_combination_strategy is {strategy!r}", f"known: {known}")
    router = replace(
        experts.router,
        scoring="sigmoid" if sigmoid else "softmax",
        normalize=not sigmoid or experts.router.normalize,
        scale=SHARES[strategy] if shared else 1.0,
    )
    return replace(experts, router=router, shared=shared * inner, shared_scale=SHARES[strategy])


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: an MTP module without its own norm uses the trunk's."""
    layer = f"layers.{config.num_layers}"
    norm = f"{layer}.shared_head.norm.weight"
    if f"{layer}.eh_proj.weight" in tensors and norm not in tensors:
        return {**tensors, norm: tensors["norm.weight"]}
    return tensors


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "num_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": 4096, "expert_selection_fn": "softmax", "head_dim": 128, "vocab_size": 256000,
    },
    harmless={
        **dict.fromkeys(("first_k_dense_replace", "mlp_layer_types"), "used only by layers with an MLP"),
        **dict.fromkeys(("sliding_window_pattern", "prefix_dense_sliding_window_pattern"), "given by layer_types"),
        **dict.fromkeys(("layer_norm_eps", "rms_norm_eps"), "one of the two norms"),
        **dict.fromkeys(("num_shared_experts", "n_shared_experts"), "used only by experts"),
        "intermediate_size": "of experts, or of layers with an MLP",
        "order_of_interleaved_layers": "given by layer_types",
        "prefix_dense_intermediate_size": "of layers with an MLP, where there are any",
        "shared_expert_intermediate_size": "that of one times their number",
    },
    adapt=adapt,
    head=HeadSpec(),
    mtp=MTPLayout(title="Cohere2-MoE", served=1, llama_cpp=("cohere2moe",)),
    interleaved_files=True,
    aliases=("cohere2moe",),
    small={
        "model_type": "cohere2_moe", "architectures": ["Cohere2MoeForCausalLM"], "sliding_window": 9,
        "sliding_window_pattern": 2, "layer_norm_eps": 1e-5, "rms_norm_eps": None, "logit_scale": 1.25,
        "tie_word_embeddings": True, "num_experts": 7, "num_experts_per_tok": 3, "num_shared_experts": 2,
        "expert_selection_fn": "sigmoid", "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 56,
        "intermediate_size": 24, "num_nextn_predict_layers": 1,
    },
)  # fmt: skip
