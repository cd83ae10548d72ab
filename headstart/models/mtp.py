"""`MTPLayout`: where checkpoints of a family keep MTP modules, their number, and other engines' names for them."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from headstart.errors import ModelError
from headstart.formats.sizes import NESTED, Sizes, as_size, lookup
from headstart.heads.base import MAX_MODULES
from headstart.heads.published import DeclaredShapes

MTP_MODULE = "MTP module"
COUNT_KEYS = (
    "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "nextn_predict_layers", "num_mtp_modules",
    "mtp_config.num_nextn_predict_layers", "num_nextn_layers", "mtp_num_layers", "n_mtp_layers",
)  # fmt: skip
"""Config keys of the number of MTP modules, at top level or in an object of NESTED; the first nonzero value is used."""
PREFIXES = ("", *(f"{name}." for name in NESTED))
"""Places of a config's keys: the top level, and the objects of NESTED."""

LLAMA_CPP_KEYS = (
    "context_length", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon", "attention.key_length", "expert_used_count", "expert_feed_forward_length",
)  # fmt: skip
"""Metadata keys, without the architecture before them, that most GGUF files have."""
SIGMOID_EXPERT_KEYS = (
    "expert_group_count", "expert_group_used_count", "expert_shared_count", "leading_dense_block_count",
    "expert_weights_scale", "expert_weights_norm",
)  # fmt: skip
MAX_EXPERTS = 4096  # experts that are listed one by one, since a config may name any number
INDEXER_KEYS = ("index_n_heads", "index_head_dim", "index_topk")  # config keys of sparse attention with an indexer
SIGMOID = 2  # llama.cpp's number of the sigmoid as routing function


class Declared(NamedTuple):
    """Number of MTP modules that a config declares."""

    modules: int
    key: str | None  # the config key with this number, dotted if nested; None: the config has no such key


@dataclass(frozen=True, kw_only=True)
class XllmDraft:
    """How xLLM's export_mtp.py exports a family's MTP modules as a draft model."""

    architecture: str
    fp8_blocks: bool = False  # the tool dequantizes FP8 blocks of this family
    sparse_indexer: bool = False  # the draft's indexer selects positions once for all draft steps
    variants: Mapping[str, str] = field(default_factory=dict)  # config key that is set -> model type to use instead
    as_layer: bool = False  # a module that is stored outside the layers becomes layer 0
    several: bool = False  # the draft may have more than one module
    shared: bool = False  # the draft includes the trunk's embedding and LM head
    config: Mapping[str, object] = field(default_factory=dict)  # further keys of the draft's config.json
    nested_config: Mapping[str, object] = field(default_factory=dict)  # further keys of its text_config
    """In both, the value `count` stands for the number of modules; a list of one item is repeated for each module."""


@dataclass(frozen=True, kw_only=True)
class LlamaCppDraft:
    """How llama.cpp's converter writes a family's MTP module."""

    architecture: str  # llama.cpp's name of the family
    pre_tokenizer: str
    keys: tuple[str, ...]  # metadata keys, a part of formats/gguf_names.KEYS, without the architecture before them
    norm_shift: float = 0.0  # added to norm weights
    rotary: float = 1.0  # share of a head's features that is rotated, if the config has no such key
    recurrent: bool = False  # the trunk has recurrent layers
    gating: int | None = None  # llama.cpp's number of the routing function
    special: Mapping[str, str] = field(default_factory=dict)  # special tokens by their text


