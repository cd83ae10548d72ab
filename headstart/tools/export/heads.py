"""Which tensors and config keys of a checkpoint are its MTP head, for all families, by how they are called."""

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

from headstart.formats.base import strip_wrapper
from headstart.formats.sizes import NESTED, as_size, text_config
from headstart.formats.tensor_parts import EXPERTS, LAYERS, MTP, part_of
from headstart.models.mtp import count_keys

Path = tuple[str, ...]
CONFIG_KEY = re.compile(r"(?:^|_)(?:mtp|nextn)(?:_|$)")
LINKING = re.compile(r"(?:^|\.)(?:eh_proj|e_proj|h_proj|fc|fc_\w+|input_proj|mtp_linear_proj)\.")
"""Projections from hidden state and embedding into the block: engines keep them unquantized."""
MATRIX = re.compile(r"\.(?:\w+_proj|kv_a_proj_with_mqa|w[123]|wq_\w+|wk\w*|wo_\w+)\.weight$")


def head_names(names: Iterable[str], config: Mapping[str, Any]) -> set[str]:
    """Tensors under a name of their own, and of layers after the trunk's last."""
    layers = as_size(text_config(config).get("num_hidden_layers")) or 0
    return {name for name in names if part_of(name, layers) == MTP}


def trunk_prefix(names: Iterable[str]) -> str:
    return next((name.removesuffix(strip_wrapper(name)) for name in names if part_of(name, 0) in (LAYERS, EXPERTS)), "")


def can_be_quantized(name: str) -> bool:
    """Is it a matrix of the decoder block that quantized checkpoints of its kind keep in FP8?"""
    return bool(MATRIX.search(name)) and not LINKING.search(name) and "weights_proj" not in name


def head_keys(config: Mapping[str, Any], path: Path = ()) -> dict[Path, Any]:
    """Config keys that describe the head, by where they stand; `path` leads to this section."""
    keys: dict[Path, Any] = {}
    for key, value in config.items():
        if CONFIG_KEY.search(key):
            keys[*path, key] = value
        elif isinstance(value, dict) and key in NESTED:
            keys |= head_keys(value, (*path, key))
    return keys


def with_keys(config: Mapping[str, Any], keys: Mapping[Path, Any]) -> dict[str, Any]:
    """A copy of the config with these keys; where there is no such section, they go to the top level."""
    changed = copy.deepcopy(dict(config))
    for path, value in keys.items():
        section = changed
        for part in path[:-1]:
            section = section[part] if isinstance(section.get(part), dict) else changed
        section[path[-1]] = value
    return changed


def without_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with every count at zero (a class may have a default of one) and lists of heads empty."""
    keys, counts = head_keys(config), count_keys()
    lists: dict[Path, Any] = {path: [] for path, value in keys.items() if isinstance(value, list)}
    return with_keys(config, lists | {path: 0 for path in keys if path[-1] in counts})
