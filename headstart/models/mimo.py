"""MiMo-7B: Qwen2's layers.

Formula: vLLM 0.32 `model_executor/models/mimo.py`, `mimo_mtp.py`: x = input_proj[hidden_layernorm(h) ;
token_layernorm(e)], h the trunk's stream before its final norm; a Qwen2 block; final_layernorm for logits and
recycling; the embedding of the first pair is masked.
"""

from headstart.heads.base import HeadSpec
from headstart.layers.build import DecoderConfig
from headstart.models import keys, qwen2
from headstart.models.base import Family
from headstart.models.keys import Config, flag
from headstart.models.mtp import MTPLayout, XllmDraft
from headstart.models.names import PREFIXES, Names


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, {"use_mrope": False})
    mixer = {"qkv_bias": flag(config, "attention_bias", True)}
    module = keys.layer(config, keys.attention(config, **mixer), keys.mlp(config))
    return keys.stack(config, windows=keys.windows(config), mixer=mixer, mtp_layer=module)


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
    defaults=qwen2.FAMILY.defaults,
    names=NAMES,
    head=HeadSpec(hidden_first=True, mask_first=True, tap="pre_norm"),
    mtp=MTPLayout(
        title="MiMo-7B",
        xllm=XllmDraft(architecture="MiMoMtpForCausalLM"),
        not_llama_cpp="its converter does not know the type",
    ),
    small={"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
    scratch={"tie_word_embeddings": False},
)
