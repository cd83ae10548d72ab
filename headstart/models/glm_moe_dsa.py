"""GLM-5, 5.1, 5.2: DeepSeek-V3.2's layers, some sharing an indexer.

A `shared` layer has no indexer and attends to the positions that the last `full` layer before it has chosen (arXiv
2603.12201); the MTP module has its own. Formula: transformers 5.23 `models/glm_moe_dsa`; GGUF names: llama.cpp b11434,
`glm-dsa`.
"""

from dataclasses import replace

from headstart.errors import ModelError
from headstart.heads.base import HeadSpec
from headstart.layers.build import DecoderConfig
from headstart.layers.mla import MLAConfig
from headstart.models import _latent, deepseek_v32, keys
from headstart.models.base import Family
from headstart.models.keys import Config, number
from headstart.models.mtp import MTPLayout, XllmDraft

FULL, SHARED = "full", "shared"
LETTERS = {"F": FULL, "S": SHARED}


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, {"moe_router_dtype": "float32"})
    decoder, layers = deepseek_v32.parse(config), []
    for layer, source in zip(decoder.layers, indexer_sources(config), strict=True):
        assert isinstance(layer.mixer, MLAConfig)
        layers.append(replace(layer, mixer=layer.mixer.sharing(source)))
    return replace(decoder, layers=tuple(layers))


def indexer_sources(config: Config) -> list[int | None]:
    """For each layer, the earlier layer whose selection it uses; None for a layer with an indexer."""
    kinds = _indexer_kinds(config)
    owners = [i for i, kind in enumerate(kinds) if kind == FULL]
    return [None if kind == FULL else max(j for j in owners if j < i) for i, kind in enumerate(kinds)]


def _indexer_kinds(config: Config) -> list[str]:
    """FULL (has an indexer) or SHARED for each layer: from `indexer_types`, else from the letters of
    `index_topk_pattern`, else each `index_topk_freq`th layer from an offset on is FULL."""
    count, kinds = keys.num_layers(config), config.get("indexer_types")
    every = number(config, "index_topk_freq", default=1)
    offset = number(config, "index_skip_topk_offset", default=2, least=0)
    if (pattern := config.get("index_topk_pattern")) is not None and kinds is None:
        kinds = [LETTERS.get(letter, letter) for letter in pattern] if isinstance(pattern, str | list) else pattern
    if kinds is None:
        kinds = [FULL if max(i - offset + 1, 0) % every == 0 else SHARED for i in range(count)]
    if isinstance(kinds, bool):  # of all layers of a GGUF file
        kinds = [kinds] * count
    if isinstance(kinds, list):  # GGUF files say whether a layer is full
        kinds = [each if isinstance(each, str) else FULL if each else SHARED for each in kinds]
    if not isinstance(kinds, list) or len(kinds) < count or kinds[0] != FULL:
        raise ModelError(f"config.json: indexer_types must name {count} layers, the first of them {FULL}")
    keys.check_kinds(kinds[:count], count, (FULL, SHARED))  # some files name the MTP module's too, which has its own
    return kinds[:count]


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5, "n_group": 1,
        "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 3, "num_experts_per_tok": 8,
        "index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128, "indexer_rope_interleave": True,
    },
    harmless={
        **_latent.HARMLESS, "index_share_for_mtp_iteration": "of drafts: here every draft step chooses for itself",
    },
    head=HeadSpec(),
    mtp=MTPLayout(
        title="GLM-5, 5.1, 5.2",
        xllm=XllmDraft(architecture="GlmMoeDsaMtpForCausalLM", sparse_indexer=True),
        llama_cpp=("glm-dsa",),
    ),
    aliases=("glm-dsa",),
    small={
        "model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"], **_latent.SMALL, **_latent.INDEXED,
        "n_group": 1, "topk_group": 1, "indexer_types": [FULL, SHARED, FULL], "indexer_rope_interleave": True,
    },
    scratch={**_latent.SCRATCH, **_latent.SCRATCH_INDEXED, "index_topk_freq": 2},
)  # fmt: skip
