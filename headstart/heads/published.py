"""`DrafterFormat`: a published format of drafters; `identify` finds the format of a config.json.

Each file of heads/ declares the formats of its kind in `HEAD.formats`, including those that the engine cannot run.
"""

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from headstart import registry
from headstart.errors import ModelError
from headstart.formats.base import Tensor, strip_wrapper
from headstart.formats.sizes import Sizes, as_size, lookup
from headstart.wording import option

Document = Mapping[str, Any]
Arrays = Mapping[str, Any]  # arrays, or (bits, dtype name), as formats.safetensors.save takes them
DeclaredShapes = dict[str, tuple[Any, ...]]
"""Tensor name -> shape; a size is an int, Unknown, or None for any size. A name that begins with `?` is optional."""
Present = Container[str]  # names of the tensors in the files, to choose between spellings


@dataclass(frozen=True, kw_only=True)
class DrafterFormat:
    """One published format of a drafter."""

    key: str  # identifier of the format
    title: str  # name for people
    method: str  # `method` of vLLM's --speculative-config, which launchers map to their own names
    read: Callable[[Document, Mapping[str, Tensor], Path], Any] | None = None
    """(config.json, tensors, directory) -> HeadCheckpoint. Raises ModelError for missing, wrong or unsupported values.
    None: the engine cannot load this format."""
    tensors: Callable[[Sizes, int, Present], DeclaredShapes] = lambda sizes, index, present: {}
    """(sizes, index of a layer or head, names in the files) -> its tensors; shared tensors belong to index 0."""
    # features that identify the format, in the order in which they are compared
    requires: str = ""  # a config key that no other format has
    speculators: tuple[str, ...] = ()  # values of `speculators_model_type`
    says: Mapping[str, Any] = field(default_factory=dict)  # config keys and their values
    model_types: tuple[str, ...] = ()  # values of `model_type`, or patterns (fnmatch)
    gguf: tuple[str, ...] = ()  # architectures of llama.cpp
    gguf_marker: str = ""  # tensor by which its GGUF files differ from others of the same architecture
    architectures: tuple[str, ...] = ()  # lower-case parts of a name in `architectures`
    keys: tuple[str, ...] = ()  # config keys that no whole model has
    markers: tuple[str, ...] = ()  # tensor names that no whole model has
    bare: Mapping[str, Any] = field(default_factory=dict)
    """Config values that a whole model may have, too; they identify the format only together with `markers`."""
    fallback: bool = False  # these features also fit files of other formats, which are compared first
    # how to read the config
    renamed: tuple[tuple[str, str], ...] = ()  # (prefix of names in files, prefix in `tensors`)
    count: tuple[str, ...] = ()  # keys of the number of layers or heads
    aux: Literal["input", "output"] | None = None
    """Layer ids name a layer's input (EAGLE-3) or its output (DFlash); None: the drafter reads no layers."""
    reduced: bool = False  # the drafter may have a reduced vocabulary, mapped by d2t
    block: tuple[str, ...] = ()  # keys of the number of rows in one pass of a block drafter
    anchored: bool = False  # the first of these rows is the last committed token and drafts none
    targets: str = ""  # prefix of the target's model_type
    of_family: Literal["", "module", "block"] = ""
    """Further tensors come from a family: those of its MTP module without the layer, or of the module's block."""

    def canonical(self, name: str) -> str:
        """The name that `tensors` uses for a tensor in a file."""
        name = strip_wrapper(name)
        for old, new in self.renamed:
            name = re.sub(rf"(^|\.){re.escape(old)}", rf"\g<1>{new}", name)
        return name

    def num_parts(self, sizes: Sizes) -> int:
        """Number of layers or heads in the config; 1 if it has no such key."""
        return max((as_size(lookup(sizes.config, key)) or 0 for key in self.count), default=0) or 1

    def rows(self, sizes: Sizes) -> int | None:
        """Number of rows in one pass of a block drafter; None if the config has no such key."""
        return next((size for key in self.block if (size := as_size(lookup(sizes.config, key)))), None)

    def drafts(self, sizes: Sizes) -> int | None:
        """Number of tokens that one pass of a block drafter drafts; None if unknown."""
        rows, declared = self.rows(sizes), lookup(sizes.config, "sample_from_anchor")
        anchored = not declared if isinstance(declared, bool) else self.anchored
        return None if rows is None else max(1, rows - anchored)


IN_MODEL = "headstart reads this kind of head in its whole model only: give that model"
MARK = "headstart_head"  # key of config.json of heads in headstart's own layout (heads/files.py)


def refuse_head(config: Document, path: Path) -> None:
    """Raises ModelError if a config.json that should be a model's is that of a head."""
    found = identify(config)
    if found is not None:
        hint = "give its model, with " + option("head", str(path)) if found.read or found is OWN else IN_MODEL
        raise ModelError(f"{path} is a head, not a whole model", hint)


OWN = DrafterFormat(key="headstart", title="headstart", method="headstart", requires=MARK, aux="input")


def published_formats() -> list[DrafterFormat]:
    """All formats, in the order in which a config is compared with them."""
    kinds = (registry.find("heads", name).HEAD for name in registry.available("heads"))
    return [OWN, *sorted((each for kind in kinds for each in kind.formats), key=lambda each: each.fallback)]


def identify(config: Document, names: Present | None = None) -> DrafterFormat | None:
    """The format of a drafter's config.json; None for a whole model or an unknown format. names: tensors, if known."""
    formats = published_formats()
    found = next((each for each in formats if _matches(config, each)), None)
    if found is not None or config.get("speculators_model_type") is not None:
        return found
    for rule in (_has_architecture, _has_key, lambda _, each: any(name in (names or ()) for name in each.markers)):
        if found := next((each for each in formats if rule(config, each)), None):
            return found
    return None


def identify_bare(config: Document) -> DrafterFormat | None:
    """Like `identify`, but also finds formats by `bare` values. The caller must then look for `markers`."""
    if (found := identify(config)) is not None or config.get("speculators_model_type") is not None:
        return found
    return next((each for each in published_formats() if each.bare and _has(config, each.bare)), None)


def _matches(config: Document, each: DrafterFormat) -> bool:
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
    if "dspark_block_size" in config and not each.block:  # a whole model with a DSpark drafter may have such a key
        return False
    return any(config.get(key) is not None for key in each.keys)


def _has_architecture(config: Document, each: DrafterFormat) -> bool:
    names = config.get("architectures")
    written = " ".join(map(str, names)).lower() if isinstance(names, list) else ""
    return any(word in written for word in each.architectures)


# Tensors that several formats share.


def block_shapes(
    at: str, s: Sizes, present: Present, *, qk_norm: bool = False, input_norm: bool = True, reads: int = 1
) -> DeclaredShapes:
    """Tensors of a Llama block under prefix `at`; with qk_norm of a Qwen3 block. reads: number of concatenated vectors
    [H] that q, k and v read."""
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
    """Tensors of grouped-query attention under prefix `at`: q, k and v separate or fused, all with biases or none."""
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
    """Tensors of latent attention (MLA) under prefix `at`. compressed: queries have a low-rank factorization."""
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
    """Optional tensors that map a draft vocabulary to the target's."""
    return {"?d2t": (s["draft_vocabulary"],), "?t2d": (s["vocabulary"],)}
