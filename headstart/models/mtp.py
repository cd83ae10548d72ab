"""`MTPLayout`: where the checkpoints of a family keep their MTP modules, how many, and what other engines call them."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from headstart.errors import ModelError
from headstart.formats.sizes import NESTED, Sizes, as_size, lookup

MAX_MODULES = 64
COUNT_KEYS = (
    "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "nextn_predict_layers", "num_mtp_modules",
    "mtp_config.num_nextn_predict_layers", "num_nextn_layers", "mtp_num_layers", "n_mtp_layers",
)  # fmt: skip
"""Config keys of the number of MTP modules, at top level or under a key of NESTED; the first that is not 0 counts."""

LLAMA_CPP_KEYS = (
    "context_length", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon", "attention.key_length", "expert_used_count", "expert_feed_forward_length",
)  # fmt: skip
"""Metadata keys after the architecture that most GGUF files have."""
SIGMOID_EXPERT_KEYS = (
    "expert_group_count", "expert_group_used_count", "expert_shared_count", "leading_dense_block_count",
    "expert_weights_scale", "expert_weights_norm",
)  # fmt: skip
INDEXER_KEYS = ("index_n_heads", "index_head_dim", "index_topk")  # config keys of sparse attention with an indexer
SIGMOID = 2  # llama.cpp's number of the sigmoid as routing function

DeclaredShapes = dict[str, tuple[Any, ...]]
"""Tensor names -> shapes, of whole numbers, Unknown, or None for any size. A name that begins with `?` is optional."""


class Declared(NamedTuple):
    """Number of MTP modules that a config promises, and the key that says so (dotted; None: no key does)."""

    modules: int
    key: str | None


@dataclass(frozen=True, kw_only=True)
class XllmDraft:
    """What xLLM's export_mtp.py makes of a family's module."""

    architecture: str
    fp8_blocks: bool = False  # the tool dequantizes FP8 blocks of this family
    sparse_indexer: bool = False  # the draft chooses positions once for all its steps
    variants: Mapping[str, str] = field(default_factory=dict)  # config key that is set -> model type to take instead
    as_layer: bool = False  # a module that has names of its own becomes layer 0
    several: bool = False  # the draft may have more than one module
    shared: bool = False  # the draft has the trunk's embedding and LM head
    config: Mapping[str, object] = field(default_factory=dict)  # more keys of the draft's config.json
    nested_config: Mapping[str, object] = field(default_factory=dict)  # keys of its text_config
    """A value `count` stands for the number of modules; a list of one is repeated for each module."""


@dataclass(frozen=True, kw_only=True)
class LlamaCppDraft:
    """What llama.cpp's converter writes of a family's module; `architecture` is its name there."""

    architecture: str
    pre_tokenizer: str
    keys: tuple[str, ...]  # metadata keys after the architecture, of those in formats/gguf_names.KEYS
    norm_shift: float = 0.0  # added to norm weights
    rotary: float = 1.0  # share of a head that is rotated, where the config does not say
    recurrent: bool = False  # the trunk has recurrent layers
    gating: int | None = None  # llama.cpp's number of the routing function
    special: Mapping[str, str] = field(default_factory=dict)  # special tokens by their text


@dataclass(frozen=True, kw_only=True)
class MTPLayout:
    """The MTP modules of one family. What their tensors are called and shaped follows from Family.names, Family.head
    and the family's layers; here stands the rest."""

    title: str
    key: str = ""  # the family's name in reports; empty: that of its file
    norm: Literal["w", "1+w"] = "w"  # RMSNorm multiplies by the stored weight, or by one more
    count_key: str = "num_nextn_predict_layers"  # the family's own key of the number of modules
    default: int = 0  # modules where the config has no such key
    released: int = 0  # modules of released checkpoints whose configs have no such key; there may be none
    max_modules: int = 0  # modules that other engines load at most, `served`: that this engine runs; 0: any number
    served: int = 0
    spare: int = 0  # how many more than there are the key counts, where it counts more than one
    architectures: tuple[str, ...] = ()  # parts of architecture names, for configs whose model_type is another
    variant_of: str = ""  # a model_type that runs otherwise, of which these checkpoints have modules of another kind
    requires: str = ""  # a config key that these checkpoints have; `unless`: one that they do not have
    unless: str = ""
    own: tuple[str, ...] = ()  # `embedding`, `lm_head`: of the module itself, not the trunk's
    rope: Literal["trunk", "sliding", "none"] = "trunk"
    """Rotary positions as in the trunk's full layers, as in its sliding layers, or none."""
    per_layer: tuple[str, ...] = ()
    """Config lists that must go on over the MTP layers; `per_module`: lists with one entry for each module."""
    per_module: tuple[str, ...] = ()
    note: str = ""  # a warning about every such checkpoint
    method: str = "mtp"  # vLLM's word in --speculative-config
    vllm_eagle: bool = False  # vLLM has an EAGLE class of the module's formula
    speculators: tuple[str, ...] = ()  # model types for which speculators has an MTP class
    xllm: XllmDraft | None = None
    not_xllm: str = ""  # why xLLM has no draft of this family, although its tool takes the name for another family's
    llama_cpp: tuple[str, ...] = ()  # llama.cpp's architectures of the family with a graph for the module
    not_llama_cpp: str = ""  # why no GGUF file can hold the module
    llama_cpp_draft: LlamaCppDraft | None = None
    # of families that are only described (models/described.py), whose layers do not name their tensors
    tensors: Callable[[Sizes, int, int, Container[str]], DeclaredShapes] | None = None
    """(sizes, module, its layer in the trunk's numbering, names that are there) -> tensors; what all modules share
    comes with module 0. Names are without wrappers; other tensors may stand beside these unless `closed`."""
    parts: Mapping[str, str] = field(default_factory=dict)  # parts of names in files -> what `tensors` calls them
    closed: bool = False
    trailing: bool = True  # the modules are the layers after the trunk's last
    concat: Literal["e;h", "h;e", "sum", ""] = "e;h"
    """Order of embedding and hidden state in the projection's input; `sum`: each has a projection."""

    def declared(self, config: Mapping[str, Any]) -> Declared:
        """The modules that a config promises. Raises ModelError for an absurd number."""
        found = declared(config, self.count_key)
        if found.key is None:
            return Declared(self.default, None)
        return Declared(max(found.modules - self.spare, min(found.modules, 1)), found.key)

    def serves(self, config: Mapping[str, Any]) -> bool:
        """Is the config that of this layout, among those of its family?"""
        return (not self.requires or self.requires in config) and not (self.unless and config.get(self.unless))


def declared(config: Mapping[str, Any], first: str = COUNT_KEYS[0]) -> Declared:
    """The modules that a config of any family promises, by any spelling of the key, `first` before others. Raises
    ModelError for an absurd number."""
    promises = [
        (f"{prefix}{key}", value)
        for prefix in ("", *(f"{name}." for name in NESTED))
        for key in dict.fromkeys((first, *COUNT_KEYS))
        if (value := lookup(config, prefix + key)) is not None and not isinstance(value, list)
    ]
    sizes = [(key, as_size(value) or 0) for key, value in promises]
    key, count = next((pair for pair in sizes if pair[1]), sizes[0] if sizes else (None, 0))
    if count > MAX_MODULES:
        raise ModelError(f"config.json: {key} is {count}, but at most {MAX_MODULES} MTP modules make sense")
    return Declared(count, key)


def count_keys() -> tuple[str, ...]:
    """COUNT_KEYS without the objects that they stand in."""
    return tuple(dict.fromkeys(key.rpartition(".")[2] for key in COUNT_KEYS))
