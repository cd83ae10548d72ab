"""GGUF files: one file (or numbered parts) with weights, metadata and tokenizer.

Rows of q_proj and k_proj stay in the file's order. Families whose converter permutes them call `rows.unpermute_rows`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart import hub
from headstart.errors import ModelError
from headstart.formats import gguf_names
from headstart.formats.base import Checkpoint, Format, Tensor, text_readers
from headstart.formats.gguf_file import MAGIC, GgufFile, read, written_number
from headstart.formats.safetensors_file import join

_OF_EXPERTS = "router.per_expert_scale"  # end of the canonical name of a scale per expert


def detect(path: Path) -> bool:
    """A file that is named *.gguf or starts with GGUF's magic."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file with all its parts, and the first projector file of its folder. Raises ModelError for a damaged
    file or one without a model."""
    # llama.cpp names files of vision towers mmproj-F16.gguf and the like
    beside = next((each for each in sorted(path.parent.glob("*.gguf")) if "mmproj" in each.name.lower()), None)
    return replace(join_files(path, read_parts(path)), projector=beside)


def join_files(path: Path, files: list[GgufFile]) -> Checkpoint:
    """The checkpoint of a model's parts. `path`: the file that the user named. Raises as `open_checkpoint`."""
    first = files[0]
    tensors = _tensors(path, files)
    config = _config(first, tensors)
    if config.get("rope_scaling", {}).get("rope_type") == "longrope":  # the config now has the factors
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("rope_factors_")}
    return Checkpoint(
        path=path, format="gguf", config=config, tensors=tensors, canonical_names=True,
        files=tuple(file.path for file in files), generation_config=_generation(config, first.metadata),
        **text_readers("from_gguf", first.metadata, str(path)),
    )  # fmt: skip


