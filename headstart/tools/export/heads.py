"""Recognizes the tensors and config keys of a checkpoint's MTP head by their names, for all families."""

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
    """Returns the names of the head's tensors: those with MTP names, and those of layers after the trunk's last."""
    layers = as_size(text_config(config).get("num_hidden_layers")) or 0
    return {name for name in names if part_of(name, layers) == MTP}


def trunk_prefix(names: Iterable[str]) -> str:  # wrapper before "layers.", such as "model."
    return next((name.removesuffix(strip_wrapper(name)) for name in names if part_of(name, 0) in (LAYERS, EXPERTS)), "")


def can_be_quantized(name: str) -> bool:
    """Returns whether `name` is a matrix of the decoder block, which FP8 checkpoints quantize."""
    return bool(MATRIX.search(name)) and not LINKING.search(name) and "weights_proj" not in name


def head_keys(config: Mapping[str, Any], path: Path = ()) -> dict[Path, Any]:
    """Returns {path of a config key: value} of the keys that describe the head. `path`: path of this section."""
    keys: dict[Path, Any] = {}
    for key, value in config.items():
        if CONFIG_KEY.search(key):
            keys[*path, key] = value
        elif isinstance(value, dict) and key in NESTED:
            keys |= head_keys(value, (*path, key))
    return keys


def with_keys(config: Mapping[str, Any], keys: Mapping[Path, Any]) -> dict[str, Any]:
    """Returns a copy of the config with these keys. Keys of a missing section go to the top level."""
    changed = copy.deepcopy(dict(config))
    for path, value in keys.items():
        section = changed
        for part in path[:-1]:
            section = section[part] if isinstance(section.get(part), dict) else changed
        section[path[-1]] = value
    return changed


def without_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config without a head: counts are 0 (a missing key might default to 1), lists are empty."""
    keys, counts = head_keys(config), count_keys()
    lists: dict[Path, Any] = {path: [] for path, value in keys.items() if isinstance(value, list)}
    return with_keys(config, lists | {path: 0 for path in keys if path[-1] in counts})
