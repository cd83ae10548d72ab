"""`headstart graft`: copies the MTP head of one checkpoint into another that lost it, or removes a head."""

import re
import time
from collections.abc import Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from headstart import machine
from headstart._download import sha256_of
from headstart.config import EngineConfig
from headstart.core import Progress, Report, no_progress
from headstart.errors import HeadstartError, ModelError, UsageError
from headstart.files import write_atomic
from headstart.formats import open_checkpoint
from headstart.formats.base import Checkpoint, Tensor
from headstart.formats.json_object import read_object
from headstart.formats.quantization import StoredWeights, settings_of
from headstart.formats.safetensors import Planned, copied
from headstart.formats.safetensors_file import INDEX, SINGLE
from headstart.models.families import is_known
from headstart.models.mtp import declared
from headstart.stats import DraftStats
from headstart.tools.export.heads import can_be_quantized, head_keys, head_names, trunk_prefix, with_keys, without_head
from headstart.tools.export.module import CODES, make_plain
from headstart.tools.export.plan import Plan, Wrote, as_json, check_sources, check_target, index_text, write_plan
from headstart.tools.export.source import inner_files, open_directory, other_weights, side_files
from headstart.tools.graft.describe import check_method, describe, fp8_blocks, keys_for, modelopt_of, modelopt_text
from headstart.tools.graft.fit import check_fit
from headstart.tools.options import GraftOptions
from headstart.tools.prompts import builtin_prompts, measure_acceptance
from headstart.version import __version__
from headstart.wording import LEAVE_OUT

HEAD_FILE = "model-mtp.safetensors"
PAIR = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
PROVENANCE = "headstart-graft.json"
MAX_TOKENS = 48
PAYS, DEAD = 1.4, 1.05
"""Acceptance lengths: from PAYS on, a head saves time on CPUs; below DEAD, it predicts almost nothing."""


def run(options: GraftOptions, progress: Progress = no_progress) -> Report:
    """Writes the checkpoint atomically, then measures acceptance. Raises UsageError, ModelError or CapacityError."""
    if options.strip == (options.base is not None):
        wrong = "--strip and --from are both given" if options.strip else "neither --from nor --strip is given"
        raise UsageError(wrong, "--from BASE puts a head in, --strip takes it out")
    if options.strip and options.quantize_head:
        raise UsageError("--quantize-head goes with --from", LEAVE_OUT)
    check_target(options.out, options.force)
    target = open_directory(options.model)
    base = open_directory(options.base) if options.base is not None else None
    check_sources(options.out, [each.path for each in (target, base) if each])
    plan = _strip(target) if base is None else _graft(target, base, options.quantize_head)
    size = write_plan(plan, options.out, progress)
    data = {"out": str(options.out), "bytes": size, "notes": plan.notes, **plan.data}
    lines = [f"{options.out}: {size / 1e6:.0f} MB, {plan.data['what']}", *(f"note: {note}" for note in plan.notes)]
    if base is not None:
        wanted = {"verdict": "acceptance not measured (--no-measure)"} if options.no_measure else None
        data["acceptance"] = acceptance = wanted or measure(options.out, progress)
        lines.append(acceptance["verdict"])
        provenance = {**read_object(options.out / PROVENANCE), "acceptance": dict(acceptance)}
        write_atomic(options.out / PROVENANCE, as_json(provenance) + "\n")
    return Report(True, data, lines)


def _strip(target: Checkpoint) -> Plan:
    names = head_names(target.tensors, target.config)
    if not names and not declared(target.config).modules:
        raise ModelError(f"{target.name} has no MTP head", "headstart inspect shows its content")
    data = {"what": f"{len(names)} tensors of the head left out", "tensors": len(names)}
    plan = Plan(metadata={"format": "pt"}, data=data, marks=(PROVENANCE,))
    _take_trunk(plan, target, names)
    plan.texts["config.json"] = as_json(without_head(target.config)) + "\n"
    _write_index(plan, target, names, {})
    plan.writers[PROVENANCE] = partial(_write_provenance, target, None, None, plan)
    return plan


