"""Converts between Hugging Face's tensor names and canonical ones, both ways by the same table."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from headstart.formats.base import strip_wrapper
from headstart.kernels.ops import RawTensor

PREFIXES: Mapping[str, str | None] = {"model.": "", "lm_head.": "lm_head."}
WRAPPED: Mapping[str, str | None] = {
    **PREFIXES, **dict.fromkeys(("vision_tower.", "multi_modal_projector.", "visual.", "vision_model.")),
}  # fmt: skip
"""Prefixes in text models and in multimodal models, whose vision towers are ignored."""


def module_names(prefix: str, *, norm: str = "final_layernorm.", block: str = "") -> dict[str, str]:
    """Prefixes of MTP modules with DeepSeek's names below `prefix`, which has {i}. norm: name of the final norm; block:
    that of the decoder layer."""
    return {
        f"{prefix}enorm.": "mtp.{i}.norm_embedding.",
        f"{prefix}hnorm.": "mtp.{i}.norm_hidden.",
        f"{prefix}eh_proj.": "mtp.{i}.projection.",
        f"{prefix}{norm}": "mtp.{i}.norm.",
        f"{prefix}{block}": "mtp.{i}.block.",
    }


TRAILING: Mapping[str, str | None] = {
    **module_names("layers.{i}.", norm="shared_head.norm."),
    "layers.{i}.shared_head.head.": None,  # copies of the trunk's tensors
    "layers.{i}.embed_tokens.": None,
    "layers.{i}.streams.": "mtp.{i}.streams.",
}
"""Names of MTP modules that are the layers after the trunk's (DeepSeek's names); {i} is 0 for the first of them."""


OWN_MODULE: Mapping[str, str | None] = {
    "mtp.layers.{i}.": "mtp.{i}.block.",
    "mtp.fc.": "mtp.{i}.projection.",
    "mtp.pre_fc_norm_embedding.": "mtp.{i}.norm_embedding.",
    "mtp.pre_fc_norm_hidden.": "mtp.{i}.norm_hidden.",
    "mtp.norm.": "mtp.{i}.norm.",
}
"""Names of MTP modules that are stored outside the trunk's layers (Qwen's names)."""
SPARSE_BLOCK: Mapping[str, str] = {
    ".block_sparse_moe.gate.": ".mlp.gate.",
    ".block_sparse_moe.shared_experts.": ".mlp.shared_experts.",
    ".block_sparse_moe.experts.{i}.w1.": ".mlp.experts.{i}.gate_proj.",
    ".block_sparse_moe.experts.{i}.w2.": ".mlp.experts.{i}.down_proj.",
    ".block_sparse_moe.experts.{i}.w3.": ".mlp.experts.{i}.up_proj.",
}
"""Parts of names of experts beside dense MLPs, where experts have Mixtral's names and MLPs Llama's."""
DECAY: Mapping[str, str] = {".A_log": ".decay_rate", ".dt_bias": ".decay_bias"}
"""Parts of names of linear attention with a decay."""
ALL_NORMS = re.compile(r"norm(_hidden|_embedding)?\.weight$")
"""Canonical names of all norms, those of MTP modules included."""
GGUF_GATE: Mapping[str, str] = {".linear_attn.in_proj_z.": ".self_attn.gate_proj."}
"""llama.cpp has one name for the gate of attention and that of Gated DeltaNet."""


Rule = tuple[re.Pattern[str], str | None]
"""(prefix to replace, its replacement; None: the tensor is ignored)."""
PartRule = tuple[re.Pattern[str], str]
"""(text to replace anywhere in a name, its replacement)."""


@dataclass(frozen=True)
class Names:
    """Table of a family's tensor names.

    Published names are read without the prefixes of formats.base.WRAPPER. The longest matching prefix is used, and all
    parts in their order. `{i}` stands for a number, equal on both sides; it is 0 if only the canonical prefix has it.
    If several published prefixes have one canonical prefix, the first is written.
    """

    # published prefix -> canonical prefix; None: the tensor is ignored
    prefixes: Mapping[str, str | None] = field(default_factory=lambda: PREFIXES)
    parts: Mapping[str, str] = field(default_factory=dict)  # published -> canonical text anywhere in a name
    # text anywhere in a name that formats/gguf_names.py gives a GGUF file's tensor -> canonical text
    gguf: Mapping[str, str] = field(default_factory=dict)

    def canonical(self, name: str) -> str | None:
        """Canonical name of a published tensor, with or without wrappers' prefixes; None for a tensor to ignore."""
        if name.endswith("rotary_emb.inv_freq"):
            return None
        name = strip_wrapper(name)
        name = _with_parts(name, self._part_rules)
        return next(_replaced(name, self._prefix_rules), name)

    def of_gguf(self, name: str) -> str:
        """Canonical name of a GGUF file's tensor. name: as formats/gguf_names.py has it."""
        return _with_parts(name, self._gguf_rules)

    def theirs(self, name: str) -> str:
        """Hugging Face's name of a canonical tensor."""
        return _with_parts(next((new for new in _replaced(name, self._back) if new), name), self._reverse_part_rules)

    @property
    def of_modules(self) -> bool:
        """True if MTP modules are stored outside the trunk's layers."""
        return any(ours and ours.startswith("mtp.") for ours in self.prefixes.values())

    @cached_property
    def _prefix_rules(self) -> list[Rule]:
        return _rules({strip_wrapper(theirs): ours for theirs, ours in [*self.prefixes.items()][::-1]}.items())

    @cached_property
    def _back(self) -> list[Rule]:
        return _rules((ours, theirs) for theirs, ours in self.prefixes.items() if ours is not None)

    @cached_property
    def _part_rules(self) -> list[PartRule]:
        return _part_rules(self.parts.items())

    @cached_property
    def _reverse_part_rules(self) -> list[PartRule]:
        return _part_rules((ours, theirs) for theirs, ours in self.parts.items())

    @cached_property
    def _gguf_rules(self) -> list[PartRule]:
        return _part_rules(self.gguf.items())


