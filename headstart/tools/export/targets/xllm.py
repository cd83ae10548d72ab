"""A draft checkpoint in the layout of xLLM's `tools/export_mtp.py`: the MTP module of a checkpoint on its own.

Names, config keys, files and bytes are those of that tool. Where it writes wrong data without a word, this says so and
writes right data, or refuses: quantized tensors it does not turn back, parts that are missing, shards that are not
there, files that would be read by mistake.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headstart.errors import ModelError
from headstart.formats.base import Tensor
from headstart.formats.json_object import read_object
from headstart.formats.mtp_families import num_experts
from headstart.formats.quantization import AGAIN, Weights
from headstart.formats.safetensors import Planned
from headstart.formats.safetensors_file import INDEX
from headstart.tools.export.detect import count_modules, detect_model_type, draft_config, nested, positive
from headstart.tools.export.directory import Directory
from headstart.tools.export.layouts import Layout, layout_of
from headstart.tools.export.plain import make_plain
from headstart.tools.export.plan import Plan, as_json, index_text
from headstart.tools.export.source import Request

SHARD = "mtp_layer_parameters.safetensors"
DESCRIPTION = "quant_model_description.json"
ROTATION = {"rot.weight": "model.rot.weight"}
USE = "xllm --model MODEL --draft_model {out} --num_speculative_tokens 1"


def plan(request: Request) -> Plan:
    """What to write. Raises ModelError for a checkpoint that has no module, not all of it, or not in this layout."""
    source = request.directory
    model_type = (request.model_type or detect_model_type(source.config)).lower()
    layout = layout_of(model_type)
    count = count_modules(source.config, layout)
    if "dspark_block_size" in source.config:
        raise ModelError(f"{source.name}: its mtp tensors are a DSpark drafter", "xLLM loads it from the model itself")
    cut = cut_module(source, layout)
    made = Plan(notes=[*cut.notes, *_notes(source, layout, cut.tensors)], use=USE, data={"model_type": model_type})
    made.tensors = {SHARD: cut.planned}
    made.copies = source.side_files()
    made.texts = {
        "config.json": as_json(draft_config(source.config, layout, count), sort=True),
        INDEX: index_text({each.name: SHARD for each in cut.planned}, indent=4),
    }
    if DESCRIPTION in made.copies and not layout.several:
        described = {rename(key, source.config, layout): value for key, value in _description(source).items()}
        described.pop(None, None)
        made.texts[DESCRIPTION] = as_json(described, sort=True)
    for name in made.texts:
        made.copies.pop(name, None)
    return made


class Cut:
    """The tensors of a module: `tensors` under the checkpoint's names, `planned` as they are to be written."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.planned: list[Planned] = []
        self.notes: list[str] = []


def cut_module(source: Directory, layout: Layout) -> Cut:
    """Find the module, check that it is whole, and turn quantized tensors back. Raises ModelError."""
    names = {name: new for name in source.tensors if (new := rename(name, source.config, layout))}
    own = {name: rest for name in names if (rest := rest_of(name, source.config, layout)) is not None}
    if not own:
        prefixes = " or ".join(_prefixes(source.config, layout))
        raise ModelError(f"{source.name} holds no tensors under {prefixes}", "headstart inspect says which are there")
    weights = Weights(source.tensors, source.config)
    held = [stored.name for stored in weights.stored.values() if stored.main.name in own]
    _check_whole(source, layout, {str(rest_of(name, source.config, layout)) for name in held})
    for name in _borrowed_twice(names):
        del names[name]
    cut = Cut({name: source.tensors[name] for name in names})
    _write_plain(source, layout, names, weights, cut)
    return cut


def _prefixes(config: Mapping[str, Any], layout: Layout) -> tuple[str, ...]:
    layers = config.get("num_hidden_layers", nested(config).get("num_hidden_layers"))
    if any("{n}" in prefix for prefix in layout.prefixes) and not positive(layers):
        raise ModelError(f"config.json: num_hidden_layers is {layers!r}", "the module is the layer after the last")
    return tuple(prefix.format(n=layers) for prefix in layout.prefixes)


def rest_of(name: str, config: Mapping[str, Any], layout: Layout) -> str | None:
    """The name inside the module; None for a tensor of the trunk."""
    return next((name.removeprefix(each) for each in _prefixes(config, layout) if name.startswith(each)), None)


