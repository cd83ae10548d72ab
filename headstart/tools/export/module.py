"""The MTP module of a checkpoint on its own: found, checked to be whole, and turned back where it is quantized."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from headstart.errors import ModelError
from headstart.formats.base import Checkpoint, Tensor
from headstart.formats.mtp_families import num_experts
from headstart.formats.quantization import AGAIN, Weights
from headstart.formats.safetensors import Planned
from headstart.tools.export.detect import count_modules, nested, positive
from headstart.tools.export.drafts import DraftCheckpoint
from headstart.tools.export.plain import make_plain

DESCRIPTION = "quant_model_description.json"
ROTATION = {"rot.weight": "model.rot.weight"}


class Cut(NamedTuple):
    """The tensors of a module: `tensors` under the checkpoint's names, `planned` as they are to be written."""

    tensors: Mapping[str, Tensor]
    planned: list[Planned]
    notes: list[str]


def cut_module(source: Checkpoint, draft: DraftCheckpoint) -> Cut:
    """Find the module, check that it is whole, and turn quantized tensors back. Raises ModelError."""
    names = {name: new for name in source.tensors if (new := rename(name, source.config, draft))}
    own = {name: rest for name in names if (rest := rest_of(name, source.config, draft)) is not None}
    if not own:
        prefixes = " or ".join(prefixes_of(source.config, draft))
        raise ModelError(f"{source.name} holds no tensors under {prefixes}", "headstart inspect says which are there")
    weights = Weights(source.tensors, source.config)
    held = [stored.name for stored in weights.stored.values() if stored.main.name in own]
    _check_whole(source, draft, {str(rest_of(name, source.config, draft)) for name in held})
    for name in _borrowed_twice(names):
        del names[name]
    described = (source.path / DESCRIPTION).exists()  # then the engine reads scales by it
    plain = make_plain(names, weights, described)
    if plain.converted and not (draft.fp8_blocks and all(name.endswith("_scale_inv") for name in plain.scales)):
        plain.notes.append(
            f"{len(plain.converted)} quantized tensors were turned into bfloat16; export_mtp.py copies them without "
            "their scales"
        )
    return Cut({name: source.tensors[name] for name in names}, plain.planned, plain.notes)


def prefixes_of(config: Mapping[str, Any], draft: DraftCheckpoint) -> tuple[str, ...]:
    layers = config.get("num_hidden_layers", nested(config).get("num_hidden_layers"))
    if any("{n}" in prefix for prefix in draft.prefixes) and not positive(layers):
        raise ModelError(f"config.json: num_hidden_layers is {layers!r}", "the module is the layer after the last")
    return tuple(prefix.format(n=layers) for prefix in draft.prefixes)


def rest_of(name: str, config: Mapping[str, Any], draft: DraftCheckpoint) -> str | None:
    """The name inside the module; None for a tensor of the trunk."""
    return next((name.removeprefix(each) for each in prefixes_of(config, draft) if name.startswith(each)), None)


def rename(name: str, config: Mapping[str, Any], draft: DraftCheckpoint) -> str | None:
    """The name in the draft; None for what is left behind."""
    if name in (*draft.embedding, *draft.lm_head):
        return name
    if not draft.several and name in ROTATION:
        return ROTATION[name]
    rest = rest_of(name, config, draft)
    if rest is None or draft.block is None:
        return None if rest is None else name
    for part, new in draft.parts.items():
        if rest == part or rest.startswith(f"{part}."):
            return new + rest.removeprefix(part)
    return draft.block + rest


def _borrowed_twice(names: Mapping[str, str]) -> list[str]:
    """Tensors of the trunk for which the module has its own."""
    taken: dict[str, list[str]] = {}
    for name, new in names.items():
        taken.setdefault(new, []).append(name)
    twice = [name for group in taken.values() if len(group) > 1 for name in group]
    return [name for name in twice if not re.search(r"\.layers\.\d+\.", name)]


def _check_whole(source: Checkpoint, draft: DraftCheckpoint, rests: set[str]) -> None:
    if missing := [rest for rest in draft.needed if rest not in rests]:
        raise ModelError(f"{source.name}: the MTP module lacks {', '.join(missing)}", "download the model again")
    for layer in range(count_modules(source.config, draft) if draft.several else 0):
        if not any(rest.startswith(f"layers.{layer}.") for rest in rests):
            what = f"the MTP module has no decoder layer under layers.{layer}, which config.json promises"
            raise ModelError(f"{source.name}: {what}", "download the model again")
    if draft.shared_needed:
        _check_shared(source, draft)
    promised = num_experts(source.config)
    experts = {int(match[1]) for rest in rests if (match := re.search(r"\.experts\.(\d+)\.", rest))}
    absent = next((each for each in range(promised) if each not in experts), None)
    if experts and absent is not None:
        what = f"the MTP module has {len(experts)} of {promised} experts; {absent} is missing"
        raise ModelError(f"{source.name}: {what}", AGAIN)


def _check_shared(source: Checkpoint, draft: DraftCheckpoint) -> None:
    if not any(name in source.tensors for name in draft.embedding):
        raise ModelError(f"{source.name} has no embedding", f"looked for {', '.join(draft.embedding)}")
    tied = source.config.get("tie_word_embeddings") or nested(source.config).get("tie_word_embeddings")
    if not tied and not any(name in source.tensors for name in draft.lm_head):
        raise ModelError(f"{source.name} has no lm_head, and its embedding is not tied", "download it again")
