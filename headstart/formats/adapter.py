"""LoRA adapters: PEFT directories (adapter_config.json) and GGUF files of type `adapter`.

An adapter adds scale * B A to matrices of a model (Hu et al. 2021, "LoRA", section 4.1). scale is alpha / rank; with
rank-stabilized adapters alpha / sqrt(rank) (Kalajdzievski 2023, "A Rank Stabilization Scaling Factor").
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.core import LoraFactors
from headstart.errors import ModelError
from headstart.files import content_digest, user_path
from headstart.formats import gguf, gguf_file, gguf_names, pickled, safetensors, safetensors_file
from headstart.formats.base import Tensor
from headstart.formats.json_object import read_object

CONFIG = "adapter_config.json"
WEIGHTS = (safetensors.ADAPTER, "adapter_model.bin")
_PEFT = re.compile(r"(?:base_model\.model\.)?(?P<module>.*)\.lora_(?P<part>[AB])(?:\.[^.]+)?\.weight")
_COPY = re.compile(r"(?:base_model\.model\.)?.*(?:embed_tokens|lm_head)(?:\.base_layer)?\.weight")
"""Copies of the model's embedding and LM head (PEFT's save_embedding_layers). Only their shapes are checked."""
_GGUF = re.compile(r"(?P<module>.*)\.weight\.lora_(?P<part>[ab])")
_READ = frozenset({
    "alpha_pattern", "base_model_name_or_path", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern",
    "use_rslora",
})  # fmt: skip
"""Keys of adapter_config.json that are served. `r` and `rank_pattern` are in the shapes of the factors."""
_WITHOUT_EFFECT = frozenset({
    "auto_mapping", "corda_config", "ephemeral_gpu_offload", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type", "velora_config",
})  # fmt: skip
"""Keys about training, and keys that choose modules: the names of the factors show those modules."""
_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "none")
"""Values of all other keys that change nothing. Other values are refused."""
_CHANGE_THE_MODEL = ("corda", "lora_ga", "olora", "pissa")
"""First letters of values of init_lora_weights with which PEFT changes the model's own matrices."""


@dataclass(frozen=True, eq=False)
class LowRank:
    """The matrix B A of an adapter as a RawTensor. Operations that cannot keep it a product raise ModelError."""

    name: str
    factors: LoraFactors
    dtype: str = "F32"

    @property
    def shape(self) -> tuple[int, int]:
        return self.factors.b.shape[0], self.factors.a.shape[1]

    def fingerprint(self) -> int:
        return 0

    def float32(self) -> NDArray[np.float32]:
        return self.factors.b @ self.factors.a

    def take_rows(self, rows: NDArray[np.int64]) -> "LowRank":
        return replace(self, factors=LoraFactors(self.factors.a, np.ascontiguousarray(self.factors.b[rows])))

    def transposed(self) -> "LowRank":
        a, b = (np.ascontiguousarray(each.T) for each in self.factors)
        return replace(self, factors=LoraFactors(b, a))

    def plain(self) -> "LowRank":
        return self

    def affine(self, factor: float, offset: float) -> "LowRank":
        if offset:
            self._refuse()
        return replace(self, factors=LoraFactors(self.factors.a, self.factors.b * np.float32(factor)))

    def _refuse(self, *arguments: int) -> "LowRank":
        raise ModelError(f"LoRA of {self.name} is not supported", "merge the adapter into the model")

    part = shaped = exp = _refuse


@dataclass(frozen=True)
class AdapterFile:
    """An adapter as its files hold it."""

    path: Path
    from_gguf: bool  # names are canonical ones, rows in the order of GGUF files; else Hugging Face's
    tensors: Mapping[str, LowRank]  # by the name of the matrix that it is added to
    copies: Mapping[str, tuple[int, ...]]  # matrices of the model that were saved with it -> their shapes
    base: str  # name of the model that it was trained on; empty: unknown
    digest: str  # SHA-256 of all files that decide its factors, first 32 hexadecimal digits

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(len(each.factors.a) for each in self.tensors.values())