@dataclass(frozen=True, kw_only=True)
class MTPLayout:
    """The MTP modules of one family. Names and shapes of their tensors follow from Family.names, Family.head and the
    family's layers, unless `tensors` is set."""

    title: str
    key: str = ""  # the family's name in reports; empty: the name of its file
    count_key: str = "num_nextn_predict_layers"  # the family's config key of the number of modules
    default: int = 0  # number of modules if the config has no such key
    released: int = 0  # modules of released checkpoints whose configs lack the key; copies may have lost them
    max_modules: int = 0  # maximum that other engines load; 0: any number
    served: int = 0  # maximum that headstart runs; models with more are refused; 0: any number
    spare: int = 0  # excess of the key's value over the number of modules, if the value is above 1
    architectures: tuple[str, ...] = ()  # lower-case parts of `architectures`, if the model_type does not identify it
    requires: str = ""  # config key that checkpoints of this layout must have; only `count_key` then counts modules
    unless: str = ""  # config key that checkpoints of this layout must not have
    own: tuple[str, ...] = ()  # `embedding`, `lm_head`: parts that the module does not share with the trunk
    rope: Literal["trunk", "sliding", "none"] = "trunk"
    """RoPE as in the trunk's full layers, as in its sliding layers, or none."""
    per_layer: tuple[str, ...] = ()  # config lists with an entry for each trunk layer, then for each MTP layer
    per_module: tuple[str, ...] = ()  # config lists with an entry for each module
    note: str = ""  # a warning about every such checkpoint
    method: str = "mtp"  # `method` of vLLM's --speculative-config
    module: str = MTP_MODULE  # what a module is called in messages
    vllm_eagle: bool = False  # vLLM has an EAGLE class with the module's formula
    speculators: tuple[str, ...] = ()  # model types for which speculators has an MTP class
    xllm: XllmDraft | None = None
    not_xllm: str = ""  # why xLLM cannot draft for this family, although its tool would export the module
    llama_cpp: tuple[str, ...] = ()  # llama.cpp's architectures of the family with a graph for the module
    not_llama_cpp: str = ""  # why no GGUF file can hold the module
    llama_cpp_draft: LlamaCppDraft | None = None
    # for families that the engine cannot run (models/described.py)
    tensors: Callable[[Sizes, int, int, Container[str]], DeclaredShapes] | None = None
    """(sizes, module, its layer in the trunk's numbering, names in the files) -> tensors, names without wrappers.
    Tensors that all modules share are declared with module 0."""
    closed: bool = False  # a module has no tensors besides those of `tensors`
    trailing: bool = True  # the modules are the layers after the trunk's last
    concat: Literal["e;h", "h;e", "sum", ""] = "e;h"
    """Order of embedding and hidden state in the projection's input; `sum`: each has its own projection."""

    def declared(self, config: Mapping[str, Any]) -> Declared:
        """The MTP modules that a config declares. Raises ModelError for more than MAX_MODULES."""
        found = declared(config, self.count_key, alone=bool(self.requires))
        if found.key is None:
            return Declared(self.default, None)
        return Declared(max(found.modules - self.spare, min(found.modules, 1)), found.key)

    def serves(self, config: Mapping[str, Any]) -> bool:
        """True if the config has this layout (see `requires` and `unless`)."""
        required = not self.requires or bool(nested_value(config, self.requires))
        return required and not (self.unless and nested_value(config, self.unless))


DSPARK = MTPLayout(
    title="DSpark",
    requires="dspark_block_size",
    count_key="n_mtp_layers",
    default=3,
    method="dspark",
    module="DSpark layer",
    concat="",
    note="the mtp.* tensors are a DSpark drafter, not a classic MTP module: other engines need the method dspark",
    not_xllm="its mtp tensors are a DSpark drafter",
)
"""A DSpark drafter (heads/block.py) in place of MTP modules. Families replace the title and the places of tensors."""


def nested_value(config: Mapping[str, Any], key: str) -> Any:
    """The value of a key in the first of PREFIXES that has it; None if none has."""
    return next((value for prefix in PREFIXES if (value := lookup(config, prefix + key)) is not None), None)


def declared(config: Mapping[str, Any], first: str = COUNT_KEYS[0], *, alone: bool = False) -> Declared:
    """The MTP modules that a config of any family declares, under any of COUNT_KEYS; the key `first` is read first,
    and no other one if `alone`. Raises ModelError for more than MAX_MODULES."""
    promises = [
        (f"{prefix}{key}", value)
        for prefix in PREFIXES
        for key in dict.fromkeys((first,) if alone else (first, *COUNT_KEYS))
        if (value := lookup(config, prefix + key)) is not None and not isinstance(value, list)
    ]
    sizes = [(key, as_size(value) or 0) for key, value in promises]
    key, count = next((pair for pair in sizes if pair[1]), sizes[0] if sizes else (None, 0))
    if count > MAX_MODULES:
        raise ModelError(f"config.json: {key} is {count}, but at most {MAX_MODULES} MTP modules make sense")
    return Declared(count, key)


def count_keys() -> tuple[str, ...]:
    """COUNT_KEYS without the names of enclosing objects."""
    return tuple(dict.fromkeys(key.rpartition(".")[2] for key in COUNT_KEYS))
