"""`DrafterFormat`: a form in which other programs publish drafters; `identify` names the format of a config.json.

A file of heads/ declares the formats of its kind in `HEAD.formats`, formats that the engine does not run among them.
"""

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from headstart import registry
from headstart.formats.base import Tensor, strip_wrapper
from headstart.formats.sizes import Sizes, as_size, lookup

Document = Mapping[str, Any]
Arrays = Mapping[str, Any]  # arrays, or (bits, dtype name), as formats.safetensors.save takes them
DeclaredShapes = dict[str, tuple[Any, ...]]
"""Tensor names -> shapes, of whole numbers, sizes.Unknown, or None for any size. A name that begins with `?` is
optional."""
Present = Container[str]  # names of the tensors that are there: they decide between spellings


def _nothing(sizes: Sizes, index: int, present: Present) -> DeclaredShapes:
    return {}


@dataclass(frozen=True, kw_only=True)
class DrafterFormat:
    """One published form of a drafter."""

    key: str
    title: str
    method: str  # vLLM's word in --speculative-config, which launchers map to their own
    read: Callable[[Document, Mapping[str, Tensor], Path], Any] | None = None
    """Gives a HeadCheckpoint. Raises ModelError for what is missing, wrong, or not run here. None: it is not loaded."""
    write: Callable[[Any, Arrays], tuple[dict[str, Any], dict[str, Any]]] | None = None
    """config.json and tensors of a HeadCheckpoint, in place of headstart's own layout."""
    tensors: Callable[[Sizes, int, Present], DeclaredShapes] = _nothing
    """(sizes, layer or head, names that are there) -> its tensors; what all share comes with 0."""
    # what tells it from others, the first of these first
    requires: str = ""  # a config key that no other file has
    speculators: tuple[str, ...] = ()  # `speculators_model_type`
    says: Mapping[str, Any] = field(default_factory=dict)  # config keys and their values
    model_types: tuple[str, ...] = ()
    gguf: tuple[str, ...] = ()  # architectures of llama.cpp
    architectures: tuple[str, ...] = ()  # parts of an architecture's name
    keys: tuple[str, ...] = ()  # config keys that no whole model has; `markers`: tensors that none has
    markers: tuple[str, ...] = ()
    bare: Mapping[str, Any] = field(default_factory=dict)
    """Keys and values of a config.json beside which no tensors are known."""
    fallback: bool = False  # its rules fit files of other formats too, which are asked first
    # what its config says
    renamed: tuple[tuple[str, str], ...] = ()  # beginnings of names in files -> those of `tensors`
    count: tuple[str, ...] = ()  # keys of the number of layers or heads
    aux: Literal["input", "output"] | None = None
    """Layer ids count a layer's input (EAGLE-3) or its output (DFlash); None: it reads no layers."""
    reduced: bool = False  # it may draft from a part of the vocabulary, which d2t maps
    block: tuple[str, ...] = ()
    """Keys of the rows that one pass drafts; `anchored`: the first of them is the last token and drafts none."""
    anchored: bool = False
    targets: str = ""  # how the target's model_type begins
    of_family: Literal["", "module", "block"] = ""
    """Its tensors are those of a family's MTP module without its layer, or of the block of one."""

    def canonical(self, name: str) -> str:
        """A tensor's name as `tensors` has it."""
        name = strip_wrapper(name)
        for old, new in self.renamed:
            name = re.sub(rf"(^|\.){re.escape(old)}", rf"\g<1>{new}", name)
        return name

    def num_parts(self, sizes: Sizes) -> int:
        """Layers or heads, as the config says; 1 where it does not."""
        return max((as_size(lookup(sizes.config, key)) or 0 for key in self.count), default=0) or 1

    def rows(self, sizes: Sizes) -> int | None:
        """Rows of a block drafter's pass; None where nothing says it."""
        return next((size for key in self.block if (size := as_size(lookup(sizes.config, key)))), None)

    def drafts(self, sizes: Sizes) -> int | None:
        """Tokens that one pass of a block drafter drafts."""
        rows, told = self.rows(sizes), lookup(sizes.config, "sample_from_anchor")
        anchored = not told if isinstance(told, bool) else self.anchored
        return None if rows is None else max(1, rows - anchored)


MARK = "headstart_head"  # key of config.json of heads in headstart's own layout (heads/files.py)
OWN = DrafterFormat(key="headstart", title="headstart", method="headstart", requires=MARK, aux="input")


def published_formats() -> list[DrafterFormat]:
    """All formats, in the order in which a config is compared."""
    kinds = (registry.find("heads", name).HEAD for name in registry.available("heads"))
    return [OWN, *sorted((each for kind in kinds for each in kind.formats), key=lambda each: each.fallback)]


