"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention (DSA).

Each layer, the MTP module too, has an indexer that chooses the positions a row attends to (layers/indexer.py). Formula:
transformers 5.23 `models/deepseek_v32`; MTP module: vLLM 0.32, `models/deepseek_v32`.
"""

from headstart.heads.base import HeadSpec
from headstart.layers.build import DecoderConfig
from headstart.models import _latent, keys
from headstart.models.base import Family
from headstart.models.keys import Config
from headstart.models.mtp import MTPLayout, XllmDraft


def parse(config: Config) -> DecoderConfig:
    if (kinds := config.get("layer_types")) is not None:
        keys.check_kinds(kinds, keys.num_layers(config), ("indexed_attention",))
    return _latent.parse(config)


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 163840, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
        "n_shared_experts": 1, "first_k_dense_replace": 3, "num_experts_per_tok": 8, "index_topk": 2048,
        "index_n_heads": 64, "index_head_dim": 128,
    },
    harmless=_latent.HARMLESS,
    head=HeadSpec(),
    mtp=MTPLayout(
        title="DeepSeek-V3.2",
        xllm=XllmDraft(architecture="DeepseekV32MtpForCausalLM", fp8_blocks=True, sparse_indexer=True),
        llama_cpp=("deepseek32",),
    ),
    aliases=("deepseek32",),
    small={
        "model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"], **_latent.SMALL, **_latent.INDEXED,
    },
    scratch={**_latent.SCRATCH, **_latent.SCRATCH_INDEXED},
)  # fmt: skip