def is_adapter(path: Path) -> bool:
    """Whether a path is a PEFT directory without a whole model, or a GGUF file of type `adapter`."""
    if path.is_dir():
        return (path / CONFIG).is_file() and not safetensors.detect(path)
    if not gguf.detect(path):
        return False
    try:
        return gguf_file.read(path).metadata.get("general.type") == "adapter"
    except ModelError:  # a damaged file, of which the reader of models says more
        return False


def beside_model(path: Path) -> str:
    """The remark on a directory that holds a whole model and an adapter."""
    return f"a LoRA adapter lies beside the weights of {path}, and is not used; if it is not merged: --lora NAME={path}"


def read_adapter(path: Path) -> AdapterFile:
    """Reads an adapter. Raises ModelError for another kind of file, a damaged one, and variants that are not LoRA."""
    path = user_path(path)
    if not path.exists():
        raise ModelError(f"the adapter {path} does not exist", "give the path of a PEFT directory or a GGUF adapter")
    if path.is_dir():
        return _read_peft(path)
    if not gguf.detect(path):
        raise ModelError(f"{path} is no adapter", f"give a directory with {CONFIG}, or a GGUF file")
    return _read_gguf(path)


def digest_of(path: Path) -> str:
    """AdapterFile.digest of an adapter, without its factors. Raises ModelError or OSError for missing files."""
    path = user_path(path)
    return _digest(path / CONFIG, _peft_weights(path)) if path.is_dir() else _digest(path)


def _peft_weights(path: Path) -> Path:
    if not (path / CONFIG).is_file():
        raise ModelError(f"{path} is no adapter: it has no {CONFIG}", "give the directory that PEFT has written")
    file = next((path / name for name in WEIGHTS if (path / name).is_file()), None)
    if file is None:
        raise ModelError(f"{path} holds neither {' nor '.join(WEIGHTS)}", "is the download complete?")
    return file


def _read_peft(path: Path) -> AdapterFile:
    file = _peft_weights(path)
    config = read_object(path / CONFIG)
    _check_config(config, str(path / CONFIG))
    stored = safetensors_file.read_file(file) if file.suffix == ".safetensors" else pickled.read_pickle(file)
    pairs, others = _pairs(stored, _PEFT)
    copies = {name: stored.pop(name).shape for name in others if _COPY.fullmatch(name)}
    if others := [name for name in others if name in stored]:
        what = f"{file}: {others[0]} is no LoRA matrix"
        raise ModelError(what, "train without DoRA, biases, embeddings and whole modules")
    patterns, tensors = _patterns(config, path / CONFIG), {}
    for module, (a, b) in pairs.items():
        found = (value for pattern, value in patterns.items() if pattern.fullmatch(module))
        alpha = _number(next(found, config.get("lora_alpha", 8)), module, path / CONFIG)
        scale = alpha / (sqrt(len(a)) if config.get("use_rslora") else len(a))
        tensors[f"{module}.weight"] = LowRank(f"{module}.weight", _scaled(a, b, scale, f"{file}: {module}"))
    base = config.get("base_model_name_or_path")
    base = base if isinstance(base, str) else ""
    return AdapterFile(path, False, _not_empty(tensors, file), copies, base, _digest(path / CONFIG, file))


def _check_config(config: Mapping[str, Any], where: str) -> None:
    """Raises ModelError for an adapter of another kind, and for settings that the engine does not compute."""
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise ModelError(f"{where}: peft_type is {kind}, only LORA is supported", "merge it into the model with PEFT")
    for key in sorted(config.keys() - _READ - _WITHOUT_EFFECT):
        if config[key] not in _NEUTRAL:
            what = f"{where}: {key} is {config[key]!r}, which is not supported"
            raise ModelError(what, "merge the adapter into the model with PEFT: merge_and_unload()")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGE_THE_MODEL):
        what = f"{where}: init_lora_weights is {start!r}, whose training changes the model's own matrices"
        raise ModelError(what, "convert it with PEFT: save_pretrained(path_initial_model_for_weight_conversion=...)")


