"""GLM-4.7-Flash: DeepSeek-V3's layers in other sizes.

Formula: transformers 5.23 `models/glm4_moe_lite`; MTP module: vLLM 0.32 `glm4_moe_lite_mtp.py`. `mtp_recycle` as in
glm4_moe.
"""

from headstart.heads.base import HeadSpec
from headstart.layers.build import DecoderConfig
from headstart.models import _latent, keys
from headstart.models.base import Family
from headstart.models.keys import Config
from headstart.models.mtp import MTPLayout


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, {"partial_rotary_factor": 1.0})
    return _latent.parse(config)


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8, "n_group": 1,
        "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 4,
    },
    harmless=_latent.HARMLESS,
    head=HeadSpec(),
    mtp=MTPLayout(
        title="GLM-4.7-Flash", not_xllm="its module has latent attention, which xLLM's glm4_moe_mtp does not",
    ),
    small={
        "model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"], **_latent.SMALL, "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 1.8,
    },
    scratch=_latent.SCRATCH,
)  # fmt: skip
