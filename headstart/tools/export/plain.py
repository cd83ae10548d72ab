"""Tensors to be written with nothing quantized left: quantized ones turned back into bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headstart.errors import ModelError
from headstart.formats.base import Tensor
from headstart.formats.quantization import ACTIVATIONS, AGAIN, Weights, planned
from headstart.formats.safetensors import Planned, copied

CODES = ("F8_E4M3", "F8_E5M2", "I8", "U8")
"""Types that mean nothing without scales."""


@dataclass
class Plain:
    """`converted`: names of the weights that were quantized; `scales`: what scaled them."""

    planned: list[Planned]
    converted: list[str]
    scales: set[str]
    notes: list[str]


def make_plain(names: Mapping[str, str], weights: Weights, described: bool = False) -> Plain:
    """Plan the tensors that `names` has (name -> new name), quantized ones turned back. `described`: another file says
    how integers are to be read, so that their scales stay. ModelError for packings, for codes without scales and scales
    without codes."""
    plain = Plain([], [], set(), [])
    for stored in weights.stored.values():
        main, beside = stored.main, [each for each in stored.beside.values() if each.name in names]
        if main.name not in names or (stored.word in ACTIVATIONS and not described):
            continue
        kept = described and not any(word.endswith("_scale_inv") for word in stored.beside)
        if not kept and (decode := weights.decode(stored)):
            new = f"{names[main.name].rpartition('.')[0]}.weight" if stored.packed else names[main.name]
            plain.planned.append(planned(new, weights.shape(stored), decode))
            plain.converted.append(main.name)
            plain.scales |= {each.name for each in stored.beside.values()} - _of_activations(stored.beside)
            continue
        if main.dtype in CODES and not kept:
            raise ModelError(f"{main.name} is {main.dtype}, but no scales stand beside it", AGAIN)
        skipped = set() if kept else _of_activations(stored.beside)
        plain.planned += [copied(names[each.name], each) for each in (main, *beside) if each.name not in skipped]
    if not described and (lone := next((name for name in weights.loose if name in names), None)):
        raise ModelError(f"{lone} scales a weight that is not there", AGAIN)
    if dropped := [name for name in names if name.rpartition(".")[2] in ACTIVATIONS and not described]:
        plain.notes.append(f"{len(dropped)} scales of activations were left out")
    return plain


def _of_activations(beside: Mapping[str, Tensor]) -> set[str]:
    return {each.name for word, each in beside.items() if word in ACTIVATIONS}
