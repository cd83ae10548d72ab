"""Builds a ModelShape from a built-in card, a checkpoint's tensor headers or a config.json, by its family."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headstart import hub
from headstart.core import Report
from headstart.errors import ModelError, UsageError, did_you_mean
from headstart.files import user_path
from headstart.formats import open_described
from headstart.formats.base import Checkpoint, Tensor
from headstart.formats.json_object import read_object, read_packaged
from headstart.formats.sizes import Sizes, as_size, text_config
from headstart.formats.tensor_parts import part_of
from headstart.heads.files import read_head
from headstart.heads.kind import head_kind
from headstart.heads.published import MARK
from headstart.layers.build import DecoderConfig
from headstart.layers.costs import num_elements
from headstart.models.base import Family
from headstart.models.classify import MODEL, MTP, DrafterKind, classify, classify_path
from headstart.models.families import read_any, with_sizes
from headstart.models.shipped_heads import choose_head, heads_in_package, shipped_heads
from headstart.tools.plan.drafters import acceptances_of_lengths, as_block, draft_model, from_config, from_head
from headstart.tools.plan.shape import (
    GGUF,
    DrafterShape,
    LayerGroup,
    ModelShape,
    Part,
    SizedModel,
    Split,
    cache_bytes,
    declared_format,
    kv_bytes,
    weight_format,
)

AVAILABLE_CONTEXT = 8192  # positions of the sequence in the memory estimate of `available`
LIKELY_BYTES = (0.2, 4.6)
"""Plausible range of bytes per weight. Values outside mean that the tensors do not match the config."""
MAX_LAYERS, MAX_EXPERTS = 4096, 2**16
CARDS: Mapping[str, Any] = read_packaged("headstart.tools.plan", "cards.json")
"""Name of a model -> card: config, acceptance lengths and sources, without weights."""
PART_OF: Mapping[str, Part] = {
    "experts": "experts", "mtp": "head", "lm_head": "lm_head", "embedding": "embedding", "norms and rest": "mlp",
}  # fmt: skip
CARD_NAMES = [name for name, card in CARDS.items() if "config" in card]
CARD_OF = {alias: name for name in CARD_NAMES for alias in (name, *CARDS[name]["aliases"])}
"""Name or alias of a card with a config -> its name."""


def find_shape(name: str | None, weights: str | None = None) -> ModelShape:
    """Returns a model's shape by card, alias, path or Hub id, in format `weights`. Raises UsageError or ModelError."""
    if weights is not None:
        weight_format(weights)
    if name in CARD_OF:
        card = CARDS[CARD_OF[name]]
        shape = with_acceptance(shape_of(CARD_OF[name], card["config"], weights=card["weights"]), CARD_OF[name])
        shape = shape.with_notes(f"shape of {CARD_OF[name]}: {card['source']}")
    else:
        shape = from_model(name)
    return shape if weights is None else replace(shape, weight_format=weights, bytes_per_weight={})


def shape_of(name: str, config: Mapping[str, Any], *, weights: str = "bf16") -> ModelShape:
    """Returns the shape of a config.json. Raises ModelError for a missing key or an impossible size."""
    text = with_sizes(text_config(config))
    _check_sizes(name, text)
    try:
        family, sizes, note = read_any(config)
    except ModelError as error:
        raise ModelError(f"{name}: {error.message}", error.hint) from error
    cost = sizes.cost()
    shape = ModelShape(
        name=name, hidden_size=sizes.hidden_size, vocab_size=sizes.vocab_size, tied=sizes.tied,
        layers=tuple(LayerGroup(count, layer) for layer, count in Counter(cost.layers).items()),
        drafter=_mtp_drafter(family, sizes), weight_format=weights, outer=cost.outer, embedding=cost.embedding,
        max_length=as_size(text.get("max_position_embeddings")) or None,
    )  # fmt: skip
    return shape.with_notes(note) if note else shape


