"""MiMo-7B: a Qwen2 trunk with native MTP layers (`model.mtp_layers.{i}`), hidden state first in the concat.

Formula: vLLM 0.32 `model_executor/models/mimo.py`, `mimo_mtp.py`: x = input_proj[hidden_layernorm(h) ;
token_layernorm(e)], h the trunk's stream before its final norm; a Qwen2 block, final_layernorm for the logits and for
recycling; the embedding of the first pair is masked.
"""

from __future__ import annotations

import re
from typing import Any

from headstart.layers.build import DecoderConfig, decoder
from headstart.layers.mtp import HeadSpec
from headstart.models._family import (
    Arrays,
    Config,
    Family,
    block_shapes,
    decoder_shapes,
    parse_decoder,
    random_arrays,
    tiny_config,
    without_prefix,
)

MTP_NAMES = {
    "token_layernorm": "norm_embedding",
    "hidden_layernorm": "norm_hidden",
    "input_proj": "projection",
    "final_layernorm": "norm",
}


def parse(config: Config) -> DecoderConfig:
    bias = bool(config.get("attention_bias", True))
    return parse_decoder(config, qkv_bias=bias, num_mtp=int(config.get("num_nextn_predict_layers") or 0))


def canonical(name: str) -> str | None:
    match = re.fullmatch(r"model\.mtp_layers\.(\d+)\.(\w+)\.(.*)", name)
    if not match:
        return without_prefix(name)
    index, part, rest = match.groups()
    return f"mtp.{index}.{MTP_NAMES[part]}.{rest}" if part in MTP_NAMES else f"mtp.{index}.block.{part}.{rest}"


def tiny(**changes: Any) -> tuple[dict[str, Any], Arrays]:
    defaults = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    config = tiny_config(**{**defaults, **changes})
    sizes = parse(config)
    shapes, hidden, prefix = decoder_shapes(sizes), sizes.hidden_size, "model.mtp_layers.0"
    shapes |= {f"{prefix}.{n}.weight": (hidden,) for n in MTP_NAMES if n.endswith("norm")}
    shapes |= {f"{prefix}.input_proj.weight": (hidden, 2 * hidden)} | block_shapes(prefix, sizes)
    return config, random_arrays(shapes)


FAMILY = Family(
    parse=parse,
    canonical=canonical,
    build=decoder,
    tiny=tiny,
    head=HeadSpec(hidden_first=True, mask_first=True, tap="pre_norm"),
    scratch={"tie_word_embeddings": False},
)