def _read_gguf(path: Path) -> AdapterFile:
    file = gguf_file.read(path)
    kind = file.metadata.get("general.type"), file.metadata.get("adapter.type")
    if kind != ("adapter", "lora"):
        what = f"{path}: general.type and adapter.type are {kind[0]} and {kind[1]}, not adapter and lora"
        raise ModelError(what, "convert an adapter with llama.cpp's convert_lora_to_gguf.py")
    pairs, others = _pairs(file.tensors, _GGUF)
    if others:
        raise ModelError(f"{path}: {others[0]} is no LoRA matrix", "convert it again")
    names = gguf_names.canonical_names(f"{module}.weight" for module in pairs)
    alpha, tensors = _number(file.metadata.get("adapter.lora.alpha", 0), "adapter.lora.alpha", path), {}
    for module, (a, b) in pairs.items():
        name = names[f"{module}.weight"]
        factors = _scaled(a, b, alpha / len(a) if alpha else 1, f"{path}: {module}")
        tensors[name] = LowRank(name, factors)
    base = str(file.metadata.get("general.base_model.0.name", ""))
    return AdapterFile(path, True, _not_empty(tensors, path), {}, base, _digest(path))


def _pairs(
    tensors: Mapping[str, Tensor], pattern: re.Pattern[str]
) -> tuple[dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]], list[str]]:
    """(module -> its factors A [rank, in] and B [out, rank], names of tensors that are no factors). Raises ModelError
    for a module with one factor only."""
    found: dict[str, dict[str, NDArray[np.float32]]] = {}
    others = []
    for name, tensor in sorted(tensors.items()):
        match = pattern.fullmatch(name)
        if match is None or len(tensor.shape) != 2:
            others.append(name)
        else:
            found.setdefault(match["module"], {})[match["part"].upper()] = tensor.float32()
    for module, parts in found.items():
        if len(parts) != 2:
            raise ModelError(f"the adapter has only {next(iter(parts))} of {module}, not A and B", "is it complete?")
    return {module: (parts["A"], parts["B"]) for module, parts in found.items()}, others


def _scaled(a: NDArray[np.float32], b: NDArray[np.float32], scale: float, where: str) -> LoraFactors:
    """A and scale * B. Raises ModelError for different ranks, and for factors that are not finite."""
    if len(a) != b.shape[1] or not len(a):
        raise ModelError(f"{where}: A {a.shape} and B {b.shape} have different ranks", "is the file damaged?")
    factors = LoraFactors(np.ascontiguousarray(a), np.ascontiguousarray(b * np.float32(scale)))
    if not all(np.isfinite(each).all() for each in factors):
        raise ModelError(f"{where}: the factors hold NaN or infinity", "train it again")
    return factors


def _patterns(config: Mapping[str, Any], where: Path) -> Mapping[re.Pattern[str], Any]:
    """alpha_pattern, with PEFT's rule: a pattern matches the end of a module's name. Raises ModelError for a value that
    is no object, and for an invalid regular expression."""
    try:
        return {re.compile(rf"(.*\.)?({key})"): value for key, value in (config.get("alpha_pattern") or {}).items()}
    except (AttributeError, re.error) as error:
        raise ModelError(f"{where}: alpha_pattern is invalid: {error}", "train it again") from None


def _number(value: object, what: str, where: Path) -> float:
    if not isinstance(value, int | float):
        raise ModelError(f"{where}: alpha of {what} is {value!r}, not a number", "train it again")
    return float(value)


def _not_empty(tensors: dict[str, LowRank], file: Path) -> dict[str, LowRank]:
    if not tensors:
        raise ModelError(f"{file} holds no LoRA matrices", "is it an adapter?")
    return tensors


def _digest(*paths: Path) -> str:
    return content_digest(paths)[:32]


def names_of(tensors: Iterable[str]) -> str:
    """The first names, for messages."""
    listed = sorted(tensors)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
