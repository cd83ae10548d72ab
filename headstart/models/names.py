"""Hugging Face's tensor names and ours, each from the other by one table."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from headstart.formats.base import strip_wrapper
from headstart.kernels.ops import RawTensor

PREFIXES: Mapping[str, str | None] = {"model.": "", "lm_head.": "lm_head."}
WRAPPED: Mapping[str, str | None] = {
    **PREFIXES,
    "model.language_model.": "",
    "language_model.model.": "",
    "language_model.lm_head.": "lm_head.",
    **dict.fromkeys(
        (
            f"{outer}{part}."
            for outer in ("", "model.")
            for part in ("vision_tower", "multi_modal_projector", "visual", "vision_model")
        ),
        None,
    ),
}
"""Of a text model, or the text part of a multimodal one."""
TRAILING: Mapping[str, str | None] = {
    "layers.{i}.enorm.": "mtp.{i}.norm_embedding.",
    "layers.{i}.hnorm.": "mtp.{i}.norm_hidden.",
    "layers.{i}.eh_proj.": "mtp.{i}.projection.",
    "layers.{i}.shared_head.norm.": "mtp.{i}.norm.",
    "layers.{i}.shared_head.head.": None,  # copies of the trunk's
    "layers.{i}.embed_tokens.": None,
    "layers.{i}.": "mtp.{i}.block.",
}
"""Parts of MTP modules that are the layers after the trunk's (DeepSeek's names); {i} counts from the first of them."""


OWN_MODULE: Mapping[str, str | None] = {
    "mtp.layers.{i}.": "mtp.{i}.block.",
    "mtp.fc.": "mtp.{i}.projection.",
    "mtp.pre_fc_norm_embedding.": "mtp.{i}.norm_embedding.",
    "mtp.pre_fc_norm_hidden.": "mtp.{i}.norm_hidden.",
    "mtp.norm.": "mtp.{i}.norm.",
}
"""Parts of one MTP module beside the layers (Qwen's names)."""


Rule = tuple[re.Pattern[str], str | None]
"""How a name begins -> how it begins on the other side (None: not the model's)."""


@dataclass(frozen=True)
class Names:
    """`prefixes`: how theirs begin -> how ours do (None: not the model's); `{i}` is a number, the same on both sides,
    and 0 where only ours has one. The longest that fits holds; of several ways back, the first. `parts`: what has
    another name wherever it stands, theirs -> ours. Wrappers before theirs do not count."""

    prefixes: Mapping[str, str | None] = field(default_factory=lambda: PREFIXES)
    parts: Mapping[str, str] = field(default_factory=dict)

    def canonical(self, name: str) -> str | None:
        """Ours; None for a tensor to leave out."""
        if name.endswith("rotary_emb.inv_freq"):
            return None
        name = strip_wrapper(name)
        for theirs, ours in self.parts.items():
            name = name.replace(theirs, ours)
        return next(_replaced(name, self._there), name)

    def theirs(self, name: str) -> str:
        """Hugging Face's."""
        name = next((new for new in _replaced(name, self._back) if new), name)
        for theirs, ours in self.parts.items():
            name = name.replace(ours, theirs)
        return name

    @property
    def of_modules(self) -> bool:
        """Do MTP modules have names of their own?"""
        return any(ours and ours.startswith("mtp.") for ours in self.prefixes.values())

    @cached_property
    def _there(self) -> list[Rule]:
        return _rules({strip_wrapper(theirs): ours for theirs, ours in [*self.prefixes.items()][::-1]}.items())

    @cached_property
    def _back(self) -> list[Rule]:
        return _rules((ours, theirs) for theirs, ours in self.prefixes.items() if ours is not None)


def _rules(prefixes: Iterable[tuple[str, str | None]]) -> list[Rule]:
    """The longest beginning first."""
    ordered = sorted(prefixes, key=lambda pair: -len(pair[0]))
    return [(re.compile(re.escape(old).replace(r"\{i\}", r"(\d+)")), new) for old, new in ordered]


def _replaced(name: str, rules: Iterable[Rule]) -> Iterator[str | None]:
    """The name with another beginning, by each rule that fits."""
    for old, new in rules:
        if match := old.match(name):
            number = next(iter(match.groups()), "0")
            yield None if new is None else new.replace("{i}", number) + name[match.end() :]


_TRAILING = Names(TRAILING)


def trailing_modules(tensors: Mapping[str, RawTensor], num_layers: int) -> dict[str, RawTensor]:
    """Tensors of layers N, N + 1, ... become those of MTP modules 0, 1, ..."""
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
    """The way back, for one name."""
    if not name.startswith("mtp."):
        return name
    _, module, rest = _TRAILING.theirs(name).split(".", 2)
    return f"layers.{int(module) + num_layers}.{rest}"