def _check_sizes(name: str, config: Mapping[str, Any]) -> None:
    bounds = {"num_hidden_layers": MAX_LAYERS, "num_layers": MAX_LAYERS, "num_attention_heads": 2**16}
    bounds |= {"hidden_size": 2**24, "vocab_size": 2**28}
    for key, limit in bounds.items():
        if key in config and not 1 <= (as_size(config[key]) or 0) <= limit:
            what = f"{name}: {key} in its config is {config[key]!r}, which is not a valid size"
            raise ModelError(what, f"a whole number from 1 to {limit}")
    if (num_experts := Sizes(config).get("experts") or 0) > MAX_EXPERTS:
        raise ModelError(f"{name}: its config has {num_experts} experts", f"at most {MAX_EXPERTS} are supported")


def _mtp_drafter(family: Family, sizes: DecoderConfig) -> DrafterShape:
    """Returns the MTP modules or the block drafter of a config. Without any, one module with a block of this trunk is
    assumed."""
    hidden, spec = sizes.hidden_size, family.head_of(sizes)
    layer = sizes.head_layer.cost(hidden)
    drafter = DrafterShape(
        kind="mtp", hidden_size=hidden, vocab_size=sizes.vocab_size, layers=(LayerGroup(1, layer),),
        projection=2 * hidden * hidden, assumed=True,
    )  # fmt: skip
    if spec is None:
        return drafter
    if spec.block:
        layers = (LayerGroup(spec.block.num_layers, layer),)
        return as_block(replace(drafter, layers=layers, assumed=False), spec)
    modules = spec.num_modules
    total, lm_heads = num_elements(head_kind(spec.kind).shapes(spec, hidden)), modules * spec.own_lm_head * hidden
    projection = (total - lm_heads) // modules - layer.weights
    return replace(drafter, projection=projection, num_modules=modules, own_vocab=lm_heads, assumed=False)


def with_acceptance(shape: ModelShape, name: str) -> ModelShape:
    """Returns the shape with the acceptance lengths of card `name`, if that card has some."""
    if not (known := CARDS.get(name, {}).get("acceptance")):
        return shape
    return replace(shape, acceptance=acceptances_of_lengths(known["lengths"]), acceptance_source=known["source"])


def from_model(name: str | None) -> ModelShape:
    """Returns the shape of a checkpoint, from config and tensor headers."""
    if name and not (hub.is_builtin(name) or user_path(name).exists() or hub.is_repo(name)):
        raise _unknown(name)
    name, checkpoint = name or hub.DEFAULT_MODEL, open_described(name)
    if not checkpoint.tensors:
        return _from_config(checkpoint.name, checkpoint.config)
    shape = from_checkpoint(checkpoint, name)
    if shape.drafter.assumed and (head := choose_head(shipped_heads(checkpoint))) is not None:
        shape = from_head(shape, read_head(head), head.name)
    return with_acceptance(shape, name)


def _unknown(name: str) -> UsageError:
    known = f"cards: {', '.join(CARD_NAMES)}; else a directory, a .gguf file or a repo id"
    return UsageError(f"unknown model {name!r}", f"{did_you_mean(name.lower(), CARD_OF)} {known}".lstrip())


def _refuse(name: str, drafter: DrafterKind) -> None:
    if drafter.separate:
        what = f"{name} is a drafter ({drafter.title}), not a complete model"
        raise UsageError(what, f"headstart plan MODEL --head {name}")


def _from_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    _refuse(name, classify(config))
    declared = declared_format(config)
    note = f"shape of {name}: its config.json; no weights were looked at, format {declared}"
    return shape_of(name, config, weights=declared).with_notes(note)


def from_checkpoint(checkpoint: Checkpoint, name: str) -> ModelShape:
    """Returns a checkpoint's shape: sizes by config, bytes by headers. Raises UsageError for a drafter."""
    _refuse(name, classify(checkpoint.config, checkpoint.tensors))
    types = Counter[str]()
    for tensor in checkpoint.tensors.values():
        types[tensor.dtype] += tensor.nbytes
    declared = declared_format(checkpoint.config)
    main = max(types, key=lambda kind: types[kind])
    config = {"tie_word_embeddings": "lm_head.weight" not in checkpoint.tensors, **checkpoint.config}
    shape = shape_of(name, config, weights=main.lower() if main.lower() in GGUF else declared)
    measured, unlikely = measured_bytes(shape, checkpoint.tensors)
    notes = [f"shape of {name}: config and tensor headers of {checkpoint.path.name}; {main} for the most part"]
    fallback = f"do not match the config's sizes; format {shape.weight_format}"
    notes += [f"the tensors of {part} {fallback}" for part in unlikely]
    notes += undescribed_kinds(shape, checkpoint.tensors)
    return replace(shape, bytes_per_weight=measured).with_notes(*notes)


