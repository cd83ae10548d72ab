"""What a launcher has to know about a model, from config.json and headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart import hub
from headstart.errors import ModelError, UsageError
from headstart.formats import gguf, open_checkpoint
from headstart.formats.base import Tensor
from headstart.formats.drafters import DrafterKind, classify_path
from headstart.formats.gguf_file import read as read_gguf
from headstart.formats.json_object import read_object
from headstart.formats.mtp_families import declared, find_family, num_experts
from headstart.formats.quantization import settings_of
from headstart.formats.safetensors_file import INDEX
from headstart.formats.symbols import as_size, text_config
from headstart.tools.inspect.parts import MTP, part_of
from headstart.tools.plan.roofline import SizedModel
from headstart.tools.plan.sources import sized_model


@dataclass(frozen=True, kw_only=True)
class Facts:
    """`source` is what the engine is given; `weight_bytes` None: not known without the weights."""

    source: str
    model_type: str
    format: str  # safetensors, gguf
    weight_bytes: int | None
    modules: int  # native MTP modules whose tensors are there (of a repo: that the config declares)
    attention_heads: int
    experts: int
    quantization: str | None
    remote_code: bool = False
    declared: int = 0  # by the config
    local: bool = True
    sized: SizedModel | None = None  # where the config names the sizes


def read_facts(model: str | None) -> Facts:
    """Facts of a directory, a .gguf file or a Hub repo (of which config.json alone is fetched). Raises UsageError or
    ModelError."""
    path = Path(model).expanduser() if model else None
    if model and path and not path.exists() and not hub.is_builtin(model) and hub.is_repo(model):
        return of_config(model, read_object(hub.config_file(model)), local=False)
    trunk = hub.resolve_alias(model).trunk
    if gguf.detect(trunk):
        return of_gguf(trunk)
    config = read_object(trunk / "config.json")
    if not any(trunk.glob("*.safetensors")) and not (trunk / INDEX).exists():
        return of_config(str(trunk), config)
    return of_config(str(trunk), config, open_checkpoint(trunk).tensors)


def of_gguf(path: Path) -> Facts:
    """Any architecture: only keys that all of them share are read."""
    file = read_gguf(path)
    kind = str(file.metadata.get("general.architecture", "unknown"))

    def number(key: str) -> int:
        value = file.metadata.get(f"{kind}.{key}", 0)
        return int(value) if isinstance(value, int | float) else 0

    promised = number("nextn_predict_layers")
    there = any(".nextn." in name for name in file.tensors)
    return Facts(
        source=str(path),
        model_type=kind,
        format="gguf",
        weight_bytes=sum(tensor.nbytes for tensor in file.tensors.values()),
        modules=promised if there else 0,
        attention_heads=number("attention.head_count") or 1,
        experts=number("expert_count"),
        quantization=None,
        declared=promised,
    )


def of_config(
    source: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    *,
    local: bool = True,
) -> Facts:
    """Facts that config.json tells; with tensors, MTP modules count only if theirs are among them."""
    text = text_config(config)
    promised = declared(config, find_family(config)).modules
    layers = as_size(text.get("num_hidden_layers")) or 0
    there = tensors is None or any(part_of(name, layers) == MTP for name in tensors)
    sized = _sized(source, config, tensors)
    weight_bytes = sum(tensor.nbytes for tensor in tensors.values()) if tensors is not None else None
    return Facts(
        source=source,
        model_type=str(text.get("model_type") or "unknown"),
        format="safetensors",
        weight_bytes=weight_bytes or (int(sum(sized.weight_bytes().values())) if sized else None),
        modules=promised if there else 0,
        attention_heads=as_size(text.get("num_attention_heads")) or 1,
        experts=num_experts(config),
        quantization=settings_of(config).get("quant_method"),
        remote_code="auto_map" in config,
        declared=promised,
        local=local,
        sized=sized,
    )


def drafter_of(head: str) -> DrafterKind:
    """What kind of drafter a separate head is. Raises UsageError for one that must be exported first, or that no engine
    is known to run."""
    found = classify_path(head)
    if found.method == "headstart":
        raise UsageError(f"--head: {head} is in headstart's own layout", "write it for the engine: headstart export")
    if not found.method:
        raise UsageError(f"--head: {head} is {found.title}, which no engine here is known to run")
    return found


def _sized(source: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None) -> SizedModel | None:
    try:
        return sized_model(source, config, tensors)
    except (ModelError, UsageError):
        return None
