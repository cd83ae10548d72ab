"""The layers of a config.json: which parts each has, and their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headstart.formats.mtp_families import num_experts
from headstart.tools.plan.shape import MLP, Attention

Config = Mapping[str, Any]

KERNELS = {"full": 7, "latent": 12, "chosen": 18, "compressed": 24, "recurrent": 10, "dense": 4, "experts": 10}
"""Kernels that one layer of a kind launches in today's engines, fused where that is usual; streams add three,
alternating ones and what goes with them twelve."""
STREAM_KERNELS = 3
ALTUP_KERNELS = 12
NO_MIXER = Attention(weights=0, kernels=0, stride=0)
NO_FEED = MLP(weights=0, kernels=0)
LETTERS = {"M": "mamba", "*": "full_attention", "E": "moe", "O": "moe", "-": "mlp"}
"""Layers of one part each, as a pattern writes them."""
STEP_KEYS = ("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_interval")
FIRST_KEYS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
CHOSEN_KEYS = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
UNGATED = ("relu2", "relu", "gelu_ungated")
"""Activations of two matrices, up and down, without a gate."""


def parts(config: Config) -> list[tuple[Attention, MLP]]:
    """Mixer and feed-forward part of every layer. Raises KeyError, TypeError or ValueError for sizes that are missing
    or make no sense."""
    if kinds := single_parts(config):
        return [_single(config, kind) for kind in kinds]
    if config.get("expert_ffn_hidden_size"):
        return shortcut_parts(config)
    num_layers = int(config["num_hidden_layers"])
    wide = first_borrowing(config, num_layers) if config.get("use_double_wide_mlp") else num_layers
    sparse = sparse_layers(config, num_layers)
    feeds = [
        feed_forward(of_layer(config, index), dense=not each, wide=index >= wide) for index, each in enumerate(sparse)
    ]
    return list(zip(attention_layers(config, num_layers), feeds, strict=True))


def of_layer(config: Config, index: int) -> Config:
    """The config as one layer reads it, where each has a width of its own."""
    widths = config.get("intermediate_size")
    return {**config, "intermediate_size": widths[index]} if isinstance(widths, list) else config


def shortcut_parts(config: Config) -> list[tuple[Attention, MLP]]:
    """Layers of two halves, each with attention and an MLP; experts run beside the second (LongCat-Flash). Of those
    that a token takes some have no weights."""
    count = int(config.get("num_layers") or int(config["num_hidden_layers"]) // 2)
    widths = {"intermediate_size": config["ffn_hidden_size"], "moe_intermediate_size": config["expert_ffn_hidden_size"]}
    config = {**config, **widths}
    mixer, dense, sparse = latent(config), feed_forward(config, dense=True), feed_forward(config, dense=False)
    whole = sparse.experts + int(config.get("zero_expert_num") or 0)
    both = replace(
        sparse,
        weights=dense.weights + sparse.weights,
        kernels=dense.kernels + sparse.kernels,
        active=max(round(sparse.active * sparse.experts / whole), 1),
    )
    return [(mixer, both), (mixer, dense)] * count


def single_parts(config: Config) -> list[str]:
    """Kinds of layers that are a mixer or a feed-forward part, not both; empty for ordinary models."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [LETTERS[letter] for letter in pattern]
    return [str(kind) for kind in config.get("layers_block_type") or ()]


def _single(config: Config, kind: str) -> tuple[Attention, MLP]:
    if kind in ("moe", "mlp"):
        return NO_MIXER, feed_forward(config, dense=kind == "mlp")
    return (mamba(config) if kind in ("mamba", "linear_attention") else grouped(config, 0)), NO_FEED


def attention_layers(config: Config, num_layers: int) -> list[Attention]:
    """One for each layer."""
    if config.get("compress_ratios"):
        return [compressed(config, int(ratio)) for ratio in config["compress_ratios"]][:num_layers]
    if config.get("kv_lora_rank"):
        return [latent(config, indexed=each) for each in indexed_layers(config, num_layers)]
    first = first_borrowing(config, num_layers)
    kinds = layer_kinds(config, num_layers)
    return [_mixer(config, kind, borrowing=index >= first) for index, kind in enumerate(kinds)]


def first_borrowing(config: Config, num_layers: int) -> int:
    """From this layer on keys and values are those of earlier layers."""
    return num_layers - int(config.get("num_kv_shared_layers") or 0)


