"""`headstart inspect`: reports a checkpoint's contents from headers, and whether its heads are complete.

The heads that the config promises are compared with the tensors that are present, by name and shape: fine-tuning and
quantization tools often keep the config keys and drop the tensors. docs/inspect.md describes the document.
"""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headstart import hub
from headstart.core import Progress, Report, no_progress
from headstart.errors import ModelError, UsageError
from headstart.files import user_path
from headstart.formats import config_alone, find_checkpoint, no_checkpoint, pytorch_files
from headstart.formats.adapter import is_adapter
from headstart.formats.base import Checkpoint, widened
from headstart.formats.json_object import read_object
from headstart.formats.pickled import pickles_in, read_pickles
from headstart.formats.quantization import WeightHeader, settings_of, weight_headers
from headstart.formats.sizes import MAX_SIZE, SIZE_KEYS, lookup, text_config
from headstart.heads.layouts.gguf import with_published_names
from headstart.models.classify import classify
from headstart.models.families import with_sizes
from headstart.models.head_state import dead, misread, state_of
from headstart.models.native_heads import NativeHeads, examine
from headstart.models.shipped_heads import choose_head, shipped_heads
from headstart.models.tensors import check_trunk, find_family, find_vision, read_config
from headstart.params import recommended_names
from headstart.tools.inspect import deep
from headstart.tools.inspect.adapter import inspect_adapter
from headstart.tools.inspect.drafters import DrafterReport, FitCheck, describe_drafter, state_of_drafter
from headstart.tools.inspect.findings import Finding, Subject, findings, shared_tensors
from headstart.tools.inspect.fit import check_fit, check_native, check_whole, drafter_findings
from headstart.tools.inspect.render import lines
from headstart.tools.options import InspectOptions

SCHEMA = 1
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length")
SHOWN_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "n_routed_experts", "num_experts", "moe_intermediate_size", "vocab_size",
)  # fmt: skip
POSITIVE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
QUANTIZATION_KEYS = ("quant_method", "quant_algo", "format", "bits", "group_size", "weight_block_size", "fmt")
SPECULATION_KEYS = (
    "speculative_decoding", "speculation_type", "use_mtp", "num_assistant_tokens", "assistant_confidence_threshold",
    "assistant_early_exit", "prompt_lookup_num_tokens",
)  # fmt: skip


def run(options: InspectOptions, progress: Progress = no_progress) -> Report:
    """Describes a model and its heads. `ok` is false if promised heads are incomplete, a drafter does not fit its
    target, or a measured head is dead. Raises UsageError or ModelError."""
    name = options.model or hub.DEFAULT_MODEL
    with _no_collection():
        target = find_checkpoint(options.target, progress) if options.target else None
        if is_adapter(path := user_path(name)):
            if options.deep or options.head:
                what = f"--deep and --head are about heads, and {path} is a LoRA adapter"
                raise UsageError(what, f"headstart bench MODEL --lora NAME={path} measures acceptance with it")
            return inspect_adapter(path, target)
        checkpoint = _opened(name, progress)
        data = describe(checkpoint, target)
        data["here"] = None if data["drafter"] else runs_here(checkpoint)
    head = options.head
    if not head and not data["drafter"] and (shipped := choose_head(shipped_heads(checkpoint))):
        head = str(shipped)
    data["attached_head"] = describe_head(hub.resolve_head(head), checkpoint) if head else None
    if head and data["heads"]["verdict"] == "none":
        data["heads"] |= {"reason": f"{data['heads']['reason']}; a head of its own is attached", "fix": ""}
    data["deep"] = _deep(options, head, data, progress) if options.deep else None
    if data["deep"] and data["deep"].get("dead"):
        data["heads"] |= dead(data["deep"]["acceptance"]).document()
    elif data["deep"] and data["deep"].get("better"):
        data["heads"] |= misread(data["deep"]).document()
    fits = [fit["fits"] for fit in (data["fit"], (data["attached_head"] or {}).get("fit")) if fit]
    return Report(ok=not data["heads"]["broken"] and all(fits), data=data, lines=lines(data))


