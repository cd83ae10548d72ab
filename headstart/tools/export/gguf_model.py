"""A checkpoint's MTP module with llama.cpp's names, types and metadata, as `convert_hf_to_gguf.py --mtp` writes it.

Families are declared by data; their conversion is renaming, stacking of experts and a shift of norm weights. Source:
llama.cpp b11434 `conversion/{base,qwen,glm}.py`.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.base import Checkpoint, make_tensor
from headstart.formats.gguf_names import KEYS, gguf_name
from headstart.formats.safetensors import Planned, bfloat16
from headstart.formats.sizes import Sizes, text_config
from headstart.models.joined import STACK
from headstart.models.keys import FULL, LINEAR, check_kinds, num_layers, number, real
from headstart.models.mtp import LlamaCppDraft
from headstart.models.names import trailing_name
from headstart.tools.export.module import count_modules, cut_module, find_module

U32, F32, BOOL = "uint32", "float32", "bool"
TYPES = {"attention.layer_norm_rms_epsilon": F32, "expert_weights_scale": F32, "expert_weights_norm": BOOL}
"""GGUF types of keys that are not whole numbers."""
ACTIVATION = "silu"
TRUNK = ("embed_tokens.weight", "norm.weight", "lm_head.weight")
"""Canonical names of the trunk's tensors that the file contains too."""
EXPERT = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
IN_FLOAT32 = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor to be written. Its values are only read when `fill` is called."""

    name: str
    dtype: str  # F32 or BF16
    shape: tuple[int, ...]
    fill: Callable[[NDArray[Any]], None]  # writes all values into a flat array

    def array(self) -> NDArray[Any]:
        """Returns the values [*shape]: float32, or bfloat16 bits as uint16."""
        array = np.empty(self.shape, np.float32 if self.dtype == "F32" else np.uint16)
        self.fill(array.reshape(-1))
        return array


@dataclass(frozen=True)
class HeadModel:
    """Content of a GGUF file with only a head. `metadata`: key -> (value, GGUF type)."""

    architecture: LlamaCppDraft
    metadata: Mapping[str, tuple[Any, str]]
    tensors: list[GgufTensor]
    num_modules: int
    notes: list[str]


def head_model(source: Checkpoint) -> HeadModel | None:
    """Returns the MTP module in llama.cpp's form; None if its family has no declared form. Raises ModelError for an
    incomplete module, or one that llama.cpp would compute differently."""
    place = find_module(source.config)
    if place is None or place.layout.llama_cpp_draft is None:
        return None
    architecture, family = place.layout.llama_cpp_draft, place.family
    count = count_modules(place, several=place.layout.xllm is not None and place.layout.xllm.several)
    block = family.read(source.config, source.name, strict=False).head_layer.mlp
    if (activation := getattr(block, "activation", ACTIVATION)) != ACTIVATION:
        hint = f"llama.cpp computes {ACTIVATION} whatever the model was trained with"
        raise ModelError(f"{source.name}: hidden_act is {activation!r}, which GGUF files cannot express", hint)

    def rename(name: str) -> str | None:
        """Keeps the names of the module's tensors and of TRUNK; None for others."""
        return name if place.inside(name) is not None or family.names.canonical(name) in TRUNK else None

    module = cut_module(source, place, rename, modules=count)
    config = text_config(source.config)
    layers = num_layers(config)
    canonical = {trailing_name(str(family.names.canonical(each.name)), layers): each for each in module.planned}
    tensors = _tensors(architecture, canonical)
    for needed in ("token_embd.weight", "output_norm.weight"):
        if needed not in {each.name for each in tensors}:
            raise ModelError(f"{source.name} has no tensor for {needed}", "is a shard missing? download it again")
    return HeadModel(architecture, _metadata(architecture, config, layers, count), tensors, count, module.notes)


def _metadata(
    architecture: LlamaCppDraft, config: Mapping[str, Any], layers: int, count: int
) -> dict[str, tuple[Any, str]]:
    keys: dict[str, tuple[Any, str]] = {
        "block_count": (layers + count, U32),
        "nextn_predict_layers": (count, U32),
        **{
            key: _typed(config, KEYS[key], TYPES.get(key, U32))
            for key in architecture.keys
            if config.get(KEYS[key]) is not None
        },
        **_rope(architecture, config),
    }
    if config.get("head_dim") is not None:
        keys["attention.value_length"] = (number(config, "head_dim"), U32)
    if experts := Sizes(config).get("experts"):
        keys["expert_count"] = (experts, U32)
    if architecture.gating is not None:
        keys["expert_gating_func"] = (architecture.gating, U32)
    if architecture.recurrent:
        inner = number(config, "linear_value_head_dim") * number(config, "linear_num_value_heads")
        recurrent = [kind == LINEAR for kind in _layer_types(config, layers)] + [False] * count
        keys |= {"ssm.inner_size": (inner, U32), "attention.recurrent_layers": (recurrent, "array")}
    return {f"{architecture.architecture}.{key}": value for key, value in keys.items()}


