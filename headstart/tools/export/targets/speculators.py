"""The layout of vllm-project/speculators, for EAGLE-3 heads, block drafters and Qwen's MTP modules.

Source: vllm-project/speculators `convert/mtp/converter.py`, `models/mtp`, `models/eagle3/config.py`; vLLM 0.32
`transformers_utils/configs/speculators` (it has no entry for "mtp").
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from headstart.errors import ModelError
from headstart.formats.base import Checkpoint
from headstart.formats.safetensors import Planned
from headstart.formats.sizes import text_config
from headstart.heads.eagle3 import TAPS
from headstart.heads.layouts.writing import as_speculators, speculators_config
from headstart.layers.decoder import tapped_layers
from headstart.models.families import family_named, mtp_families
from headstart.tools.draft_depth import GPU_DEPTH
from headstart.tools.export.blocks import block_plan
from headstart.tools.export.module import ModulePlace, architectures, count_modules, cut_module, find_module
from headstart.tools.export.plan import Plan, single_file
from headstart.tools.export.source import ExportRequest, ExportSource
from headstart.tools.export.targets.vllm_eagle3 import USE as SERVE_BESIDE, published_files

MODULE = "mtp.0."  # canonical prefix; speculators uses MiMo's names for the parts of a module
LAYER = "layers.0."
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
SERVE = "vllm serve {out}"
FINETUNE = "speculators: MTPDraftModel.from_pretrained('{path}')"
NORMS = ("norm_before_fc", "fc_norm", "norm_output")  # keys of EAGLE-3.1
OUTSIDE = (
    "architectures", "model_type", "headstart", TAPS, "target_hidden_size",
    "eagle_config", "transformer_layer_config", "speculators_model_type", "speculators_config", *NORMS,
)  # fmt: skip


def plan(request: ExportRequest) -> Plan:
    """Plans the directory. Raises ModelError for a head whose formula no class of speculators computes."""
    if request.has_own_head:
        source = request.source("eagle3")
        return block_plan(source, as_speculators, SERVE) if source.head.spec.block else _eagle3(source)
    return _mtp(request.directory)


def _container(kind: str, name: str, architecture: list[str]) -> dict[str, Any]:
    described = speculators_config(kind, GPU_DEPTH, name, architecture)
    return {"speculators_model_type": kind, "speculators_config": described, "tie_word_embeddings": False}


def _eagle3(source: ExportSource) -> Plan:
    if source.head.spec.kind != "eagle3":
        raise ModelError(
            f"the head {source.head_path} is of kind {source.head.spec.kind}: speculators has no class for this one "
            "(its MTP layers are Qwen's, with norms of q and k)",
            "headstart train --kind eagle3 makes a head that goes; an MTP head goes with --to vllm-mimo",
        )
    (document, files), head = published_files(source), source.head
    trunk = source.checkpoint.path
    verifier = str(trunk.resolve()) if trunk.is_dir() else source.name
    flat = {**document, **(document.get("eagle_config") or {}), **(document.get("transformer_layer_config") or {})}
    inner = {key: value for key, value in flat.items() if key not in OUTSIDE}
    taps = list(tapped_layers(head.spec.tap))
    config = {
        "architectures": ["Eagle3Speculator"],
        **_container("eagle3", verifier, architectures(source.checkpoint.config)),
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": source.sizes.hidden_size,
        "norm_before_residual": head.spec.norm_before_residual,
        **{key: flat[key] for key in NORMS if key in flat},
        **({TAPS: taps} if taps else {}),
        "transformer_layer_config": {**inner, "model_type": "qwen3" if inner.get("model_type") == "qwen3" else "llama"},
    }
    plan = single_file([replace(each, name=re.sub(r"^midlayer\.", LAYER, each.name)) for each in files], config, SERVE)
    if not trunk.is_dir():
        plan.use = SERVE_BESIDE
        plan.notes.append(f"the verifier it names, {verifier}, is a GGUF file: give vLLM that model as safetensors")
    return plan


def _mtp(source: Checkpoint) -> Plan:
    inner = text_config(source.config)
    model_type = str(inner.get("model_type"))
    place = find_module(inner, model_type)
    if place is None or model_type not in place.layout.speculators:
        hint = f"it has for {', '.join(kind for layout in mtp_families().values() for kind in layout.speculators)}"
        raise ModelError(f"speculators has no MTP layer for {model_type!r}", hint)
    cut = cut_module(source, place, modules=count_modules(place, several=True))
    planned = _fused([replace(each, name=_renamed(place, each.name)) for each in cut.planned])
    shared = {key: value for key, value in inner.items() if key not in ("quantization_config", "text_config")}
    config = {"architectures": ["MTPDraftModel"], **_container("mtp", source.name, architectures(source.config))}
    config |= {"num_nextn_predict_layers": 1, "transformer_layer_config": shared}
    plan = single_file(planned, config, FINETUNE)
    plan.notes += cut.notes
    plan.notes.append("vLLM 0.32 does not load this container for MTP; it reads the module out of the model itself")
    return plan


def _renamed(place: ModulePlace, name: str) -> str:
    rest = str(place.inside(name))
    if rest.startswith(LAYER):
        return f"mtp_layers.0.{rest.removeprefix(LAYER)}"
    ours = str(place.family.names.canonical(name))
    if not ours.startswith(MODULE):
        raise ModelError(f"{name} belongs to a second MTP layer, but speculators has one")
    return family_named("mimo").names.theirs(ours).removeprefix("model.")


def _fused(planned: Sequence[Planned]) -> list[Planned]:
    """Stacks the experts' tensors: gate_up_proj [experts, 2 * inner, hidden], down_proj [experts, hidden, inner]."""
    stacked: list[Planned] = []
    experts: dict[tuple[str, int, str], Planned] = {}
    for each in planned:
        if match := EXPERT.fullmatch(each.name):
            experts[match[1], int(match[2]), match[3]] = each
        else:
            stacked.append(each)
    for prefix in dict.fromkeys(prefix for prefix, _, _ in experts):
        count = 1 + max(number for where, number, _ in experts if where == prefix)
        for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            keys = [(prefix, number, part) for number in range(count) for part in parts]
            if absent := [key for key in keys if key not in experts]:
                raise ModelError(f"expert {absent[0][1]} of {prefix} has no {absent[0][2]}_proj", "is a shard missing?")
            stacked.append(_stacked(f"{prefix}.{name}", [experts[key] for key in keys], count))
    return stacked


def _stacked(name: str, parts: Sequence[Planned], count: int) -> Planned:
    rows, columns = parts[0].shape
    if any(each.shape != (rows, columns) or each.dtype != parts[0].dtype for each in parts):
        raise ModelError(f"the experts of {name} differ in shape or type")

    def pieces() -> Iterator[Any]:
        for part in parts:
            yield from part.pieces()

    return Planned(name, parts[0].dtype, (count, rows * len(parts) // count, columns), pieces)


EXPORT = plan