def _graft(target: Checkpoint, base: Checkpoint, quantize: bool) -> Plan:
    here, there = (head_names(each.tensors, each.config) for each in (target, base))
    if not there:
        raise ModelError(f"{base.name} has no MTP head to take", "give --from the original model")
    if len(here) >= len(there):
        raise ModelError(f"{target.name} already has a head: {len(here)} tensors", "to replace it, use --strip first")
    if quantize:
        check_method(settings_of(target.config) or modelopt_of(target.path))
    notes = check_fit(target, base)
    planned, config, more = _head(target, base, _renamed(target, base, there), quantize)
    data = {"what": f"{len(planned)} tensors of the head of {base.name} added", "tensors": len(planned)}
    plan = Plan(metadata={"format": "pt"}, notes=[*notes, *more], data=data, marks=(PROVENANCE,))
    if here:
        plan.notes.append(f"{len(here)} tensors of an incomplete head were replaced")
    _take_trunk(plan, target, here)
    plan.texts |= modelopt_text(target.path, [each.name for each in planned])
    for name in plan.texts:
        plan.copies.pop(name, None)
    head_file = _make_room(plan)
    plan.tensors[head_file] = planned
    plan.texts["config.json"] = as_json(config) + "\n"
    _write_index(plan, target, here, dict.fromkeys((each.name for each in planned), head_file))
    plan.writers[PROVENANCE] = partial(_write_provenance, target, base, head_file, plan)
    return plan


def _renamed(target: Checkpoint, base: Checkpoint, names: set[str]) -> dict[str, str]:
    """Returns {name in base: name in target} of the head's tensors; prefixes of layers differ in text-only models."""
    ours, theirs = trunk_prefix(target.tensors), trunk_prefix(base.tensors)
    return {name: re.sub(rf"^{re.escape(theirs)}layers\.", f"{ours}layers.", name) for name in sorted(names)}


def _head(
    target: Checkpoint, base: Checkpoint, new: Mapping[str, str], quantize: bool
) -> tuple[list[Planned], dict[str, Any], list[str]]:
    tensors = base.tensors
    config = with_keys(target.config, keys_for(target.config, base.config))
    weights = StoredWeights(tensors, base.config)
    head = [stored for stored in weights.stored.values() if stored.main.name in new]
    quantized = any(weights.look(stored)[0] or stored.main.dtype in CODES for stored in head)
    if quantized and _alike(settings_of(target.config), settings_of(base.config)):
        return [copied(name, tensors[old]) for old, name in new.items()], config, []
    plain = make_plain(new, weights)
    notes = list(plain.notes)
    if plain.converted:
        notes.append(f"{len(plain.converted)} quantized tensors of the head were converted to bfloat16")
    planned = plain.planned
    if quantize:
        floats = {name: tensors[old] for old, name in new.items() if old not in plain.converted}
        planned = []
        for each in plain.planned:
            fits = each.name in floats and len(each.shape) == 2 and can_be_quantized(each.name)
            planned += fp8_blocks(each.name, floats[each.name]) if fits else [each]
    return planned, describe(config, target, planned, quantize, notes), notes


def _alike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    keys = ("quant_method", "weight_block_size", "bits", "group_size", "config_groups", "quant_algo")
    return bool(ours) and all(ours.get(key) == theirs.get(key) for key in keys)


def _take_trunk(plan: Plan, target: Checkpoint, head: set[str]) -> None:
    """Adds the target's files to the plan: files without head tensors as links, others rewritten without them."""
    of_file: dict[Path, list[Tensor]] = {}
    for stored in target.tensors.values():
        of_file.setdefault(stored.file, []).append(stored)
    for file, tensors in of_file.items():
        left = [each for each in tensors if each.name not in head]
        if len(left) == len(tensors):
            plan.links[file.name] = file
        elif left:
            plan.tensors[file.name] = [copied(each.name, each) for each in left]
    own = ("config.json", INDEX, PROVENANCE)
    plan.copies = {name: path for name, path in side_files(target.path).items() if name not in own}
    inner, left_out = inner_files(target.path)
    plan.copies |= inner
    if other := [*other_weights(target.path), *left_out]:
        plan.notes.append(f"weights in other formats were left out: {', '.join(other)}")
    if plan.links:
        shared = f"weight files that may share their bytes with {target.name}: {len(plan.links)}"
        plan.notes.append(f"{shared}; replace such a file instead of editing it, or both models change")