def _opened(name: str, progress: Progress) -> Checkpoint:
    """Opens a checkpoint or a head in a pickle. A directory with only a config.json gives a checkpoint without tensors.
    Raises ModelError or UsageError."""
    try:
        return find_checkpoint(name, progress)
    except ModelError:
        path = user_path(name)
        if not (path / "config.json").exists() or [*path.glob("*.safetensors"), *path.glob("*.gguf")]:
            raise
        promised = config_alone(path / "config.json", name)
        try:
            return _pickled(path) or promised
        except ModelError:
            if classify(promised.config).format is not None:
                raise
            return promised  # a whole model in a pickle of another kind


def _pickled(path: Path) -> Checkpoint | None:
    pickles = pickles_in(path)
    if not pickles or any(path.glob("*.safetensors")):
        return None
    config, tensors = read_object(path / "config.json"), read_pickles(pickles)
    if classify(config, tensors).format is None:  # of a whole model
        return None
    return Checkpoint(path, "pickle", config, tensors, False, name=str(path))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disables garbage collection while many thousands of small objects without cycles are created."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _deep(options: InspectOptions, head: str | None, data: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    whole = options.target is not None and data["heads"]["verdict"] == "none"
    if data["drafter"] is None and not whole:
        return deep.measure(options.model, head, progress)
    if options.target is None:
        return {"ran": False, "why": "measuring a drafter needs the model that it drafts for: give --target"}
    return deep.measure(options.target, options.model, progress)


def describe(checkpoint: Checkpoint, target: Checkpoint | None = None) -> dict[str, Any]:
    """Returns the JSON document of one checkpoint, from headers alone; with `target` also whether it fits the target.
    Raises ModelError for impossible sizes."""
    checkpoint = with_published_names(checkpoint)
    config = checkpoint.config
    _check_sizes(checkpoint)
    weights = weight_headers(checkpoint.tensors, config)
    published = classify(config, checkpoint.tensors).format
    if published is not None:
        return _describe_drafter(checkpoint, weights, describe_drafter(checkpoint, weights, published), target)
    heads = examine(checkpoint, weights)
    shared = shared_tensors(checkpoint, heads)
    checks = None
    if target:
        checks = check_native(heads, checkpoint, target) if heads.names else check_whole(checkpoint, target)
    layout = heads.layout
    verdict = {
        **state_of(heads, checkpoint).document(), "declared": heads.promised.modules, "declared_by": heads.promised.key,
        "modules": [asdict(module) for module in heads.modules], "extra": heads.extra,
        "embedding": shared.get("embedding"), "lm_head": shared.get("lm_head"), "norm": heads.norm if layout else None,
        "concat": heads.concat if layout else None,
    }  # fmt: skip
    remarks = findings(Subject(checkpoint, weights, heads, shared))
    return _document(checkpoint, weights, heads, verdict, remarks) | {"fit": _fit(target, checks)}


def _check_sizes(checkpoint: Checkpoint) -> None:
    """Raises ModelError unless all sizes of the config are whole numbers in range, or lists of them by layer."""
    config = text_config(checkpoint.config)
    for key in dict.fromkeys((*SHOWN_SIZES, *(key for keys in SIZE_KEYS.values() for key in keys))):
        value = lookup(config, key)
        least = 1 if key in POSITIVE and not isinstance(value, list) else 0  # a layer may have none
        for each in value if isinstance(value, list) else [value]:
            if each is not None and not (type(each) is int and least <= each < MAX_SIZE):
                raise ModelError(f"config of {checkpoint.name}: {key} is {value!r}, which is no size", f"correct {key}")


def _describe_drafter(
    checkpoint: Checkpoint, weights: Mapping[str, WeightHeader], drafter: DrafterReport, target: Checkpoint | None
) -> dict[str, Any]:
    checks = check_fit(drafter, checkpoint.config, target) if target else None
    state = state_of_drafter(drafter, checks)
    verdict = {
        **state.document(), "declared": drafter.num_modules, "declared_by": None,
        "modules": [asdict(module) for module in drafter.modules], "extra": [],
        **dict.fromkeys(("embedding", "lm_head", "norm", "concat")),
    }  # fmt: skip
    document = _document(checkpoint, weights, None, verdict, list(drafter_findings(checkpoint.config, target)))
    return document | {"drafter": drafter.document(), "fit": _fit(target, checks)}


