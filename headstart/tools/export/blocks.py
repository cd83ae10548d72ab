"""Exports a block drafter to a directory in a published layout, from a head and the trunk it was trained on."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.base import NAME_OF
from headstart.formats.safetensors import Planned, bfloat16
from headstart.heads.base import BlockSpec
from headstart.heads.kind import HeadCheckpoint
from headstart.heads.layouts.writing import Written
from headstart.heads.published import Arrays
from headstart.kernels.ops import RawTensor
from headstart.tools.export.module import architectures
from headstart.tools.export.plan import Plan, single_file, vllm_use
from headstart.tools.export.source import Export, ExportSource

Write = Callable[[HeadCheckpoint, Arrays], Written]


def block_export(write: Write, method: str) -> Export:
    """Returns the EXPORT of a layout that vLLM runs with speculative method `method`."""
    return lambda request: block_plan(request.source("block"), write, vllm_use(method))


def block_plan(source: ExportSource, write: Write, use: str) -> Plan:
    """Plans a directory in bfloat16. Raises ModelError for another kind of head, or a feature that the layout lacks."""
    block, trunk = source.head.spec.block, source.checkpoint.path
    if block is None:
        hint = "headstart train --kind block makes one; others go with --to vllm-mimo or vllm-eagle3"
        raise ModelError(f"the head {source.head_path} is of kind {source.head.spec.kind}, not a block drafter", hint)
    name = str(trunk.resolve()) if trunk.is_dir() else source.name
    spec = replace(source.head.spec, block=replace(block, mask_embedding=False))
    head = replace(source.head, spec=spec, trunk=name, trunk_layers=source.sizes.num_layers)
    document, named = write(head, _tensors(source, block))
    if (verifier := document.get("speculators_config", {}).get("verifier")) is not None:
        verifier["architectures"] = architectures(source.checkpoint.config)
    document |= _of_trunk(document, source.checkpoint.config)
    planned = planned_tensors(named)
    plan = single_file(planned, document, use)
    if not trunk.is_dir():
        plan.notes.append(f"the trunk {source.name} is a GGUF file here: give the engine that model as safetensors")
    return plan


def _tensors(source: ExportSource, block: BlockSpec) -> dict[str, Any]:
    """Returns `head_tensors`, and the trunk's whole embedding if the mask token has its own vector, which is put into
    the mask's row."""
    tensors: dict[str, Any] = {**source.head_tensors}
    if mask := tensors.pop("mask_embedding", None):
        table = tensors.get("embed_tokens.weight", source.tensors["embed_tokens.weight"]).float32().copy()
        table[block.mask_token_id] = mask.float32()
        tensors["embed_tokens.weight"] = table
    return tensors


def _of_trunk(document: Mapping[str, Any], trunk: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config keys of context length and special tokens, which engines compare with the target's."""
    length = trunk.get("max_position_embeddings")
    inner = document.get("transformer_layer_config")
    if inner is not None:
        return {"transformer_layer_config": {**inner, **({"max_position_embeddings": length} if length else {})}}
    found = {key: trunk.get(key) for key in ("bos_token_id", "eos_token_id", "max_position_embeddings")}
    return {key: value for key, value in found.items() if value is not None}


def planned_tensors(named: Mapping[str, RawTensor | NDArray[Any]]) -> list[Planned]:
    """Returns the tensors of a file by name: maps of the draft vocabulary as they are, others in bfloat16."""
    return [_planned(name, each) for name, each in named.items()]


def _planned(name: str, tensor: RawTensor | NDArray[Any]) -> Planned:
    if isinstance(tensor, np.ndarray) and tensor.dtype != np.float32:  # maps of the draft vocabulary
        return Planned(name, NAME_OF[tensor.dtype], tensor.shape, lambda: [np.ascontiguousarray(tensor)])
    values = (lambda: tensor) if isinstance(tensor, np.ndarray) else tensor.float32
    return Planned(name, "BF16", tuple(tensor.shape), lambda: [bfloat16(values())[0]])