def layer_kinds(config: Config, num_layers: int) -> list[str]:
    """Words as transformers has them, also where a config says them in another way."""
    kinds = [str(kind) for kind in config.get("layer_types") or ()][:num_layers]
    every = int(config.get("full_attention_interval") or 0)
    if not kinds and config.get("linear_num_value_heads") and every:
        return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(num_layers)]
    if not kinds and isinstance(full := config.get("full_attn_idxs"), list):
        return ["full_attention" if i in full else "conv" for i in range(num_layers)]
    if not kinds and isinstance(flags := config.get("hybrid_layer_pattern"), list):
        return ["sliding_attention" if flag else "full_attention" for flag in flags][:num_layers]
    if not kinds and config.get("sliding_window") and config.get("sliding_window_pattern"):
        turn = _turn(config["sliding_window_pattern"])
        return ["sliding_attention" if turn[i % len(turn)] else "full_attention" for i in range(num_layers)]
    if not kinds and config.get("attention_chunk_size") and "no_rope_layers" in config:
        every = int(config.get("no_rope_layer_interval") or 4)
        flags = config["no_rope_layers"] or [(i + 1) % every for i in range(num_layers)]
        return ["chunked_attention" if flag else "full_attention" for flag in flags][:num_layers]
    return kinds or _windows(config, num_layers)


def _windows(config: Config, num_layers: int) -> list[str]:
    """Where no layer is named: a window is for all of them, or where its use is said, for those past the first few."""
    first = num_layers
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        first = int(config.get("max_window_layers") or 0) if "use_sliding_window" in config else 0
    return ["sliding_attention" if index >= first else "full_attention" for index in range(num_layers)]


def _turn(pattern: Any) -> list[bool]:
    """Which layers have a window, again and again: letters (LLLG), a flag for each, or how often one has none."""
    if isinstance(pattern, str):
        return [letter == "L" for letter in pattern]
    return [bool(each) for each in pattern] if isinstance(pattern, list) else [True] * (int(pattern) - 1) + [False]


def _mixer(config: Config, kind: str, *, borrowing: bool) -> Attention:
    if kind == "mamba" or (kind == "linear_attention" and "mamba_n_heads" in config):
        return mamba(config)
    if kind == "linear_attention":
        return recurrent(config)
    if "mamba_d_ssm" in config:  # side by side (Falcon-H1)
        attention, beside = grouped(config, 0), mamba(config)
        kernels = attention.kernels + beside.kernels
        return replace(attention, weights=attention.weights + beside.weights, kernels=kernels, state=beside.state)
    if kind == "conv":
        return short_convolution(config)
    windows = {"chunked_attention": "attention_chunk_size", "sliding_attention": "sliding_window"}
    return grouped(config, int(config[windows[kind]]) if kind in windows else 0, borrowing=borrowing)


def grouped(config: Config, window: int, *, borrowing: bool = False) -> Attention:
    """Query heads over fewer key and value heads; windows and full layers may differ in both. Beside recurrent layers
    the output is gated: q is twice as wide."""
    hidden, heads = int(config["hidden_size"]), _by_window(config, "num_attention_heads", window)
    kv_heads = _by_window(config, "num_key_value_heads", window) or int(config.get("num_attention_groups") or heads)
    size = _by_window(config, "head_dim", window) or hidden // heads
    value = _by_window(config, "v_head_dim", window) or size
    gated = bool(config.get("attn_output_gate", config.get("linear_num_value_heads") is not None))
    one_matrix = bool(config.get("attention_k_eq_v")) and not window  # values are keys before norm and rotation
    keys = 0 if borrowing else kv_heads * (size if one_matrix else size + value)
    return Attention(
        weights=hidden * (heads * size * (2 if gated else 1) + keys + heads * value),
        kernels=KERNELS["full"],
        width=kv_heads * (size + value),
        work=heads * (size + value),
        window=window,
        stride=0 if window else 1,
        splits=kv_heads,
        stored=not borrowing,
    )


def _by_window(config: Config, key: str, window: int) -> int:
    """A size of layers with a window (`swa_`) or of those without (`global`), else of all; 0 where none is said."""
    other = f"swa_{key}" if window else {"head_dim": "global_head_dim"}.get(key, key.replace("num_", "num_global_"))
    special = config.get(other) or (window and (config.get("attention_other_setting") or {}).get(key))
    if special and other.startswith("num_global") and not config.get("attention_k_eq_v", True):
        special = None
    return int(special or (config[key] if key == "num_attention_heads" else config.get(key) or 0))


