"""A draft checkpoint in the layout of xLLM's `tools/export_mtp.py`.

Names, config keys, files and bytes are the same as from that tool. Where the tool silently writes wrong data (quantized
tensors, missing parts or shards, stray files), this export writes correct data or refuses.
"""

import re
from collections.abc import Mapping
from typing import Any

from headstart.errors import ModelError
from headstart.formats.base import Checkpoint, Tensor, strip_wrapper
from headstart.formats.json_object import read_object
from headstart.formats.safetensors_file import INDEX
from headstart.formats.sizes import Sizes, as_size
from headstart.models.classify import mtp_modules
from headstart.models.families import find_mtp_family, mtp_families
from headstart.models.mtp import INDEXER_KEYS, XllmDraft
from headstart.tools.export.module import DESCRIPTION, ModulePlace, count_modules, cut_module, find_module
from headstart.tools.export.plan import Plan, as_json, index_text
from headstart.tools.export.source import ExportRequest, other_weights, side_files

SHARD = "mtp_layer_parameters.safetensors"
USE = "xllm --model MODEL --draft_model {out} --num_speculative_tokens {depth}"
ROTATION = {"rot.weight": "model.rot.weight"}
NESTED = "text_config"
BESIDE_BLOCK = ("embed_tokens", "shared_head", "eh_proj", "enorm", "hnorm")
"""First parts of names in a trailing module that do not belong to its decoder block."""


def plan(request: ExportRequest) -> Plan:
    """Plans the directory. Raises ModelError for a missing or incomplete module, or a model type that xLLM lacks."""
    source = request.directory
    place, draft = _find_draft(source, request.model_type)
    count = count_modules(place, several=draft.several)
    num_modules = count if draft.several else 1
    if draft.shared:
        _check_shared(source, place)

    def rename(name: str) -> str | None:
        return _renamed(name, place, draft)

    module = cut_module(source, place, rename, modules=num_modules)
    notes = [*module.notes, *_notes(source, place, draft, module.tensors)]
    made = Plan(notes=notes, use=USE, marks=(SHARD,), drafter=mtp_modules(num_modules))
    made.data = {"model_type": place.model_type}
    made.tensors = {SHARD: module.planned}
    made.copies = side_files(source.path)
    weight_map = {each.name: SHARD for each in module.planned}
    config = as_json(_draft_config(place, draft, count), sort=True)
    made.texts = {"config.json": config, INDEX: index_text(weight_map, indent=4)}
    if DESCRIPTION in made.copies and not draft.several:
        description = read_object(source.path / DESCRIPTION)
        described = {rename(key): value for key, value in description.items()}
        described.pop(None, None)
        made.texts[DESCRIPTION] = as_json(described, sort=True)
    for name in made.texts:
        made.copies.pop(name, None)
    return made


def _find_draft(source: Checkpoint, model_type: str | None) -> tuple[ModulePlace, XllmDraft]:
    found = find_mtp_family(source.config)
    if found and found.layout.not_xllm and (not model_type or found.layout.requires):
        raise ModelError(f"model type {found.key} cannot be written as a draft of xLLM", found.layout.not_xllm)
    place = find_module(source.config, model_type)
    if place is None or place.layout.xllm is None:
        known = ", ".join(key for key, layout in mtp_families().items() if layout.xllm)
        kind = model_type or source.config.get("model_type")
        raise ModelError(f"model type {kind!r} has no draft layout in xLLM", f"known are {known}")
    if model_type and found and found.layout.xllm:
        _check_variant(source, place, found.layout.xllm)
    return place, place.layout.xllm


def _check_variant(source: Checkpoint, place: ModulePlace, draft: XllmDraft) -> None:
    """Raises ModelError for a forced model type that is another variant (dense, experts) of the checkpoint's own."""
    own, forced = find_module(source.config), find_mtp_family({"model_type": place.model_type})
    is_variant = forced and forced.layout.xllm and draft.variants and forced.layout.xllm.variants == draft.variants
    if own and forced and is_variant and own.model_type != forced.key:
        what = f"--model-type {place.model_type}, but the tensors of {source.name} are those of {own.model_type}"
        raise ModelError(what, "leave --model-type out")


