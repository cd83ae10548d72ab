"""ERNIE 4.5 with experts (21B-A3B, 300B-A47B).

Formula: transformers 5.23 `models/ernie4_5_moe`. MTP module: vLLM 0.32 `ernie_mtp.py`: e first, the embedding of the
first pair masked, a dense block and no final norm: LM head and next draft step read the block's output. Its rope is
assumed to be the trunk's. GGUF files hold no module.
"""

from dataclasses import replace

from headstart.heads.base import HeadSpec
from headstart.kernels.ops import RawTensor
from headstart.layers.build import DecoderConfig
from headstart.layers.moe import MoEConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag, number
from headstart.models.mtp import MTPLayout
from headstart.models.names import PREFIXES, Names
from headstart.models.small import SCRATCH_EXPERTS, Arrays

SERVED = {"use_bias": False, "use_rmsnorm": True, "moe_gate": "topk", "moe_use_aux_free": True}
BIAS = ".mlp.gate.e_score_correction_bias"


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, SERVED)
    mixer, count = keys.attention(config), keys.num_layers(config)
    first = number(config, "moe_layer_start_index", "first_k_dense_replace", default=1, least=0)
    last = number(config, "moe_layer_end_index", default=-1, least=-1)
    every = number(config, "moe_layer_interval", "interleave_moe_layer_step", default=1)
    sparse = [(i + 1) % every == 0 and first <= i <= (count - 1 if last == -1 else last) for i in range(count)]
    dense = keys.layer(config, mixer, keys.mlp(config))
    experts = keys.layer(config, mixer, _experts(config)) if any(sparse) else dense
    layers, tied = [experts if each else dense for each in sparse], flag(config, "tie_word_embeddings", True)
    return keys.decoder(config, layers, mtp_layer=dense, tied=tied)


def _experts(config: Config) -> MoEConfig:
    """The experts. Multimodal models have lists of numbers; the first is for text."""
    named = {
        "num_experts": number(config, "moe_num_experts", "num_experts", needs="a mixture of experts"),
        "num_experts_per_tok": number(config, "moe_k", "num_experts_per_tok", default=6),
        "norm_topk_prob": True,
    }
    shared = number(config, "moe_num_shared_experts", "n_shared_experts", default=2, least=0)
    experts = keys.softmax_experts(keys.inside(config, named))
    return replace(experts, bias=True, shared=shared * experts.inner)


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: the router's selection bias has shape [1, experts] in Hugging Face's files."""
    return {
        name: tensor.shaped(tensor.shape[-1]) if name.endswith(BIAS) and tensor.shape[:-1] == (1,) else tensor
        for name, tensor in tensors.items()
    }


def restore(arrays: Arrays, config: DecoderConfig) -> Arrays:
    return {name: array[None] if name.endswith(BIAS) else array for name, array in arrays.items()}


NAMES = Names(
    {
        **PREFIXES,
        "model.mtp_emb_norm.{i}.": "mtp.{i}.norm_embedding.",
        "model.mtp_hidden_norm.{i}.": "mtp.{i}.norm_hidden.",
        "model.mtp_linear_proj.{i}.": "mtp.{i}.projection.",
        "model.mtp_block.{i}.": "mtp.{i}.block.",
    },
    parts={".mlp.moe_statics.e_score_correction_bias": BIAS},
)
FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 131072, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "moe_intermediate_size": 1536,
    },
    harmless={
        **dict.fromkeys(("moe_capacity", "moe_norm_min", "moe_aux_loss_lambda", "multi_token_pred_lambda"), "training"),
        **dict.fromkeys(
            ("moe_num_experts", "num_experts", "moe_k", "num_experts_per_tok", "moe_intermediate_size",
             "moe_num_shared_experts", "n_shared_experts"),
            "used only by experts",
        ),
        "shared_expert_intermediate_size": "of a GGUF file, whose converter divides another width",
    },
    names=NAMES,
    adapt=adapt,
    restore=restore,
    head=HeadSpec(mask_first=True, recycle="pre_norm", output_norm=False),
    mtp=MTPLayout(title="ERNIE-4.5 MoE", not_llama_cpp="its converter drops the module"),
    interleaved_files=True,
    aliases=("ernie4_5-moe",),
    small={
        "model_type": "ernie4_5_moe", "architectures": ["Ernie4_5_MoeForCausalLM"], "tie_word_embeddings": True,
        "intermediate_size": 96,  # of which llama.cpp's converter makes the width of shared experts
        "moe_num_experts": 7, "moe_k": 3, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
        "moe_intermediate_size": 24, "num_nextn_predict_layers": 1,
    },
    scratch={"moe_intermediate_size": SCRATCH_EXPERTS["moe_intermediate_size"], "moe_num_experts": 8, "moe_k": 2},
)  # fmt: skip
