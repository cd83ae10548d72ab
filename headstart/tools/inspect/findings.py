"""Remarks on checkpoints: copied tensors, quantization, norms, RoPE, per-layer lists, stray files, adapters.

Each function of ABOUT checks one topic.
"""

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from headstart.formats.adapter import CONFIG as ADAPTER_CONFIG, beside_model
from headstart.formats.base import Checkpoint, Tensor
from headstart.formats.quantization import WeightHeader, settings_of
from headstart.formats.sizes import NESTED, has_scaled_rope, lookup, text_config
from headstart.formats.tensor_parts import MTP, part_of
from headstart.models.native_heads import NativeHeads

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
_SAMPLES, _SAMPLE_BYTES = 16, 4096
_EXCLUDING = (
    "ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "disable_quant_module",
    "llm_int8_skip_modules",
)  # fmt: skip
_MAX_REPEATS = 4
_SMALL = re.compile(r"int[1-4]\b|FP4|4-bit|Q[1-4]_|IQ[1-4]|nf4")
_NORMS = {
    "w": "RMSNorm multiplies by w",
    "1+w": "RMSNorm multiplies by 1 + w: a converter that loads w as it is kills the head",
}


class Finding(NamedTuple):
    """One remark. A warning names a fault that makes heads slow, dead or refused by engines."""

    level: Literal["note", "warning"]
    topic: str
    text: str


note, warning = partial(Finding, "note"), partial(Finding, "warning")


@dataclass(frozen=True)
class Subject:
    checkpoint: Checkpoint
    weights: Mapping[str, WeightHeader]
    heads: NativeHeads
    shared: Mapping[str, str]  # result of shared_tensors

    @property
    def config(self) -> dict[str, Any]:
        return self.checkpoint.config


def findings(subject: Subject) -> list[Finding]:
    """All remarks on one checkpoint, in the order of ABOUT."""
    return [each for about in ABOUT for each in about(subject)]


def shared_tensors(checkpoint: Checkpoint, heads: NativeHeads) -> dict[str, str]:
    """Returns the origin of the heads' `embedding` and `lm_head`: "shared" (the trunk's tensor), "own", "copy" (equals
    the trunk's in sampled bytes), "changed" (a copy that differs from the trunk's) or "copy?" (unreadable)."""
    layout, parts = heads.layout, ("embedding", "lm_head")
    trunk = {part: next(iter(heads.parts.get(part, ())), "") for part in parts}
    shared: dict[str, str] = {}
    for what in parts if heads.names else ():
        name = heads.copies.get(what)
        if layout and what in layout.own:
            shared[what] = "own"
        else:
            shared[what] = "shared" if name is None else _same(checkpoint, name, trunk[what] or trunk["embedding"])
    return shared