def _generation(config: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of generation_config.json, which llama.cpp's converter stores in the metadata."""
    said = {name: written_number(metadata[key]) for name, key in gguf_names.SAMPLING.items() if key in metadata}
    return {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config} | said


def read_parts(path: Path) -> list[GgufFile]:
    """All parts of the model that a file belongs to; the first has the metadata. Raises ModelError for a missing or
    damaged part."""
    names = hub.part_names(path.name)
    for name in names:
        if len(names) > 1 and not path.with_name(name).exists():
            raise ModelError(f"{path} is one of {len(names)} parts, but {name} is missing", "download all parts")
    return [read(path.with_name(name)) for name in names]


def _tensors(path: Path, files: list[GgufFile]) -> dict[str, Tensor]:
    raw: dict[str, Tensor] = join({str(file.path): file.tensors for file in files}, str(path))
    if not {"token_embd.weight", "fc.weight"} & raw.keys():  # drafters (fc) read the embedding of their target
        raise ModelError(f"{path} has no token_embd.weight", "is it a language model's own file, not an adapter?")
    names = gguf_names.canonical_names(raw)
    found = {names[name]: replace(tensor, name=names[name]) for name, tensor in raw.items()}
    for name in [each for each in found if each.endswith(_OF_EXPERTS)]:
        layer = name.removesuffix(_OF_EXPERTS)
        stack = found.get(f"{layer}mlp.experts.down_proj.weight")
        if stack and stack.dtype == "NVFP4" and f"{layer}router.scale" not in found:  # NVFP4's scale of each matrix
            own = f"{layer}mlp.experts.down_proj.scale"
            found[own] = replace(found.pop(name), name=own)
    return found


def _plain(value: Any) -> Any:
    """Per-layer arrays of one repeated number become that number; other arrays become lists."""
    if isinstance(value, np.ndarray):
        items = value.tolist()
        return items[0] if items and len(set(items)) == 1 else items
    return value


BIASED = ("q_proj", "q_a_proj", "kv_a_proj_with_mqa", "qkv_proj")
"""If attention has biases, at least one of these projections has one."""


def _positive(value: object, *, per_layer: bool) -> bool:
    if isinstance(value, list):
        return per_layer and bool(value) and all(isinstance(item, int) and item >= 0 for item in value)
    return isinstance(value, int) and value > 0


def _config(file: GgufFile, tensors: dict[str, Tensor]) -> dict[str, Any]:
    metadata, path = file.metadata, file.path
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelError(f"{path} has no general.architecture", "is it a language model?")
    config: dict[str, Any] = {"model_type": arch, **gguf_names.IMPLIED.get(arch, {})}
    for key, name in gguf_names.KEYS.items():
        if (value := metadata.get(f"{arch}.{key}")) is not None:
            config[name] = _plain(value)
            if not isinstance(config[name], int | float | list):
                what = f"{path}: {arch}.{key} is {value!r}, but must be a number"
                raise ModelError(what, "convert the model again")
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"):
        # of these only the number of heads may differ by layer
        if not _positive(config.get(name), per_layer=name == "num_attention_heads"):
            raise ModelError(f"{path}: {name} of {arch!r} is {config.get(name)!r}", "convert the model again")
    heads = config.get("num_nextn_predict_layers", 0)
    if not isinstance(heads, int) or not 0 <= heads < config["num_hidden_layers"]:
        raise ModelError(f"{path}: {heads!r} of {config['num_hidden_layers']} blocks are heads", "convert it again")
    heads = heads or _undeclared_heads(tensors, config["num_hidden_layers"])
    config["num_hidden_layers"] -= heads  # llama.cpp counts them as blocks
    embedding = tensors.get("embed_tokens.weight")
    config["vocab_size"] = embedding.shape[0] if embedding else len(metadata.get("tokenizer.ggml.tokens", ()))
    if (per_layer := tensors.get("embed_tokens_per_layer.weight")) is not None:
        config["vocab_size_per_layer_input"] = per_layer.shape[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    parts = {re.sub(r"^layers\.\d+\.", "", name) for name in tensors}
    config["attention_bias"] = any(f"self_attn.{part}.bias" in parts for part in BIASED)
    config["attention_out_bias"] = "self_attn.o_proj.bias" in parts
    config["mlp_bias"] = "mlp.up_proj.bias" in parts
    keyed = [name.replace(".k_proj.", ".v_proj.") for name in tensors if name.endswith("self_attn.k_proj.weight")]
    config["attention_k_eq_v"] = not all(name in tensors for name in keyed)
    config["use_qk_norm"] = "self_attn.q_norm.weight" in parts
    if "mlp_layer_types" in config:
        sparse = [f"layers.{i}.mlp.gate.weight" in tensors for i in range(config["num_hidden_layers"])]
        config["mlp_layer_types"] = ["sparse" if each else "dense" for each in sparse]
    config["mamba_rms_norm"] = "linear_attn.norm.weight" in parts
    config |= _heads(config, metadata) | _special_ids(metadata)
    known = (*gguf_names.KEYS, *gguf_names.HARMLESS, *(f"rope.scaling.{key}" for key in gguf_names.SCALING))
    read = {f"{arch}.{key}" for key in known}
    unknown = {key: _plain(value) for key, value in metadata.items() if key.startswith(f"{arch}.") and key not in read}
    return config | unknown | rope_config(metadata, tensors, config)


def _undeclared_heads(tensors: dict[str, Tensor], num_blocks: int) -> int:
    """Number of blocks at the end that are MTP modules, for files whose metadata does not declare them."""
    count = 0
    while count < num_blocks - 1 and f"layers.{num_blocks - 1 - count}.eh_proj.weight" in tensors:
        count += 1
    return count


def _heads(config: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """Config keys of attention heads: num_key_value_heads, head_dim, and v_head_dim if it differs from head_dim."""
    num_heads, arch = config["num_attention_heads"], config["model_type"]
    heads = {"num_key_value_heads": config.get("num_key_value_heads", num_heads)}
    if "head_dim" not in config and isinstance(num_heads, int):
        heads["head_dim"] = config["hidden_size"] // num_heads
    rotary, width = (metadata.get(f"{arch}.{key}") for key in ("rope.dimension_count", "attention.value_length"))
    if "kv_lora_rank" in config:
        return heads | ({"qk_rope_head_dim": rotary} if isinstance(rotary, int) else {})
    return heads | ({"v_head_dim": width} if width not in (None, {**heads, **config}.get("head_dim")) else {})


def _special_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    """Config keys bos_token_id and eos_token_id. The latter has all ids that end a sequence, a turn or a message."""
    special: dict[str, Any] = {}
    if isinstance(bos := metadata.get("tokenizer.ggml.bos_token_id"), int):
        special["bos_token_id"] = bos
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    if ids := list(dict.fromkeys(end for end in ends if isinstance(end, int))):
        special["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    return special


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""RoPE scaling of Llama 3.1 to 3.3. Their GGUF files only have the resulting factors (rope_freqs)."""


def rope_config(
    metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[str, Any]:
    """The RoPE keys of the config. `config`: has model_type, head_dim and perhaps rope_theta. Raises ModelError."""
    arch, head_dim = config["model_type"], config.get("head_dim")
    theta = config.get("rope_theta", 10000.0)
    if not isinstance(theta, int | float) or not 0 < theta < math.inf:
        raise ModelError(f"{arch}.rope.freq_base is {theta!r}, but must be above 0", "convert the model again")
    rope: dict[str, Any] = {"rope_theta": theta}
    rotary = metadata.get(f"{arch}.rope.dimension_count")
    if rotary is not None and not isinstance(rotary, int):
        raise ModelError(f"{arch}.rope.dimension_count is {rotary!r}, but must be a number", "convert the model again")
    if "kv_lora_rank" not in config and isinstance(head_dim, int):  # MLA has separate rotated features
        rope["partial_rotary_factor"] = rotary / head_dim if isinstance(rotary, int) else 1.0
    if longrope := _longrope(metadata, arch, tensors):
        return rope | {"rope_scaling": longrope}
    scaling = _declared(metadata, f"{arch}.rope.scaling.")
    factors = tensors.get("rope_freqs.weight")
    if factors is not None and factors.here:
        divisors = _from_factors(factors.float32(), float(theta))
        if divisors and scaling:
            raise ModelError(f"{arch}.rope.scaling.type is {scaling['rope_type']!r}, but rope_freqs scales too")
        scaling = scaling or divisors
    sections = metadata.get(f"{arch}.rope.dimension_sections")
    if isinstance(sections, np.ndarray):  # a fourth axis is not used
        scaling = {"rope_type": "mrope", **(scaling or {}), "mrope_section": sections[:3].tolist()}
    return rope | ({"rope_scaling": scaling} if scaling else {})


def _longrope(metadata: Mapping[str, Any], arch: str, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """rope_scaling of LongRoPE: frequency divisors for short and long contexts, factor of sin and cos; or None."""
    both = [tensors.get(f"rope_factors_{length}.weight") for length in ("short", "long")]
    if not all(each is not None and each.here for each in both):
        return None
    short, long = (each.float32().tolist() for each in both if each is not None)
    scaling = f"{arch}.rope.scaling"
    found = {"attention_factor": metadata.get(f"{scaling}.attn_factor")}
    found["original_max_position_embeddings"] = metadata.get(f"{scaling}.original_context_length")
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **found}


def _declared(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any] | None:
    kind = metadata.get(f"{prefix}type", "linear" if f"{prefix}factor" in metadata else "none")
    if not isinstance(kind, str):
        raise ModelError(f"{prefix}type is {kind!r}, but must be a word", "convert the model again")
    for key, neutral in gguf_names.SCALING_NEUTRAL.items():
        if metadata.get(prefix + key, neutral[0]) not in neutral:
            raise ModelError(f"{prefix}{key} is {metadata[prefix + key]}, which is not supported", f"known: {neutral}")
    scaling = {name: metadata[prefix + key] for key, name in gguf_names.ROPE_KEYS.items() if prefix + key in metadata}
    if multiplier := metadata.get(f"{prefix}yarn_log_multiplier"):  # 0.1 * mscale_all_dim, and mscale is the same
        scaling["mscale"] = scaling["mscale_all_dim"] = 10 * float(multiplier)
    return {"rope_type": kind, **scaling} if kind != "none" and scaling else None


def _from_factors(factors: NDArray[np.float32], theta: float) -> dict[str, Any] | None:
    """rope_scaling whose frequency divisors are `factors` [rotary_dim / 2]; None if all are 1.

    If Llama 3's formula gives these factors, type llama3; else type rope_freqs with the factors themselves."""
    if factors.size == 0 or np.all(factors == 1):
        return None
    largest = float(factors.max())
    inv_freq = theta ** (-np.arange(factors.size, dtype=np.float64) / factors.size)
    turns = LLAMA3["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    if largest >= 1 and np.allclose(factors, 1 / (kept + (1 - kept) / largest), rtol=1e-4):
        return {"rope_type": "llama3", "factor": largest, **LLAMA3}
    return {"rope_type": "rope_freqs", "factors": factors.tolist()}


FORMAT = Format(detect, open_checkpoint)