def _document(
    checkpoint: Checkpoint, weights: Mapping[str, WeightHeader], heads: NativeHeads | None, verdict: dict[str, Any],
    remarks: list[Finding],
) -> dict[str, Any]:  # fmt: skip
    text, generation = with_sizes(text_config(checkpoint.config)), checkpoint.generation_config
    parts = heads.parts if heads else {"drafter": dict(weights)}
    quantization = settings_of(checkpoint.config)
    family = heads.found if heads else None
    return {
        "schema": SCHEMA,
        "model": checkpoint.name,
        "format": checkpoint.format,
        "files": len(checkpoint.files),
        "architecture": text.get("model_type"),
        "family": {"key": family.key, "title": family.layout.title} if family else None,
        "sizes": {key: text[key] for key in SHOWN_SIZES if text.get(key) is not None},
        "context_length": next((text[key] for key in LENGTH_KEYS if text.get(key)), None),
        "sampling": {name: generation[name] for name in recommended_names() if name in generation},
        "speculation": {key: generation[key] for key in SPECULATION_KEYS if generation.get(key) is not None},
        "quantization": {key: quantization[key] for key in QUANTIZATION_KEYS if quantization.get(key) is not None},
        "tied_embeddings": heads is not None and bool(weights) and "lm_head" not in parts,
        "parts": {part: summary(group.values()) for part, group in parts.items()},
        "total": summary(weights.values()),
        "heads": verdict,
        "findings": [finding._asdict() for finding in remarks],
        "drafter": None,
        "fit": None,
        "attached_head": None,
        "deep": None,
    }


def summary(weights: Iterable[WeightHeader]) -> dict[str, Any]:
    bytes_of: Counter[str] = Counter()
    parameters = 0
    for weight in weights:
        bytes_of[weight.kind] += weight.nbytes
        parameters += weight.parameters
    return {"parameters": parameters, "bytes": sum(bytes_of.values()), "types": dict(bytes_of.most_common())}


def _fit(target: Checkpoint | None, checks: list[FitCheck] | None) -> dict[str, Any] | None:
    if target is None or checks is None:
        return None
    fits = all(check.ok for check in checks)
    return {"target": target.name, "fits": fits, "checks": [asdict(check) for check in checks]}


def describe_head(path: Path, model: Checkpoint) -> dict[str, Any]:
    """Describes a separate head and whether it fits the model. Raises UsageError for a directory without a head."""
    from headstart.heads.files import read_head, read_if_head  # it needs more than headers do

    head = read_if_head(path) if path.is_dir() else read_head(path)
    if head is None:
        raise UsageError(f"--head {path} is not a head directory", f"look at it with `headstart inspect {path}`")
    checkpoint = _pickled(path) or find_checkpoint(path)
    published = classify(checkpoint.config, checkpoint.tensors).format
    assert published is not None  # it is a head
    weights = weight_headers(checkpoint.tensors, checkpoint.config)
    drafter = describe_drafter(checkpoint, weights, published)
    return {
        "path": str(path), "kind": head.spec.kind, "modules": head.spec.num_modules, "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size, "draft_vocab_size": head.draft_vocab_size,
        "trunk": head.trunk, **summary(weights.values()),
        "fit": _fit(model, check_fit(drafter, checkpoint.config, model)),
    }  # fmt: skip


def runs_here(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns whether headstart runs the checkpoint (`runs`, `why` not, `fix`; `max_length`: positions) and which types
    become float32 in memory (`widened`, with their bytes then; or None). `vision`: sizes of the vision tower, or `why`
    and `fix` if it is not used; absent without one."""
    types, size = widened(checkpoint.tensors.values())
    wide = {"types": types, "bytes": size} if types else None
    try:
        family = find_family(checkpoint)
        sizes = read_config(checkpoint, family)
        if checkpoint.tensors:  # not for a config alone
            if checkpoint.here or checkpoint.format == "gguf":
                checkpoint.load_tokenizer()
            check_trunk(checkpoint, family, sizes)
        if not checkpoint.tensors and pytorch_files(checkpoint.path):
            raise no_checkpoint(checkpoint.path)
    except ModelError as error:
        return {"runs": False, "why": error.message, "fix": error.hint, "widened": wide}
    vision: dict[str, Any] = {}
    try:
        if found := find_vision(checkpoint, family, sizes):
            vision = {"vision": {"layers": len(found.config.layers), "tokens": found.format.max_tokens}}
    except ModelError as error:
        vision = {"vision": {"why": error.message, "fix": error.hint}}
    return {"runs": True, "why": "", "fix": "", "max_length": sizes.max_length, "widened": wide, **vision}