def sized_model(name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> SizedModel:
    """Returns the model of a config.json, in its declared format or with the bytes of `tensors`. Raises ModelError."""
    shape = shape_of(name, config, weights=declared_format(config))
    if tensors:
        shape = replace(shape, bytes_per_weight=measured_bytes(shape, tensors)[0])
    return SizedModel(shape=shape, kv=kv_bytes("bf16"))


def undescribed_kinds(shape: ModelShape, tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns notes on kinds of layers that tensor names reveal but the metadata (mostly of GGUF files) omits."""
    mixers = [group.cost.mixer for group in shape.layers]
    recurrent = any(mixer.state for mixer in mixers)
    latent = any(mixer.kv_width and mixer.splits == 1 for mixer in mixers)
    hidden = ["recurrent"] if not recurrent and any("ssm" in name or "linear_attn" in name for name in tensors) else []
    hidden += ["latent"] if not latent and any("kv_a" in name for name in tensors) else []
    why = "attention that its metadata does not describe: its cache is overestimated; use a card or a config.json"
    return [f"the file has {kind} {why}" for kind in hidden]


def measured_bytes(shape: ModelShape, tensors: Mapping[str, Tensor]) -> tuple[dict[Part, float], list[Part]]:
    """Returns (bytes per weight by part, parts whose tensors do not match the shape)."""
    totals: Counter[Part] = Counter()
    for name, tensor in tensors.items():
        if (part := _part(name, shape)) is not None:
            totals[part] += tensor.nbytes
    if "lm_head" not in totals:
        totals["lm_head"] = totals["embedding"]
    sizes = {part: totals[part] / count for part, count in shape.parameters().items() if count and totals[part]}
    unlikely = [part for part, size in sizes.items() if not LIKELY_BYTES[0] < size < LIKELY_BYTES[1]]
    return {part: size for part, size in sizes.items() if part not in unlikely}, unlikely


def _part(name: str, shape: ModelShape) -> Part | None:
    where = part_of(name, shape.num_layers)
    if where == "layers":
        return "attention" if "attn" in name else "mlp"
    return PART_OF.get(where)


def with_head(shape: ModelShape, name: str, kind: str | None = None) -> ModelShape:
    """Returns the shape with a drafter: a card, model, directory or repo id. Raises UsageError or ModelError."""
    path = user_path(name)
    if kind == "draft_model" or name in CARD_OF:
        return draft_model(shape, find_shape(name))
    if (path / "config.json").is_file() and MARK in read_object(path / "config.json"):
        return from_head(shape, read_head(path), path.name)
    drafter = classify_path(name)
    if drafter.kind == MODEL or (drafter.kind == MTP and drafter.format is None):
        return draft_model(shape, find_shape(name))
    if drafter.hidden_size not in (None, shape.hidden_size):
        what = f"--head {name} is made for a hidden size of {drafter.hidden_size}, {shape.name} has {shape.hidden_size}"
        raise UsageError(what, "give a drafter of this model")
    config = read_object(path / "config.json" if path.is_dir() else hub.config_file(name))
    return from_config(shape, drafter, name, config)


def available() -> Report:
    """Reports published models with their own heads: size and memory in bytes, kind of drafter, gain; and the models
    that this package has heads for."""
    packaged = list(dict.fromkeys(each.trunk for each in heads_in_package()))
    models = [_available(name) for name in hub.published_models()]
    return Report(True, {"default": hub.DEFAULT_MODEL, "models": models, "with_packaged_head": packaged})


def _available(name: str) -> dict[str, Any]:
    shape, published = find_shape(name), hub.published_models()[name]
    model = SizedModel(shape=shape, kv=kv_bytes("bf16"))
    size = sum(model.weight_bytes().values())
    memory = round(size + cache_bytes(model, Split(device=0.0), AVAILABLE_CONTEXT))
    return {"name": name, **published, "bytes": round(size), "memory": memory, "drafts": shape.drafter.kind}
