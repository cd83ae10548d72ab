"""What GLM and DeepSeek have in common: MTP modules that are layers after the trunk's, experts chosen by sigmoids."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from headstart.errors import ModelError
from headstart.kernels.ops import RawTensor, RouterSpec
from headstart.layers.build import DecoderConfig
from headstart.layers.moe import MoEConfig
from headstart.models._family import Config, block_shapes

TRAILING_NAMES: Mapping[str, str | None] = {
    "enorm": "norm_embedding",
    "hnorm": "norm_hidden",
    "eh_proj": "projection",
    "shared_head.norm": "norm",
    "shared_head.head": None,  # copies of the trunk's
    "embed_tokens": None,
}
"""Parts of an MTP module that is layer N of its checkpoint (DeepSeek's names) -> canonical; others are its block's."""


def trailing_modules(tensors: Mapping[str, RawTensor], num_layers: int) -> dict[str, RawTensor]:
    """Tensors of layers N, N + 1, ... become those of MTP modules 0, 1, ..."""
    found = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(\w+)", name)
        if not match or int(match[1]) < num_layers:
            found[name] = tensor
        elif (part := TRAILING_NAMES.get(match[2], f"block.{match[2]}")) is not None:
            found[f"mtp.{int(match[1]) - num_layers}.{part}.{match[3]}"] = tensor
    return found


def trailing_shapes(prefix: str, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of an MTP module that is a layer of its checkpoint, without the copies."""
    hidden = config.hidden_size
    norms = {f"{prefix}.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    return {**norms, f"{prefix}.eh_proj.weight": (hidden, 2 * hidden), **block_shapes(prefix, config)}


SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "expert_gating_func": (2,),  # llama.cpp's number of the sigmoid
}
"""Keys of config.json that name variants -> the ones that are served."""


def sigmoid_moe(config: Config, *, scale: float, groups: tuple[int, int], dense: int) -> MoEConfig:
    """The experts of a config. Keyword arguments: what Hugging Face takes where the config says nothing. ModelError
    names a variant that is not served, or sizes that contradict each other."""
    for key, served in SUPPORTED.items():
        if config.get(key, served[0]) not in served:
            raise ModelError(f"config.json: {key} is {config[key]!r}, which is not supported", f"known: {served[0]!r}")
    try:
        router = RouterSpec(
            num_experts=int(config.get("n_routed_experts") or config["num_experts"]),
            top_k=int(config["num_experts_per_tok"]),
            scoring="sigmoid",
            normalize=bool(config.get("norm_topk_prob", True)),
            scale=float(config.get("routed_scaling_factor", scale)),
            num_groups=int(config.get("n_group") or groups[0]),
            top_groups=int(config.get("topk_group") or groups[1]),
        )
        inner = int(config["moe_intermediate_size"])
        shared = inner * int(config.get("n_shared_experts") or 0)
        first = int(config.get("first_k_dense_replace", dense))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"config.json: {error} is missing or not a number") from None
    _check_router(router)
    return MoEConfig(router=router, inner=inner, shared=shared, bias=True, dense=frozenset(range(first)))


def _check_router(router: RouterSpec) -> None:
    count, groups = router.num_experts, router.num_groups
    if min(count, router.top_k, groups, router.top_groups) < 1 or count % groups or router.top_groups > groups:
        raise ModelError(f"config.json: {count} experts do not make {groups} groups of which {router.top_groups} count")
    if router.top_k > count // groups * router.top_groups:
        raise ModelError(
            f"config.json: a token cannot take {router.top_k} of {count // groups * router.top_groups} experts"
        )


def mtp_recycle(config: Config) -> Literal["post_norm", "pre_norm"]:
    """Which vector the MTP module recycles, where config.json says so (`mtp_recycle`); else after its norm."""
    found = config.get("mtp_recycle", "post_norm")
    if found not in ("post_norm", "pre_norm"):
        raise ModelError(f"config.json: mtp_recycle is {found!r}", "known: post_norm, pre_norm")
    return "pre_norm" if found == "pre_norm" else "post_norm"
