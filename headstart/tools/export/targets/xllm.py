"""A draft checkpoint in the layout of xLLM's `tools/export_mtp.py`: the MTP module of a checkpoint on its own.

Names, config keys, files and bytes are those of that tool. Where it writes wrong data without a word, this says so and
writes right data, or refuses: quantized tensors it does not turn back, parts that are missing, shards that are not
there, files that would be read by mistake.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from headstart.errors import ModelError
from headstart.formats.base import Checkpoint, Tensor
from headstart.formats.json_object import read_object
from headstart.formats.safetensors_file import INDEX
from headstart.tools.export.detect import count_modules, detect_model_type, draft_config
from headstart.tools.export.drafts import DraftCheckpoint, draft_of
from headstart.tools.export.module import DESCRIPTION, cut_module, prefixes_of, rename, rest_of
from headstart.tools.export.plan import Plan, as_json, index_text
from headstart.tools.export.source import Request, other_weights, side_files

SHARD = "mtp_layer_parameters.safetensors"
USE = "xllm --model MODEL --draft_model {out} --num_speculative_tokens 1"


def plan(request: Request) -> Plan:
    """What to write. Raises ModelError for a checkpoint that has no module, not all of it, or not in this layout."""
    source = request.directory
    model_type = (request.model_type or detect_model_type(source.config)).lower()
    draft = draft_of(model_type)
    count = count_modules(source.config, draft)
    if "dspark_block_size" in source.config:
        raise ModelError(f"{source.name}: its mtp tensors are a DSpark drafter", "xLLM loads it from the model itself")
    cut = cut_module(source, draft)
    made = Plan(notes=[*cut.notes, *_notes(source, draft, cut.tensors)], use=USE, marks=(SHARD,))
    made.data = {"model_type": model_type}
    made.tensors = {SHARD: cut.planned}
    made.copies = side_files(source.path)
    made.texts = {
        "config.json": as_json(draft_config(source.config, model_type, draft, count), sort=True),
        INDEX: index_text({each.name: SHARD for each in cut.planned}, indent=4),
    }
    if DESCRIPTION in made.copies and not draft.several:
        description = read_object(source.path / DESCRIPTION)
        described = {rename(key, source.config, draft): value for key, value in description.items()}
        described.pop(None, None)
        made.texts[DESCRIPTION] = as_json(described, sort=True)
    for name in made.texts:
        made.copies.pop(name, None)
    return made


def _notes(source: Checkpoint, draft: DraftCheckpoint, tensors: Mapping[str, Tensor]) -> list[str]:
    notes = []
    rests = {rest_of(name, source.config, draft) for name in tensors}
    if "embed_tokens" in draft.parts:
        absent = [each for each in ("embed_tokens.weight", "shared_head.head.weight") if each not in rests]
        if absent and not draft.embedding:
            notes.append(f"the module has no {' and no '.join(absent)} of its own: the engine must share the model's")
    if later := _later_modules(source, draft):
        notes.append(f"only the first module is exported; {later[0]} belongs to another one")
    if other := other_weights(source.path):
        notes.append(f"weights in other formats were left out: {', '.join(other)}")
    return notes


def _later_modules(source: Checkpoint, draft: DraftCheckpoint) -> list[str]:
    """Tensors of a second module, which the draft has no room for."""
    for prefix in prefixes_of(source.config, draft):
        if match := re.fullmatch(r"(.*?)(\d+)\.", prefix):
            following = f"{match[1]}{int(match[2]) + 1}."
            return [name for name in source.tensors if name.startswith(following)]
    return []


EXPORT = plan