def _part_rules(parts: Iterable[tuple[str, str]]) -> list[PartRule]:
    return [(_pattern(old), new.replace("{i}", r"\1")) for old, new in parts]


def _with_parts(name: str, parts: Iterable[PartRule]) -> str:
    for old, new in parts:
        name = old.sub(new, name)
    return name


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text).replace(r"\{i\}", r"(\d+)"))


def _rules(prefixes: Iterable[tuple[str, str | None]]) -> list[Rule]:
    """Rules of (prefix, replacement) pairs, longest prefix first."""
    ordered = sorted(prefixes, key=lambda pair: -len(pair[0]))
    return [(_pattern(old), new) for old, new in ordered]


def _replaced(name: str, rules: Iterable[Rule]) -> Iterator[str | None]:
    """The name with its prefix replaced, by each rule that matches; None for a tensor to ignore."""
    for old, new in rules:
        if match := old.match(name):
            number = next(iter(match.groups()), "0")
            yield None if new is None else new.replace("{i}", number) + name[match.end() :]


_TRAILING = Names(TRAILING)


def trailing_modules(tensors: Mapping[str, RawTensor], num_layers: int) -> dict[str, RawTensor]:
    """Renames tensors of layers N, N + 1, ... (N = num_layers) to those of MTP modules 0, 1, ..."""
    renamed = {}
    for name, tensor in tensors.items():
        layer = re.match(r"layers\.(\d+)\.", name)
        if layer and (module := int(layer[1]) - num_layers) >= 0:
            new = _TRAILING.canonical(f"layers.{module}.{name[layer.end() :]}")
        else:
            new = name
        if new is not None:
            renamed[new] = tensor
    return renamed


def trailing_name(name: str, num_layers: int) -> str:
    """Inverse of `trailing_modules` for one name."""
    if not name.startswith("mtp."):
        return name
    _, module, rest = _TRAILING.theirs(name).split(".", 2)
    return f"layers.{int(module) + num_layers}.{rest}"