def _typed(config: Mapping[str, Any], key: str, kind: str) -> tuple[Any, str]:
    value = config[key]
    whole = isinstance(value, int) and 0 <= value < 2**32
    if not (whole if kind == U32 else isinstance(value, bool) if kind == BOOL else isinstance(value, int | float)):
        raise ModelError(f"config.json: {key} is {value!r}, which is not a {kind}", f"correct {key}")
    return value, kind


def _layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    """Returns the kind of each layer; some configs only give the distance of full-attention layers."""
    every = number(config, "full_attention_interval", default=4)
    kinds = config.get("layer_types") or [LINEAR if (i + 1) % every else FULL for i in range(layers)]
    check_kinds(kinds, layers, (LINEAR, FULL))
    return list(kinds)


def _section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise ModelError(f"config.json: {key} is {value!r}, not an object", f"correct {key}")
    return value


def _rope(architecture: LlamaCppDraft, config: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    rope = {**config, **_section(config, "rope_parameters")}
    scaling = _section(config, "rope_scaling")
    kind = scaling.get("rope_type") or scaling.get("type") or rope.get("rope_type") or "default"
    if kind not in ("default", "mrope"):
        hint = "llama.cpp's convert_hf_to_gguf.py --mtp writes it"
        raise ModelError(f"RoPE scaling of type {kind!r} cannot be exported", hint)
    heads = number(config, "num_attention_heads")
    head_dim = number(config, "head_dim", default=number(config, "hidden_size") // heads)
    share = real(rope, "partial_rotary_factor", architecture.rotary)
    keys: dict[str, tuple[Any, str]] = {"rope.dimension_count": (int(head_dim * share), U32)}
    if rope.get("rope_theta") is not None:
        keys["rope.freq_base"] = (real(rope, "rope_theta", 0.0), F32)
    if architecture.recurrent:
        sections = rope.get("mrope_section") or scaling.get("mrope_section") or [11, 11, 10]
        if not isinstance(sections, list) or not all(isinstance(each, int) for each in sections):
            raise ModelError(f"config.json: mrope_section is {sections!r}, not a list of sizes")
        keys["rope.dimension_sections"] = ([*sections, 0, 0][:4], "array")
    return keys


def _tensors(architecture: LlamaCppDraft, planned: Mapping[str, Planned]) -> list[GgufTensor]:
    """Converts tensors under canonical names, in which MTP modules are the layers after the trunk's last."""
    made: list[GgufTensor] = []
    experts: dict[str, dict[int, Planned]] = {}
    for name, each in planned.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(f"blk.{match[1]}.ffn_{match[3]}_exps.weight", {})[int(match[2])] = each
        elif match := STACK.fullmatch(name):
            count, rows, columns = each.shape
            halves = {"gate": 0, "up": 1} if match[2] == "gate_up" else {"down": None}
            for part, half in halves.items():
                shape = (count, rows if half is None else rows // 2, columns)
                made.append(_gguf_tensor(f"blk.{match[1]}.ffn_{part}_exps.weight", [each], shape, architecture, half))
        elif (new := gguf_name(name)) is None:
            raise ModelError(f"llama.cpp's {architecture.architecture} has no place for {each.name}")
        else:
            made.append(_gguf_tensor(new, [each], each.shape, architecture))
    for name, parts in experts.items():
        ordered = [parts[number] for number in sorted(parts)]
        made.append(_gguf_tensor(name, ordered, (len(ordered), *ordered[0].shape), architecture))
    return made


def _gguf_tensor(
    name: str, parts: list[Planned], shape: tuple[int, ...], architecture: LlamaCppDraft, half: int | None = None
) -> GgufTensor:
    """half: the tensor is this half, 0 or 1, of the rows of each expert in one fused tensor."""
    plain = len(shape) == 1 or name.endswith(IN_FLOAT32)
    shift = architecture.norm_shift if name.endswith("norm.weight") else 0.0
    size = math.prod(shape[1:])

    def fill(target: NDArray[Any]) -> None:
        read = at = 0
        for part in parts:
            for piece in part.pieces():
                values = _converted(part, piece, plain, shift)
                read += len(values)
                if half is not None:
                    values = values[np.arange(read - len(values), read) // size % 2 == half]
                target[at : at + len(values)] = values
                at += len(values)

    return GgufTensor(name, "F32" if plain else "BF16", shape, fill)


def _converted(part: Planned, piece: NDArray[Any], plain: bool, shift: float) -> NDArray[Any]:
    raw = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
    if part.dtype == "BF16" and not plain:
        return raw.view(np.uint16)
    size = {"BF16": 2, "F16": 2, "F32": 4}.get(part.dtype)
    if size is None:
        raise ModelError(f"tensor {part.name} is {part.dtype}, but must be floating-point")
    values = make_tensor(part.name, (len(raw) // size,), part.dtype, raw).float32()
    return values + np.float32(shift) if plain else bfloat16(values)[0]
