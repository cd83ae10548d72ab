"""MiMo-7B: a Qwen2 trunk with native MTP layers (`model.mtp_layers.{i}`), hidden state first in the concat.

Formula: vLLM 0.32 `model_executor/models/mimo.py`, `mimo_mtp.py`: x = input_proj[hidden_layernorm(h) ;
token_layernorm(e)], h the trunk's stream before its final norm; a Qwen2 block, final_layernorm for the logits and for
recycling; the embedding of the first pair is masked.
"""

from __future__ import annotations

from headstart.heads.base import HeadSpec
from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag
from headstart.models.names import PREFIXES, Names


def parse(config: Config) -> DecoderConfig:
    layer = keys.layer(config, keys.attention(config, qkv_bias=flag(config, "attention_bias", True)), keys.mlp(config))
    return keys.decoder(config, [layer] * keys.num_layers(config), num_mtp=keys.num_mtp(config))


NAMES = Names(
    {
        **PREFIXES,
        "model.mtp_layers.{i}.token_layernorm.": "mtp.{i}.norm_embedding.",
        "model.mtp_layers.{i}.hidden_layernorm.": "mtp.{i}.norm_hidden.",
        "model.mtp_layers.{i}.input_proj.": "mtp.{i}.projection.",
        "model.mtp_layers.{i}.final_layernorm.": "mtp.{i}.norm.",
        "model.mtp_layers.{i}.": "mtp.{i}.block.",
    }
)
FAMILY = Family(
    parse=parse,
    names=NAMES,
    head=HeadSpec(hidden_first=True, mask_first=True, tap="pre_norm"),
    small={"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
    scratch={"tie_word_embeddings": False},
)