def _same(checkpoint: Checkpoint, name: str, other: str) -> str:
    one, two = checkpoint.tensors.get(name), checkpoint.tensors.get(other)
    if one is None or two is None or (one.dtype, one.shape) != (two.dtype, two.shape):
        return "changed"
    if not (one.here and two.here):
        return "copy?"
    step = max(1, one.nbytes // _SAMPLES)
    same = all(_piece(one, at) == _piece(two, at) for at in range(0, one.nbytes, step))
    return "copy" if same else "changed"


def _piece(tensor: Tensor, begin: int) -> bytes:
    return tensor.read_bytes(begin, min(_SAMPLE_BYTES, tensor.nbytes - begin)).tobytes()


def _copies(subject: Subject) -> Iterator[Finding]:
    for what, how in subject.shared.items():
        if how == "changed":
            text = f"the head's {what} differs from the trunk's, but engines use the trunk's instead"
            yield warning("sharing", text)
        elif how in ("copy", "copy?"):
            sure = "" if how == "copy" else " (not compared)"
            yield note("sharing", f"the head's {what} is a copy of the trunk's{sure}; engines skip it")
        elif how == "own":
            yield note("sharing", f"the head has its own {what}: an export must keep it")


def _tied(subject: Subject) -> Iterator[Finding]:
    config = subject.config
    tied = bool(config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings", False)))
    stored = "lm_head" in subject.heads.parts
    if tied and stored:
        yield note("tied", "tie_word_embeddings is set, but an lm_head is stored: engines may ignore it")
    if not tied and not stored and subject.weights:
        yield note("tied", "no lm_head is stored: the embedding is used, although the config does not say so")


def _quantized(subject: Subject) -> Iterator[Finding]:
    weights = [subject.weights[name] for name in subject.heads.names.values()]
    head = [weight for weight in weights if weight.shape is None or len(weight.shape) > 1]
    packed = {weight.kind for weight in head if weight.quantized}
    blocks = [subject.heads.parts.get(part, {}) for part in ("layers", "experts")]
    trunk = {weight.kind for group in blocks for weight in group.values() if weight.quantized}
    text = f"the head is quantized ({', '.join(sorted(packed))})"
    if any(_SMALL.search(kind) for kind in packed):
        yield warning("quantization", f"{text}; 4-bit heads often accept far less")
    elif packed:
        yield note("quantization", text)
    elif head and trunk and subject.checkpoint.format == "safetensors" and not _excluded(subject):
        patterns = ", ".join(key for key in _EXCLUDING if key in settings_of(subject.config)) or "ignore"
        text = f"trunk {', '.join(sorted(trunk))}, head not quantized, but quantization_config does not leave it out"
        yield warning("quantization", f"{text}: engines may refuse or misread it; add its modules to {patterns}")


def _excluded(subject: Subject) -> bool:
    """Returns whether the quantization config excludes the heads' block, in the spelling of any method."""
    settings = settings_of(subject.config)
    if not settings:
        return True
    listed = [each for key in _EXCLUDING if isinstance(value := settings.get(key), list) for each in value]
    listed += [f"re:{key[2:]}" for key in settings.get("dynamic") or {} if str(key).startswith("-:")]
    single = settings.get("extra_config")
    listed += [
        name for name, own in (single.items() if isinstance(single, dict) else ())
        if isinstance(own, dict) and own.get("bits") == 16
    ]  # fmt: skip
    module = next((name for name in subject.heads.names.values() if name.endswith("_proj.weight")), "")
    return any(_names(str(pattern), module.removesuffix(".weight")) for pattern in listed)


def _names(pattern: str, module: str) -> bool:
    """Returns whether `pattern` matches a module. compressed-tensors writes "re:" and a regular expression, ModelOpt
    globs with *, other methods a part of the name."""
    if pattern.startswith("re:"):
        # a malicious pattern could take very long to search for: slow patterns count as a match
        is_slow = len(re.findall(r"[*+{]", pattern)) > _MAX_REPEATS or re.search(r"\)[*+?{]", pattern)
        try:
            return bool(is_slow or re.search(pattern[3:], module))
        except re.error:
            return False
    if "*" in pattern:
        return fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, f"{pattern}*")
    return pattern in module


def _conventions(subject: Subject) -> Iterator[Finding]:
    family = subject.heads.layout
    if family is None or not subject.heads.names:
        return
    if family.note:
        yield warning("method", family.note)
    norm = subject.heads.norm
    folded = subject.checkpoint.format == "gguf" and norm == "1+w"
    yield note("norm", "RMSNorm multiplies by w: the converter has added the 1" if folded else _NORMS[norm])
    if subject.heads.concat == "h;e":
        yield note("formula", "the hidden state comes first in the head's input, unlike most families")
    if subject.heads.concat == "sum":
        yield note("formula", "hidden state and embedding are projected separately and added, not concatenated")
    if family.max_modules and len(subject.heads.modules) > family.max_modules:
        yield note("modules", f"engines load only {family.max_modules} module of this family")


def _rope(subject: Subject) -> Iterator[Finding]:
    config, family = subject.config, subject.heads.layout
    for name in NESTED:
        inner = config.get(name)
        if not isinstance(inner, dict):
            continue
        for key in ROPE_KEYS:
            if config.get(key) is not None and inner.get(key) is not None and config[key] != inner[key]:
                text = f"{key} at top level differs from {name}.{key}: the override does not reach model and head"
                yield warning("rope", text)
            elif config.get(key) is not None and inner.get(key) is None and key == "rope_scaling":
                yield warning("rope", f"{key} stands at top level only: engines read it from {name}")
    if family and subject.heads.names and family.rope == "sliding" and has_scaled_rope(text_config(config)):
        yield warning("rope", "rope_scaling does not reach the head: it uses the sliding layers' rope")
    if family and subject.heads.names and family.rope == "none":
        yield note("rope", "the head has no positions (NoPE)")


def _lists(subject: Subject) -> Iterator[Finding]:
    """Checks that per-layer lists of the config have entries for the MTP layers."""
    heads, text = subject.heads, text_config(subject.config)
    if heads.layout is None or not heads.names:
        return
    count = heads.promised.modules or len(heads.modules)
    for key in heads.layout.per_layer:
        value = text.get(key)
        if isinstance(value, list) and len(value) < heads.num_layers + count:
            entries = f"{key} has {len(value)} entries for {heads.num_layers} layers and {count} MTP modules"
            topic = "rope" if "rop" in key or "rot" in key else "config"
            yield warning(topic, f"{entries}: it stops before the head")
    for key in heads.layout.per_module:
        value = text.get(key)
        if isinstance(value, list) and len(value) != count:
            yield warning("config", f"{key} has {len(value)} entries for {count} MTP modules")


def _keys(subject: Subject) -> Iterator[Finding]:
    heads = subject.heads
    count, key = heads.promised
    own = heads.layout.count_key.rpartition(".")[2] if heads.layout else ""
    if key and count and heads.layout and subject.checkpoint.format == "safetensors" and not key.endswith(own):
        yield warning("config", f"{key} is not this family's key: engines read {heads.layout.count_key}")
    outer = lookup(subject.config, key.rpartition(".")[2]) if key and "." in key else None
    if outer == 0 and count:
        yield warning("config", f"{key} is {count}, but the same key at top level is 0: engines disagree")
    extra = len(heads.modules) - count
    if count and extra > 0:
        yield note("modules", f"{len(heads.modules)} modules are there, {count} declared")


def _adapter(subject: Subject) -> Iterator[Finding]:
    if (subject.checkpoint.path / ADAPTER_CONFIG).exists():
        yield note("adapter", beside_model(subject.checkpoint.path))


def _extra(subject: Subject) -> Iterator[Finding]:
    if extra := subject.heads.extra:
        more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
        yield note("extra", f"tensors that this family's head does not have: {', '.join(extra[:3])}{more}")
    layers = subject.heads.num_layers
    lost = sorted(name for name in subject.checkpoint.stray if part_of(name, layers) == MTP)
    if lost:
        file = subject.checkpoint.stray[lost[0]].file.name
        there = f"{len(lost)} MTP tensors, such as {lost[0]}, are in {file}"
        yield warning("index", f"{there}, but not in the index: vLLM and other engines do not load them")


ABOUT: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    _adapter, _keys, _extra, _copies, _tied, _quantized, _conventions, _rope, _lists,
)  # fmt: skip