def _renamed(name: str, place: ModulePlace, draft: XllmDraft) -> str | None:
    """Returns a tensor's name in the draft; None for a tensor that is left out."""
    if draft.shared and place.family.names.canonical(name) in ("embed_tokens.weight", "lm_head.weight"):
        return name
    if not draft.several and name in ROTATION:
        return ROTATION[name]
    inside = place.inside(name)
    if inside is None or not (place.trailing or draft.as_layer):
        return None if inside is None else name
    beside = place.trailing and inside.split(".")[0] in BESIDE_BLOCK
    return f"model.{inside}" if beside else f"model.layers.0.{inside}"


def _check_shared(source: Checkpoint, place: ModulePlace) -> None:
    there = {place.family.names.canonical(name) for name in source.tensors}
    if "embed_tokens.weight" not in there:
        raise ModelError(f"{source.name} has no embedding", "is a shard missing? download it again")
    tied = source.config.get("tie_word_embeddings") or Sizes(source.config).config.get("tie_word_embeddings")
    if not tied and "lm_head.weight" not in there:
        raise ModelError(f"{source.name} has no lm_head, and its embedding is not tied", "download it again")


def _draft_config(place: ModulePlace, draft: XllmDraft, count: int) -> dict[str, Any]:
    config = place.config
    changes = {
        "num_hidden_layers": count, "num_nextn_predict_layers": count, "architectures": [draft.architecture],
        "model_type": f"{place.model_type.removesuffix('_text')}_mtp", "quantization_config": "",
        "first_k_dense_replace": 0, **_filled(draft.config, count),
        **(_sparse_indexer(config) if draft.sparse_indexer else {}),
    }  # fmt: skip
    written = {**config, **changes}
    if isinstance(nested := config.get(NESTED), dict) and nested:
        written[NESTED] = {**nested, **_filled(draft.nested_config, count)}
        if "quantization_config" in nested:
            written[NESTED]["quantization_config"] = ""
    return written


def _filled(declared: Mapping[str, object], count: int) -> dict[str, Any]:
    values = {key: count if value == "count" else value for key, value in declared.items()}
    return {key: value * count if isinstance(value, list) else value for key, value in values.items()}


def _sparse_indexer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config keys with which the draft computes its top-k rows once and shares them between its steps."""
    if not all(as_size(config.get(key)) for key in INDEXER_KEYS) or not config.get("index_share_for_mtp_iteration"):
        return {}
    every = config.get("index_topk_freq") or 1
    if not isinstance(every, int):
        raise ModelError(f"config.json: index_topk_freq is {every!r}, not a number of layers")
    changes: dict[str, Any] = {"index_share_for_mtp_iteration": True, "index_topk_freq": max(every, 2)}
    changes |= {"index_skip_topk_offset": 0, "index_topk_pattern": "S", "indexer_types": ["full"]}
    return {key: value for key, value in changes.items() if key in config}


def _notes(source: Checkpoint, place: ModulePlace, draft: XllmDraft, tensors: Mapping[str, Tensor]) -> list[str]:
    notes = []
    inside = {place.inside(name) for name in tensors}
    if place.trailing and not draft.shared:
        absent = [each for each in ("embed_tokens.weight", "shared_head.head.weight") if each not in inside]
        if absent:
            notes.append(f"the module has no {' and no '.join(absent)}: the engine must share the model's")
    if later := _later_modules(source, place):
        notes.append(f"only the first module is exported; {later[0]} belongs to another one")
    if other := other_weights(source.path):
        notes.append(f"weights in other formats were left out: {', '.join(other)}")
    return notes


def _later_modules(source: Checkpoint, place: ModulePlace) -> list[str]:
    """Returns the names of tensors of a second module, which the draft cannot contain."""
    if match := re.fullmatch(r"(.*?)(\d+)\.", place.prefix):
        following = f"{match[1]}{int(match[2]) + 1}."
        return [name for name in source.tensors if strip_wrapper(name).startswith(following)]
    return []


EXPORT = plan