def _make_room(plan: Plan) -> str:
    """Returns the head's file name. Renames a single model.safetensors: its readers ignore all other files."""
    if SINGLE in plan.links:
        plan.links[PAIR[0]] = plan.links.pop(SINGLE)
        return PAIR[1]
    if SINGLE in plan.tensors:
        plan.tensors[PAIR[0]] = plan.tensors.pop(SINGLE)
        return PAIR[1]
    taken = plan.links.keys() | plan.tensors.keys()
    return next(name for name in (HEAD_FILE, "model-mtp-2.safetensors", "mtp-head.safetensors") if name not in taken)


def _write_index(plan: Plan, target: Checkpoint, head: set[str], added: Mapping[str, str]) -> None:
    """Adds an index to the plan if there is more than one file."""
    files = plan.links.keys() | plan.tensors.keys()
    if files == {SINGLE}:
        return
    renamed = {SINGLE: PAIR[0]} if SINGLE not in files else {}
    kept = [each for each in target.tensors.values() if each.name not in head]
    trunk = {each.name: renamed.get(each.file.name, each.file.name) for each in kept}
    total = sum(each.nbytes for each in kept)
    total += sum(each.nbytes for tensors in plan.tensors.values() for each in tensors if each.name in added)
    plan.texts[INDEX] = index_text(dict(sorted({**trunk, **added}.items())), total) + "\n"


def _write_provenance(
    target: Checkpoint, base: Checkpoint | None, head_file: str | None, plan: Plan, path: Path, wrote: Wrote
) -> None:
    """Writes the JSON file of provenance. `base` and `head_file` are None if the head was removed."""
    head: dict[str, Any] = {"head": None}
    if base and head_file:
        keys = {".".join(where): value for where, value in head_keys(base.config).items()}
        digest = sha256_of(path.with_name(head_file))
        head = {"head": _origin(base), "head_file": head_file, "head_sha256": digest, "config_keys": keys}
    files = (str(each.relative_to(path.parent)) for each in path.parent.rglob("*") if each.is_file())
    document = {
        "made_by": f"headstart {__version__}", "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": sorted({path.name, *files}), "trunk": _origin(target), **head, "head_tensors": plan.data["tensors"],
        "notes": plan.notes,
    }  # fmt: skip
    path.write_text(as_json(document) + "\n", "utf-8")


def _origin(directory: Checkpoint) -> dict[str, Any]:
    digest = sha256_of(directory.path / "config.json")
    return {"name": directory.name, "model_type": directory.config.get("model_type"), "config_sha256": digest}


def measure(model: Path, progress: Progress) -> dict[str, Any]:
    """Measures acceptance on the built-in prompts. Returns the counts and a `verdict`; only a verdict if the model
    cannot run here or does not fit the memory."""
    model_type = str(read_object(model / "config.json").get("model_type"))
    if not is_known(model_type):
        return {"verdict": f"acceptance not measured: {model_type} does not run here; measure it in the engine you use"}
    from headstart.engine.load import memory_needed

    needed, free = memory_needed(open_checkpoint(model)), machine.memory().available
    if needed > free:
        needs = f"the whole model is loaded for it, about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        return {"verdict": f"acceptance not measured: {needs}; headstart inspect --deep measures it elsewhere"}
    progress(0, len(builtin_prompts()), f"measuring acceptance, which takes about {needed / 1e9:.1f} GB of memory")
    try:
        stats = _draft(str(model), progress)
    except HeadstartError as error:
        return {"verdict": f"acceptance not measured: {error.message}"}
    length = stats.acceptance_length
    saved = 1 - stats.passes / max(stats.emitted, 1)
    if length < DEAD:
        verdict = "the graft does not help: almost no draft is accepted; train a head (headstart train)"
    elif length < PAYS:
        verdict = f"the graft helps little: it saves {saved:.0%} of the passes; headstart train --finetune may help"
    else:
        verdict = f"the graft helps: it saves {saved:.0%} of the passes"
    return {"verdict": f"acceptance length {length:.2f}: {verdict}", "passes_saved": saved, **stats.document("mtp")}


def _draft(model: str, progress: Progress) -> DraftStats:
    from headstart.api import LLM  # the engine is loaded only when there is something to measure

    finished, number = count(1), len(builtin_prompts())
    llm = LLM(model, EngineConfig(drafter="mtp", depth=3))
    return measure_acceptance(llm, MAX_TOKENS, lambda: progress(next(finished), number, "measuring acceptance"))
