"""`headstart inspect` of a LoRA adapter: its rank and matrices, and whether it fits a model."""

from collections import Counter
from pathlib import Path
from typing import Any

from headstart.core import Report
from headstart.errors import ModelError
from headstart.formats.adapter import AdapterFile, read_adapter
from headstart.formats.base import Checkpoint
from headstart.models.lora import fit_adapter
from headstart.models.tensors import find_family, read_config


def inspect_adapter(path: Path, target: Checkpoint | None) -> Report:
    """The report of an adapter; not ok if it does not fit `target`. Raises ModelError for a damaged adapter."""
    adapter = read_adapter(path)
    modules = Counter(name.removesuffix(".weight").rpartition(".")[2] for name in adapter.tensors)
    count = sum(a.size + b.size for a, b in (each.factors for each in adapter.tensors.values()))
    data: dict[str, Any] = {
        "path": str(path), "kind": "lora", "format": "gguf" if adapter.from_gguf else "peft", "rank": adapter.rank,
        "base": adapter.base or None, "parameters": count, "modules": dict(sorted(modules.items())), "fits": None,
    }  # fmt: skip
    trained = f", trained on {adapter.base}" if adapter.base else ""
    lines = [
        f"{path}: a LoRA adapter of rank {adapter.rank} with {count / 1e6:.3g} million weights{trained}",
        f"It adds to: {', '.join(f'{name} ({number})' for name, number in sorted(modules.items()))}.",
    ]
    if target is None:
        lines.append(f"Serve it: headstart serve MODEL --lora NAME={path}")
    elif why := misfit(adapter, target):
        data |= {"fits": False, "why": why}
        lines.append(f"It does not fit {target.path}: {why}")
    else:
        data["fits"] = True
        lines.append(f"It fits {target.path}: headstart serve {target.path} --lora NAME={path}")
    return Report(ok=data["fits"] is not False, data=data, lines=lines)


def misfit(adapter: AdapterFile, target: Checkpoint) -> str:
    """Why an adapter does not fit a model; empty if it fits."""
    try:
        family = find_family(target)
        fit_adapter(adapter, target, family, read_config(target, family))
    except ModelError as error:
        return error.message
    return ""
