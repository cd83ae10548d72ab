"""DeepSeek-V3 and R1: latent attention, experts chosen by sigmoids in groups, MTP at layer N."""

from __future__ import annotations

from headstart.heads.base import HeadSpec
from headstart.models import _latent
from headstart.models.base import Family

FAMILY = Family(
    parse=_latent.parse,
    defaults={
        "max_position_embeddings": 4096,
        "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "num_experts_per_tok": 8,
    },
    harmless=_latent.HARMLESS,
    head=HeadSpec(),
    trailing=True,
    aliases=("deepseek2",),  # llama.cpp's, of GLM-4.7-Flash too
    small={"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], **_latent.SMALL},
    scratch=_latent.SCRATCH,
)  # fmt: skip