def rename(name: str, config: Mapping[str, Any], layout: Layout) -> str | None:
    """The name in the draft; None for what is left behind."""
    if name in (*layout.embedding, *layout.lm_head):
        return layout.shared_as.get(name, name)
    if not layout.several and name in ROTATION:
        return ROTATION[name]
    rest = rest_of(name, config, layout)
    if rest is None or layout.block is None:
        return None if rest is None else name
    for part, new in layout.parts.items():
        if rest == part or rest.startswith(f"{part}."):
            return new + rest.removeprefix(part)
    return layout.block + rest


def _borrowed_twice(names: Mapping[str, str]) -> list[str]:
    """Tensors of the trunk for which the module has its own."""
    taken: dict[str, list[str]] = {}
    for name, new in names.items():
        taken.setdefault(new, []).append(name)
    return [name for new, group in taken.items() if len(group) > 1 for name in group if _is_trunk(name)]


def _is_trunk(name: str) -> bool:
    return not re.search(r"\.layers\.\d+\.", name)


def _check_whole(source: Directory, layout: Layout, rests: set[str]) -> None:
    if missing := [rest for rest in layout.needed if rest not in rests]:
        raise ModelError(f"{source.name}: the MTP module lacks {', '.join(missing)}", "download the model again")
    if layout.several and not any(rest.startswith("layers.0.") for rest in rests):
        raise ModelError(f"{source.name}: the MTP module has no decoder layer under layers.0", "download it again")
    if layout.shared_needed:
        _check_shared(source, layout)
    promised = num_experts(source.config)
    experts = {int(match[1]) for rest in rests if (match := re.search(r"\.experts\.(\d+)\.", rest))}
    if experts and (absent := sorted(set(range(promised)) - experts)):
        raise ModelError(
            f"{source.name}: the MTP module has {len(experts)} of {promised} experts; {absent[0]} is missing",
            AGAIN,
        )


def _check_shared(source: Directory, layout: Layout) -> None:
    if not any(name in source.tensors for name in layout.embedding):
        raise ModelError(f"{source.name} has no embedding", f"looked for {', '.join(layout.embedding)}")
    tied = source.config.get("tie_word_embeddings") or nested(source.config).get("tie_word_embeddings")
    if not tied and not any(name in source.tensors for name in layout.lm_head):
        raise ModelError(f"{source.name} has no lm_head, and its embedding is not tied", "download it again")


def _write_plain(source: Directory, layout: Layout, names: Mapping[str, str], weights: Weights, cut: Cut) -> None:
    """Fill `cut.planned`."""
    described = (source.path / DESCRIPTION).exists()  # then the engine reads scales by it
    plain = make_plain(names, weights, described)
    cut.planned += plain.planned
    cut.notes += plain.notes
    if plain.converted and not (layout.fp8_blocks and all(name.endswith("_scale_inv") for name in plain.scales)):
        cut.notes.append(
            f"{len(plain.converted)} quantized tensors were turned into bfloat16; export_mtp.py copies them without "
            "their scales"
        )


def _description(source: Directory) -> dict[str, Any]:
    return read_object(source.path / DESCRIPTION)


def _notes(source: Directory, layout: Layout, tensors: Mapping[str, Tensor]) -> list[str]:
    notes = []
    rests = {rest_of(name, source.config, layout) for name in tensors}
    if "embed_tokens" in layout.parts:
        absent = [each for each in ("embed_tokens.weight", "shared_head.head.weight") if each not in rests]
        if absent and not layout.embedding:
            notes.append(f"the module has no {' and no '.join(absent)} of its own: the engine must share the model's")
    if later := _later_modules(source, layout):
        notes.append(f"only the first module is exported; {later[0]} belongs to another one")
    if other := source.other_weights():
        notes.append(f"weights in other formats were left out: {', '.join(other)}")
    return notes


def _later_modules(source: Directory, layout: Layout) -> list[str]:
    """Tensors of a second module, which the draft has no room for."""
    for prefix in _prefixes(source.config, layout):
        if match := re.fullmatch(r"(.*?)(\d+)\.", prefix):
            following = f"{match[1]}{int(match[2]) + 1}."
            return [name for name in source.tensors if name.startswith(following)]
    return []


EXPORT = plan