def identify(config: Document, names: Present | None = None) -> DrafterFormat | None:
    """The format of a drafter's config.json; None for a whole or unknown model. `names`: of tensors, if known."""
    formats = published_formats()
    found = next((each for each in formats if _says(config, each)), None)
    if found is not None or config.get("speculators_model_type") is not None:
        return found
    for rule in (_has_architecture, _has_key, lambda _, each: any(name in (names or ()) for name in each.markers)):
        if found := next((each for each in formats if rule(config, each)), None):
            return found
    return None


def identify_bare(config: Document) -> DrafterFormat | None:
    """As `identify`, of a config.json that a whole model could have, but for its sizes."""
    if (found := identify(config)) is not None or config.get("speculators_model_type") is not None:
        return found
    return next((each for each in published_formats() if each.bare and _has(config, each.bare)), None)


def _says(config: Document, each: DrafterFormat) -> bool:
    algorithm, kind = config.get("speculators_model_type"), config.get("model_type")
    if each.requires and each.requires in config:
        return True
    if algorithm is not None:
        return algorithm in each.speculators
    if each.says and _has(config, each.says):
        return True
    patterns = (*each.model_types, *each.gguf)
    return isinstance(kind, str) and any(fnmatchcase(kind, pattern) for pattern in patterns)


def _has(config: Document, values: Document) -> bool:
    return all(lookup(config, key) == value for key, value in values.items())


def _has_key(config: Document, each: DrafterFormat) -> bool:
    return any(config.get(key) is not None for key in each.keys)


def _has_architecture(config: Document, each: DrafterFormat) -> bool:
    names = config.get("architectures")
    written = " ".join(map(str, names)).lower() if isinstance(names, list) else ""
    return any(word in written for word in each.architectures)


# Tensors that several formats have.


def block_shapes(
    at: str, s: Sizes, present: Present, *, qk_norm: bool = False, input_norm: bool = True, reads: int = 1
) -> DeclaredShapes:
    """A Llama block under `at`, Qwen3's with `qk_norm`. `reads`: vectors that q, k and v read."""
    hidden, attention = s["hidden"], f"{at}self_attn."
    norms = ("input_layernorm", "post_attention_layernorm")
    return {
        **{f"{at}{name}.weight": (hidden,) for name in norms[0 if input_norm else 1 :]},
        **attention_shapes(attention, s, present, reads),
        **({f"{attention}{name}.weight": (s["head_dim"],) for name in ("q_norm", "k_norm")} if qk_norm else {}),
        f"{at}mlp.gate_proj.weight": (s["inner"], hidden),
        f"{at}mlp.up_proj.weight": (s["inner"], hidden),
        f"{at}mlp.down_proj.weight": (hidden, s["inner"]),
    }


def attention_shapes(at: str, s: Sizes, present: Present, reads: int = 1) -> DeclaredShapes:
    """Grouped attention, q, k and v apart or in one matrix; biases of them all or none."""
    hidden, dim, value = s["hidden"], s["head_dim"], s["value_dim"]
    columns = hidden if reads == 1 else reads * hidden
    rows = {"q_proj": s["heads"] * dim, "k_proj": s["kv_heads"] * dim, "v_proj": s["kv_heads"] * value}
    if f"{at}qkv_proj.weight" in present and not any(f"{at}{name}.weight" in present for name in rows):
        rows = {"qkv_proj": sum(rows.values())}
    biased = s.config.get("attention_bias") or any(f"{at}{name}.bias" in present for name in rows)
    return {
        **{f"{at}{name}.weight": (size, columns) for name, size in rows.items()},
        **({f"{at}{name}.bias": (size,) for name, size in rows.items()} if biased else {}),
        f"{at}o_proj.weight": (hidden, s["heads"] * value),
        f"?{at}o_proj.bias": (hidden,),
    }


def latent_shapes(at: str, s: Sizes, *, compressed: bool = True, reads: int = 1) -> DeclaredShapes:
    """Latent attention (MLA) under `at`, its queries `compressed` or not."""
    hidden, heads, nope, rotary = s["hidden"], s["heads"], s["nope"], s["rotary"]
    rank, latent, value = s["query_rank"], s["latent"], s["value_dim"]
    columns = hidden if reads == 1 else reads * hidden
    queries: DeclaredShapes = {f"{at}q_proj.weight": (heads * (nope + rotary), columns)}
    if compressed:
        queries = {
            f"{at}q_a_proj.weight": (rank, columns),
            f"{at}q_a_layernorm.weight": (rank,),
            f"{at}q_b_proj.weight": (heads * (nope + rotary), rank),
        }
    return {
        **queries,
        f"{at}kv_a_proj_with_mqa.weight": (latent + rotary, columns),
        f"{at}kv_a_layernorm.weight": (latent,),
        f"{at}kv_b_proj.weight": (heads * (nope + value), latent),
        f"{at}o_proj.weight": (hidden, heads * value),
    }


def draft_vocabulary(s: Sizes) -> DeclaredShapes:
    """The maps of a draft vocabulary."""
    return {"?d2t": (s["draft_vocabulary"],), "?t2d": (s["vocabulary"],)}
