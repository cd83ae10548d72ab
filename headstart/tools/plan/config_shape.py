"""From a config.json (its keys, never a family's name) to a Shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from headstart.errors import ModelError
from headstart.formats.mtp_families import declared, num_experts
from headstart.formats.symbols import text_config
from headstart.tools.plan.shape import MLP, Attention, Head, Layers, Shape

Config = Mapping[str, Any]

KERNELS = {"full": 7, "latent": 12, "chosen": 18, "compressed": 24, "recurrent": 10, "dense": 4, "experts": 10}
"""Kernels that one layer of a kind launches in today's engines, fused where that is usual; streams add three."""
STREAM_KERNELS = 3


def shape_of(name: str, config: Config, *, weights: str = "bf16") -> Shape:
    """Raises ModelError naming a missing key."""
    config = text_config(config)
    try:
        return _shape(name, config, weights)
    except KeyError as error:
        hint = "plan needs the sizes that a config.json names"
        raise ModelError(f"{name}: its config has no {error.args[0]}", hint) from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{name}: a size in its config is not a number: {error}") from error


def _shape(name: str, config: Config, weights: str) -> Shape:
    num_layers = int(config["num_hidden_layers"])
    mixers = attention_layers(config, num_layers)
    feeds = [feed_forward(config, dense=index < dense_layers(config)) for index in range(num_layers)]
    groups = Counter(zip(mixers, feeds, strict=True))
    hidden, vocab = int(config["hidden_size"]), int(config["vocab_size"])
    promised = declared(config).modules
    head = Head(
        block=Layers(1, head_attention(config, mixers), feeds[-1]),
        projection=2 * hidden * hidden,
        draft_vocab=vocab,
        assumed=not promised,
    )
    return Shape(
        name=name,
        hidden=hidden,
        vocab=vocab,
        tied=bool(config.get("tie_word_embeddings", False)),
        layers=tuple(Layers(count, mixer, feed) for (mixer, feed), count in groups.items()),
        head=head,
        weights=weights,
        max_length=config.get("max_position_embeddings"),
        notes=() if promised else ("the model has no MTP head: one block like its own last one is assumed",),
    )


def head_attention(config: Config, mixers: list[Attention]) -> Attention:
    """The head's block attends as the last full layer does; where the cache is compressed, in the window only."""
    if config.get("compress_ratios"):
        return compressed(config, 0)
    return next((mixer for mixer in reversed(mixers) if not mixer.state), mixers[-1])


def attention_layers(config: Config, num_layers: int) -> list[Attention]:
    """One for each layer."""
    if config.get("compress_ratios"):
        return [compressed(config, int(ratio)) for ratio in config["compress_ratios"]][:num_layers]
    if config.get("kv_lora_rank"):
        return [latent(config)] * num_layers
    kinds = list(config.get("layer_types") or ())[:num_layers]
    every = int(config.get("full_attention_interval") or 0)
    if not kinds and config.get("linear_num_value_heads") and every:
        kinds = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(num_layers)]
    return [_mixer(config, kind) for kind in kinds or ["full_attention"] * num_layers]


def _mixer(config: Config, kind: str) -> Attention:
    if kind == "linear_attention":
        return recurrent(config)
    return grouped(config, int(config["sliding_window"]) if "sliding" in kind else 0)


def grouped(config: Config, window: int) -> Attention:
    """Query heads over fewer key and value heads. Beside recurrent layers the output is gated: q is twice as wide."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    size = int(config.get("head_dim") or hidden // heads)
    gated = bool(config.get("attn_output_gate", config.get("linear_num_value_heads") is not None))
    return Attention(
        weights=hidden * size * (heads * (2 if gated else 1) + 2 * kv_heads + heads),
        kernels=KERNELS["full"],
        width=2 * kv_heads * size,
        work=2 * heads * size,
        window=window,
        stride=0 if window else 1,
        splits=kv_heads,
    )


def latent(config: Config) -> Attention:
    """Multi-head latent attention, absorbed (DeepSeek-V2 report, section 2.1): one vector per position for all heads;
    with `index_topk` a small indexer chooses positions (DeepSeek-V3.2 report)."""
    hidden, heads, rank = (int(config[key]) for key in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
    rope, nope, value = (int(config[key]) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    query = int(config.get("q_lora_rank") or 0)
    q_weights = (hidden + heads * (nope + rope)) * query if query else hidden * heads * (nope + rope)
    weights = q_weights + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    top = config.get("index_topk")
    index_heads, index_size = int(config.get("index_n_heads") or 0), int(config.get("index_head_dim") or 0)
    if top:
        weights += (query or hidden) * index_heads * index_size + hidden * (index_size + index_heads)
    return Attention(
        weights=weights,
        kernels=KERNELS["chosen" if top else "latent"],
        width=rank + rope,
        work=heads * (2 * rank + rope),
        top=int(top) if top else None,
        index_width=index_size if top else 0,
        index_work=index_heads * index_size if top else 0,
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


def dense_layers(config: Config) -> int:
    """Layers before the first one with experts."""
    return int(config.get("first_k_dense_replace") or 0) if num_experts(config) else int(config["num_hidden_layers"])


def feed_forward(config: Config, *, dense: bool) -> MLP:
    """Gate, up and down projection; experts have them each."""
    hidden = int(config["hidden_size"])
    extra = STREAM_KERNELS if config.get("hc_mult") else 0
    if dense:
        return MLP(weights=3 * hidden * int(config["intermediate_size"]), kernels=KERNELS["dense"] + extra)
    inner, experts = int(config.get("moe_intermediate_size") or config["intermediate_size"]), num_experts(config)
    shared = int(config.get("shared_expert_intermediate_size") or int(config.get("n_shared_experts") or 0) * inner)
    return MLP(
        weights=hidden * (3 * shared + experts),
        kernels=KERNELS["experts"] + extra,
        experts=experts,
        active=int(config["num_experts_per_tok"]),
        expert_weights=3 * hidden * inner,
    )
