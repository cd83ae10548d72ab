"""Valid checkpoints of every family and kind of drafter, and mutations that break the head or leave it working."""

import json
import math
import os
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "inspect"))

import gguf
import gguf_files
import numpy as np
from test_inspect_drafters import DRAFTERS
from zoo import SIZES, ZOO, config_of, heads, trunk, write_file

from headstart import registry
from headstart.formats.safetensors import NAME_OF
from headstart.formats.safetensors_file import read_file
from headstart.hub import HEADS

Tensors = dict[str, tuple[str, tuple[int, ...]]]
SPARE = r"(?<!mtp\.)embed_tokens|shared_head\.head|emb\.tok_emb|t2d$|draft_token_ids|lm_heads\.0|rot\.weight"
"""Tensors that a head can do without: copies of the trunk's, and what is not needed to run."""
HOSTILE: list[Any] = [
    None, True, False, -1, 0, 1, 7, 10**9, 2**62, 10**30, -(2**63), 0.5, float("inf"), float("-inf"), float("nan"), "",
    "x", "\ud800", "a" * 5000, [], {}, [[]], [None], [-1], ["x"], {"": None}, {"a": {"b": [1]}},
    [10**9] * 50, [[[[[]]]]],
]  # fmt: skip
CONFIGS = ("quantization_config", "text_config", "rope_scaling", "rope_parameters", "layer_types", "index_topk_freq",
           "architectures", "model_type", "num_nextn_predict_layers", "mtp_num_hidden_layers", "n_routed_experts",
           "num_experts", "num_hidden_layers", "hidden_size", "vocab_size", "dflash_config", "eagle_config",
           "block_size", "speculators_config", "speculators_model_type", "transformer_layer_config", "draft_vocab_size",
           "num_heads", "tie_word_embeddings", "torch_dtype", "compress_ratios", "headstart_head",
           "headstart")  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A checkpoint. `own`: names of the tensors that its head requires; `verdict`: that of the unchanged checkpoint."""

    name: str
    config: dict[str, Any]
    tensors: Tensors
    own: tuple[str, ...]
    verdict: str = "alive"
    texts: dict[str, bytes] = field(default_factory=dict)
    cut: int = 0
    index: dict[str, Any] | None = None
    shards: int = 1
    metadata: dict[str, Any] = field(default_factory=dict)  # of a GGUF file, without the architecture

    def write(self, folder: Path) -> Path:
        """Writes the folder or the GGUF file; tensor data are sparse."""
        folder.mkdir(parents=True)
        if self.metadata:
            return _write_gguf(folder / "model.gguf", self)
        (folder / "config.json").write_text(json.dumps(self.config))
        files = ["model.safetensors"] if self.shards == 1 else [f"model-{i}.safetensors" for i in range(self.shards)]
        names = list(self.tensors)
        for place, file in enumerate(files):
            _write(folder / file, {name: self.tensors[name] for name in names[place :: len(files)]}, self.cut)
        if self.index is not None or self.shards > 1:
            weight_map = {name: files[place % len(files)] for place, name in enumerate(names)}
            index = json.dumps({"weight_map": weight_map, **(self.index or {})})
            (folder / "model.safetensors.index.json").write_text(index)
        for name, content in self.texts.items():
            (folder / name).write_bytes(content)
        return folder


def _write(path: Path, tensors: Tensors, cut: int) -> None:
    size = write_file(path, tensors).stat().st_size
    os.truncate(path, max(0, size - cut))


def _write_gguf(path: Path, subject: Subject) -> Path:
    writer = gguf.GGUFWriter(path, GGUF_ARCHITECTURE)
    for key, value in subject.metadata.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{GGUF_ARCHITECTURE}.{key}", value)
    for name, (dtype, shape) in subject.tensors.items():
        writer.add_tensor(name, np.zeros(shape, dtype))
    gguf_files.written(writer, path)
    os.truncate(path, max(0, path.stat().st_size - subject.cut))
    return path


GGUF_ARCHITECTURE = "glm4moe"
GGUF_METADATA = {
    "block_count": 3, "embedding_length": 32, "attention.head_count": 4, "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5, "nextn_predict_layers": 1,
}  # fmt: skip


def _gguf() -> Subject:
    tensors: Tensors = {"token_embd.weight": ("float32", (96, 32)), "output_norm.weight": ("float32", (32,))}
    for block in range(3):
        shapes = {"attn_q": (64, 32), "attn_k": (16, 32), "attn_output": (32, 64), "ffn_up": (40, 32),
                  "ffn_down": (32, 40)}  # fmt: skip
        tensors |= {f"blk.{block}.{name}.weight": ("float32", shape) for name, shape in shapes.items()}
    head = {"eh_proj": (32, 64), "enorm": (32,), "hnorm": (32,), "shared_head_norm": (32,)}
    tensors |= {f"blk.2.nextn.{name}.weight": ("float32", shape) for name, shape in head.items()}
    own = tuple(name for name in tensors if name.startswith("blk.2."))
    return Subject("gguf", {}, tensors, own, metadata=GGUF_METADATA)


def _shipped(folder: Path) -> Subject:
    """A head of the package, without tables of ids, whose values would matter."""
    tensors = {name: (each.dtype, each.shape) for name, each in read_file(folder / "model.safetensors").items()}
    tensors = {name: value for name, value in tensors.items() if name not in ("t2d", "draft_token_ids")}
    config = json.loads((folder / "config.json").read_text())
    if "markov.out.weight" in tensors:  # has a row for each id
        config["vocab_size"] = tensors["markov.out.weight"][1][0]
        tensors = {name: (kind, (config["vocab_size"], *shape[1:]) if "markov.embed." in name else shape)
                   for name, (kind, shape) in tensors.items()}  # fmt: skip
    return Subject(f"shipped {folder.name}", config, tensors, _needed(tensors))


@cache
def subjects() -> list[Subject]:
    """Every family of the table, runnable families with all tensors, quantized checkpoints, every kind of drafter."""
    every = []
    for key, animal in ZOO.items():
        own = heads(animal)
        every.append(Subject(key, config_of(animal), {**trunk(animal), **own}, _needed(own)))
    for kind, (config, shapes) in DRAFTERS.items():
        tensors: Tensors = {name: ("I64" if name == "d2t" else "BF16", shape) for name, shape in shapes.items()}
        spare = ("lm_head.weight", "d2t") if kind.startswith("eagle ") or kind == "eagle" else ()
        own_names = [name for name in _needed(tensors) if name not in spare]
        every.append(Subject(f"drafter {kind}", {"model_type": "llama", **SIZES, **config}, tensors, tuple(own_names)))
    tiny = [_tiny(name) for name in ("deepseek_v3", "glm4_moe", "mimo", "qwen3_5", "qwen3_5_moe", "qwen3_next")]
    every += [_gguf(), *(_shipped(path) for path in sorted(HEADS.iterdir()) if (path / "config.json").exists())]
    return every + tiny + [_fp8(each) for each in tiny] + [_packed(each) for each in tiny[1:4]]


def _needed(tensors: Tensors) -> tuple[str, ...]:
    return tuple(name for name in tensors if not re.search(SPARE, name))


def _tiny(name: str) -> Subject:
    family = registry.find("models", name).FAMILY
    config, arrays = family.tiny()
    bare = family.tiny(num_nextn_predict_layers=0, mtp_num_hidden_layers=0)[1]
    tensors = {tensor: (NAME_OF[array.dtype], array.shape) for tensor, array in arrays.items()}
    return Subject(f"tiny {name}", config, tensors, _needed({n: t for n, t in tensors.items() if n not in bare}))


def _fp8(subject: Subject) -> Subject:
    """The checkpoint with its block's matrices in FP8 with block scales."""
    tensors, own = dict(subject.tensors), list(subject.own)
    for name in subject.own:
        shape = subject.tensors[name][1]
        if len(shape) == 2 and name.endswith("_proj.weight") and "eh_proj" not in name:
            tensors[name] = ("F8_E4M3", shape)
            tensors[f"{name}_scale_inv"] = ("F32", (-(-shape[0] // 128), -(-shape[1] // 128)))
            own.append(f"{name}_scale_inv")
    return _quantized(subject, tensors, own, {"quant_method": "fp8", "weight_block_size": [128, 128]})


def _packed(subject: Subject) -> Subject:
    """The checkpoint with its block's matrices packed by GPTQ."""
    tensors, own = dict(subject.tensors), list(subject.own)
    for name in subject.own:
        shape, base = subject.tensors[name][1], name.removesuffix(".weight")
        is_matrix = len(shape) == 2 and base.endswith("_proj") and "eh_proj" not in name
        if is_matrix and not shape[0] % 8 and not shape[1] % 8:
            del tensors[name]
            own.remove(name)
            parts: Tensors = {"qweight": ("I32", (shape[1] // 8, shape[0])), "scales": ("F16", (1, shape[0])),
                              "qzeros": ("I32", (1, shape[0] // 8))}  # fmt: skip
            tensors |= {f"{base}.{part}": value for part, value in parts.items()}
            own += [f"{base}.{part}" for part in parts]
    return _quantized(subject, tensors, own, {"quant_method": "gptq", "bits": 4, "group_size": -1})


def _quantized(subject: Subject, tensors: Tensors, own: list[str], settings: dict[str, Any]) -> Subject:
    name, config = f"{subject.name} {settings['quant_method']}", subject.config | {"quantization_config": settings}
    return replace(subject, name=name, config=config, tensors=tensors, own=tuple(own))


@dataclass(frozen=True)
class Mutation:
    """A changed checkpoint. `breaks`: whether the head cannot work any more; None: unknown."""

    what: str
    subject: Subject
    breaks: bool | None
    change_files: Callable[[Path], None] | None = None


TYPES = ["I8", "I32", "BOOL", "U8", "I64", "F8_E4M3", "F8_E5M2"]
JUNK = (b"", b"\x00" * 9, b"\xff\xfe{}", b"[" * 100_000, b"{}", b"null", b'{"a": 1, "a": 2}')


def mutate(subject: Subject, rng: random.Random) -> Mutation:
    """A random mutation."""
    if subject.metadata:
        return rng.choice([*[_gguf_tensor] * 6, _gguf_metadata])(subject, rng)
    return rng.choice([*[_tensor] * 6, _harmless, _files, *[_hostile] * 3])(subject, rng)


def _tensor(subject: Subject, rng: random.Random) -> Mutation:
    name = rng.choice(subject.own)
    dtype, shape = subject.tensors[name]
    rest = {each: value for each, value in subject.tensors.items() if each != name}
    kind = rng.choice(["drop", "rename", "reshape", "reshape", "retype"])
    if kind == "drop":
        return Mutation(f"drop {name}", replace(subject, tensors=rest), True)
    if kind == "rename":
        new = rng.choice([f"{name}x", f"x.{name}", name.replace(".weight", ".wieght"), name.upper(), name + ".weight"])
        return Mutation(f"rename {name} to {new}", replace(subject, tensors={**rest, new: (dtype, shape)}), new != name)
    if kind == "reshape":
        new_shape = _other_shape(shape, rng)
        broken: bool | None = None if new_shape == shape or _is_scale(name, shape, new_shape) else True
        tensors = {**subject.tensors, name: (dtype, new_shape)}
        return Mutation(f"reshape {name} {shape} to {new_shape}", replace(subject, tensors=tensors), broken)
    types = ["F32", "BF16", "BOOL"] if name.endswith("d2t") else TYPES
    new_type = rng.choice(types)
    same = new_type == dtype or (dtype.startswith("F8") and new_type.startswith("F8"))
    tensors = {**subject.tensors, name: (new_type, shape)}
    # Integers with scales are another quantization, and packed words have other types.
    unknown = same or f"{name}_scale_inv" in subject.tensors or "qweight" in name or "qzeros" in name or "scale" in name
    return Mutation(f"retype {name} {dtype} to {new_type}", replace(subject, tensors=tensors), not unknown or None)


def _gguf_tensor(subject: Subject, rng: random.Random) -> Mutation:
    """Like mutations of safetensors tensors, with types of GGUF files."""
    if not rng.randrange(8):
        return Mutation("cut", replace(subject, cut=rng.choice([1, 40, 10**9])), True)
    mutation = _tensor(subject, rng)
    types = {"F32": "float32", "I8": "int8", "U8": "int8", "BOOL": "int8", "I32": "int32", "I64": "int64",
             "BF16": "int16"}  # fmt: skip
    tensors = {
        name: (types.get(dtype, "int16" if dtype.startswith("F8") else dtype), tuple(size or 1 for size in shape))
        for name, (dtype, shape) in mutation.subject.tensors.items()
    }
    same = tensors == subject.tensors
    return Mutation(mutation.what, replace(subject, tensors=tensors), None if same else mutation.breaks)


def _gguf_metadata(subject: Subject, rng: random.Random) -> Mutation:
    key = rng.choice([*subject.metadata, "expert_count", "vocab_size"])
    value = rng.choice([0, 1, 2, 5, 64, 10**6, 2**32 - 1])
    return Mutation(f"{key} = {value}", replace(subject, metadata={**subject.metadata, key: value}), None)


def _is_scale(name: str, shape: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Whether the tensor is a scale or zero point of one block, which has the same meaning in many shapes."""
    return ("scale" in name or "qzeros" in name) and (math.prod(new) == 1 or math.prod(shape) == 1)


def _other_shape(shape: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    at = rng.randrange(len(shape)) if shape else 0
    more = tuple(size + (place == at) for place, size in enumerate(shape))
    less = tuple(max(size - (place == at), 0) for place, size in enumerate(shape))
    return rng.choice([more, less, (*shape, 2), (2, *shape), shape[::-1], (math.prod(shape),), (0, *shape[1:])])


def _harmless(subject: Subject, rng: random.Random) -> Mutation:
    kind = rng.choice(["shuffle", "shards", "floats", "more", "key"])
    names = list(subject.tensors)
    if kind == "shuffle":
        rng.shuffle(names)
        return Mutation("shuffle", replace(subject, tensors={name: subject.tensors[name] for name in names}), False)
    if kind == "shards":
        return Mutation("shards", replace(subject, shards=rng.randint(2, 5)), False)
    if kind == "floats":
        other = rng.choice(["F32", "F16", "BF16"])
        tensors = {n: (other if t in ("F32", "F16", "BF16") else t, shape) for n, (t, shape) in subject.tensors.items()}
        return Mutation(f"all {other}", replace(subject, tensors=tensors), False)
    if kind == "more":
        more: Tensors = {**subject.tensors, "model.rotary_emb.inv_freq": ("F32", (4,))}
        return Mutation("one more tensor", replace(subject, tensors=more), False)
    return Mutation("an unknown key", replace(subject, config={**subject.config, "mine": [1]}), False)


def _files(subject: Subject, rng: random.Random) -> Mutation:
    name = rng.choice(["config.json", "model.safetensors", "model.safetensors.index.json", "generation_config.json"])
    kind = rng.choice(["cut", "bytes", "index", "pipe", "folder", "loop", "empty", "flip"])
    if kind == "cut":
        return Mutation("cut", replace(subject, cut=rng.choice([1, 8, 1000, 10**9])), True)
    if kind == "bytes":
        junk = rng.choice([*JUNK, rng.randbytes(40)])
        return Mutation(f"{name} is {junk[:20]!r}", replace(subject, texts={name: junk}), None)
    if kind == "index":
        value = rng.choice([{}, [], "x", None, {"a": "model.safetensors"}, {"a": 1}, {"a": "../config.json"}, {"": ""}])
        return Mutation(f"weight_map {value!r}", replace(subject, index={"weight_map": value}), True)
    if kind == "flip":
        seed = rng.random()
        return Mutation("flipped bytes", subject, None, lambda folder: _flip(folder, random.Random(seed)))
    return Mutation(f"{name}: {kind}", subject, None, lambda folder: _replace_file(folder / name, kind))


def _flip(folder: Path, rng: random.Random) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(min(len(data), size + 8))] = rng.randrange(256)
    path.write_bytes(data)


def _replace_file(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path)
        case _:
            path.write_bytes(b"")


def _hostile(subject: Subject, rng: random.Random) -> Mutation:
    """Sets implausible values at random places of a config."""
    config = json.loads(json.dumps(subject.config))
    changed = []
    for _ in range(rng.randint(1, 3)):
        sections = [config, *(each for each in config.values() if isinstance(each, dict))]
        section = rng.choice(sections)
        key = rng.choice([*section, *CONFIGS])
        if rng.random() < 0.2:
            section.pop(key, None)
            changed.append(f"no {key}")
        else:
            section[key] = json.loads(json.dumps(rng.choice(HOSTILE)))  # separate objects
            changed.append(f"{key} = {str(section[key])[:40]!r}")
    file = rng.choice(["config.json"] * 4 + ["generation_config.json"])
    if file == "config.json":
        return Mutation(", ".join(changed), replace(subject, config=config), None)
    return Mutation(f"{file}: {', '.join(changed)}", replace(subject, texts={file: json.dumps(config).encode()}), None)


def mutation_of(seed: int, number: int) -> Mutation:
    """Mutation `number` of a seed; deterministic."""
    rng = random.Random(f"{seed}/{number}")
    return mutate(subjects()[number % len(subjects())], rng)