def indexed_layers(config: Config, num_layers: int) -> list[bool]:
    """Which layers have an indexer of their own; the others take what the last one before them has chosen."""
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds:
        return [str(each)[:1] in "fF" for each in kinds][:num_layers]
    every, offset = int(config.get("index_topk_freq") or 1), int(config.get("index_skip_topk_offset") or 2)
    return [max(i - offset + 1, 0) % every == 0 for i in range(num_layers)]


def latent(config: Config, *, indexed: bool = True) -> Attention:
    """Multi-head latent attention, absorbed (DeepSeek-V2 report, section 2.1): one vector per position for all heads;
    with `index_topk` a small indexer chooses positions (DeepSeek-V3.2 report), where the layer is `indexed`."""
    hidden, heads, rank = (int(config[key]) for key in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
    rope, nope, value = (int(config[key]) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    query = int(config.get("q_lora_rank") or 0)
    q_weights = (hidden + heads * (nope + rope)) * query if query else hidden * heads * (nope + rope)
    weights = q_weights + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    top = config.get("index_topk")
    index_heads, index_size = int(config.get("index_n_heads") or 0), int(config.get("index_head_dim") or 0)
    if top and indexed:
        weights += (query or hidden) * index_heads * index_size + hidden * (index_size + index_heads)
    return Attention(
        weights=weights,
        kernels=KERNELS["chosen" if top and indexed else "latent"],
        width=rank + rope,
        work=heads * (2 * rank + rope),
        top=int(top) if top else None,
        index_width=index_size if top and indexed else 0,
        index_work=index_heads * index_size if top and indexed else 0,
    )


def compressed(config: Config, ratio: int) -> Attention:
    """One key-value head over a window and one entry for every `ratio` positions before it; entries of the finer
    ratio are chosen by an indexer, and outputs are projected in groups of low rank."""
    hidden, heads, size = (int(config[key]) for key in ("hidden_size", "num_attention_heads", "head_dim"))
    query, rank, groups = (int(config[key]) for key in ("q_lora_rank", "o_lora_rank", "o_groups"))
    index_heads, index_size = int(config["index_n_heads"]), int(config["index_head_dim"])
    chooses = 0 < ratio < int(config["sliding_window"])
    weights = query * (hidden + heads * size) + hidden * size + heads * size * rank + groups * rank * hidden
    if ratio:
        weights += 2 * hidden * size * (2 if chooses else 1)
    if chooses:
        weights += query * index_heads * index_size + 4 * hidden * index_size
    return Attention(
        weights=weights,
        kernels=KERNELS["compressed" if ratio else "latent"] + (STREAM_KERNELS if config.get("hc_mult") else 0),
        width=size,
        work=2 * heads * size,
        window=int(config["sliding_window"]),
        stride=ratio,
        top=int(config["index_topk"]) if chooses else None,
        index_width=index_size if chooses else 0,
        index_work=index_heads * index_size if chooses else 0,
    )


def recurrent(config: Config) -> Attention:
    """Gated DeltaNet: a state of value heads x key size x value size, whatever the context."""
    hidden = int(config["hidden_size"])
    key_heads, value_heads = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
    key_size, value_size = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
    keys, values = key_heads * key_size, value_heads * value_size
    return Attention(
        weights=hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden,
        kernels=KERNELS["recurrent"],
        stride=0,
        state=value_heads * key_size * value_size,
        splits=key_heads,
    )


def short_convolution(config: Config) -> Attention:
    """A gated convolution of a few taps (LFM2's): its state is the last inputs."""
    hidden = int(config["hidden_size"])
    return Attention(
        weights=4 * hidden * hidden,
        kernels=KERNELS["recurrent"],
        stride=0,
        state=(int(config.get("conv_L_cache") or 3) - 1) * hidden,
    )


def mamba(config: Config) -> Attention:
    """Mamba-2: a state of heads x head size x state size, whatever the context."""
    hidden, heads = int(config["hidden_size"]), int(config.get("mamba_n_heads") or config["mamba_num_heads"])
    state = int(config.get("mamba_d_state") or config["ssm_state_size"])
    groups = int(config.get("mamba_n_groups") or config.get("n_groups") or 1)
    size = config.get("mamba_d_head") or config.get("mamba_head_dim") or "auto"
    whole = int(config.get("mamba_d_ssm") or int(config.get("mamba_expand") or 2) * hidden)
    inner = whole if size == "auto" else heads * int(size)
    return Attention(
        weights=hidden * (2 * inner + 2 * groups * state + heads) + inner * hidden,
        kernels=KERNELS["recurrent"],
        stride=0,
        state=inner * state,
        splits=groups,
    )


def sparse_layers(config: Config, num_layers: int) -> list[bool]:
    """Which layers have experts, by any of the ways that configs say it."""
    if not num_experts(config) or config.get("enable_moe_block") is False:
        return [False] * num_layers
    for key, word in (("mlp_layer_types", "sparse"), ("moe_layer_freq", 1)):
        if isinstance(kinds := config.get(key), list):
            return [kind == word for kind in kinds][:num_layers]
    chosen = config.get("moe_layers")
    if isinstance(listed := config.get("moe_layers_enum"), str):
        chosen = [int(each) for each in listed.split(",")]
    if isinstance(chosen, list):
        return [index in chosen for index in range(num_layers)]
    dense = {int(each) for each in config.get("mlp_only_layers") or ()}
    step = int(next((value for key in STEP_KEYS if (value := config.get(key))), 1))
    first = int(next((value for key in FIRST_KEYS if (value := config.get(key))), 0))
    return [i >= first and (i + 1) % step == 0 and i not in dense for i in range(num_layers)]


def feed_forward(config: Config, *, dense: bool, wide: bool = False) -> MLP:
    """Gate, up and down projection, or up and down; experts have them each, some in a smaller space of their own."""
    hidden, matrices = int(config["hidden_size"]), 2 if config.get("mlp_hidden_act") in UNGATED else 3
    extra = STREAM_KERNELS if config.get("hc_mult") else 0
    if dense:
        inner = _inner(config)
        beside = 3 * hidden * int(config.get("hidden_size_per_layer_input") or 0)  # a layer's own embedding comes in
        beside += alternating(config)
        extra += ALTUP_KERNELS if config.get("altup_num_inputs") else 0
        return MLP(weights=matrices * hidden * inner * (1 + wide) + beside, kernels=KERNELS["dense"] + extra)
    inner, experts = int(config.get("moe_intermediate_size") or config["intermediate_size"]), num_experts(config)
    latent_size = int(config.get("moe_latent_size") or 0)
    width = latent_size or hidden
    weights = matrices * hidden * _shared(config, inner) + hidden * experts + 2 * hidden * latent_size
    if config.get("enable_moe_block"):  # a dense part runs beside the experts
        weights += matrices * hidden * int(config["intermediate_size"])
    return MLP(
        weights=weights,
        kernels=KERNELS["experts"] + extra,
        experts=experts,
        active=int(next(value for key in CHOSEN_KEYS if (value := config.get(key)))),
        expert_weights=matrices * width * inner,
    )


def alternating(config: Config) -> int:
    """Weights of a layer over alternating streams: the learned residual, and its share of what makes several streams of
    one and one of several."""
    streams, hidden = int(config.get("altup_num_inputs") or 1), int(config["hidden_size"])
    ends = 2 * (streams - 1) * hidden * hidden // int(config["num_hidden_layers"])
    return 2 * hidden * int(config.get("laurel_rank") or 0) + ends


def _inner(config: Config) -> int:
    """Width of a dense feed-forward part; LFM2's is two thirds of what its config says, rounded up."""
    named = ("intermediate_size_mlp", "shared_intermediate_size", "block_ff_dim", "intermediate_size")
    inner = int(next(value for key in named if (value := config.get(key))))
    multiple = int(config.get("block_multiple_of") or 0)
    if not multiple or not config.get("block_auto_adjust_ff_dim", True):
        return inner
    return -(-int(float(config.get("block_ffn_dim_multiplier") or 1) * int(2 * inner / 3)) // multiple) * multiple


def _shared(config: Config, inner: int) -> int:
    """Width of the experts that every row runs through."""
    keys = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    for key in (*keys, "share_expert_dim"):
        if config.get(key):
            return int(config[key])
    if "interleave_moe_layer_step" in config:  # one beside the experts, which no key counts
        return inner
    counts = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return int(next((value for key in counts if (value := config.get(key))), 0)) * inner
