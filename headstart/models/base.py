"""What a model family declares, and how one is found. One file per family here; its name is the `model_type` of
config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headstart import registry
from headstart.errors import ModelError
from headstart.heads.base import HeadSpec
from headstart.heads.kind import head_kind
from headstart.kernels.ops import RawTensor
from headstart.layers.build import DecoderConfig, decoder
from headstart.layers.decoder import Decoder
from headstart.layers.rope import CONTEXT
from headstart.layers.weights import Shapes, Weights
from headstart.models.keys import Config
from headstart.models.names import Names, trailing_name
from headstart.models.reading import Reading
from headstart.models.small import TINY, Arrays, random_arrays

NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """`parse`: config.json -> sizes and layers; `defaults`: what Hugging Face takes for keys that are not there;
    `harmless`: keys beside those of `reading` that change nothing, and why. `small`: keys of config.json of a small
    model, beside those of small.TINY. `names`: tensor names. `build`: weights -> trunk.
    `head`: how the native MTP modules of a checkpoint work; `trailing`: they are, in some files, the layers after the
    trunk's. `interleaved_rope`: GGUF files hold the q and k rows of this family in llama.cpp's interleaved order;
    `interleaved_files`: all files do, its own code has the two halves of a rotary pair side by side.
    `adapt`: what tensors under canonical names need beside their names (tensors, sizes, from a GGUF file?); `restore`:
    the way back to Hugging Face's, for arrays. `aliases`: other names of the family: a wrapper's text part's,
    llama.cpp's. `scratch`: keys of the config that `train --from-scratch` trains, beside those of small.SCRATCH."""

    parse: Callable[[Config], DecoderConfig]
    small: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    harmless: Mapping[str, str] = field(default_factory=dict)
    names: Names = field(default_factory=Names)
    build: Callable[[Weights, DecoderConfig], Decoder] = decoder
    head: HeadSpec | None = None
    trailing: bool = False
    interleaved_rope: bool = False
    interleaved_files: bool = False
    adapt: Callable[[dict[str, RawTensor], DecoderConfig, bool], dict[str, RawTensor]] | None = None
    restore: Callable[[Arrays, DecoderConfig], Arrays] | None = None
    aliases: tuple[str, ...] = ()
    scratch: Mapping[str, Any] = field(default_factory=dict)

    def read(
        self,
        config: Config,
        where: str = "config.json",
        *,
        beside: Mapping[str, str] = NOTHING,
        strict: bool = True,
        context: int | None = None,
    ) -> DecoderConfig:
        """Sizes and layers that a config says. Raises ModelError for what is wrong in it; `strict`: also for keys that
        nobody knows. `beside`: more harmless keys. `context`: the longest text that was asked for; some ropes depend
        on it (layers/rope.py)."""
        reading = Reading(config, {**self.defaults, CONTEXT: context})
        sizes = self.parse(reading)
        if strict:
            reading.check({**self.harmless, **beside}, where)
        return sizes

    def tiny(self, **changes: Any) -> tuple[dict[str, Any], Arrays]:
        """A small random model: content of config.json, and tensors under Hugging Face's names. `changes`: keys of the
        config."""
        config = {**TINY, **self.small, **changes}
        sizes = self.read(config)
        return config, self.as_written(random_arrays(self.shapes(sizes)), sizes)

    def shapes(self, config: DecoderConfig) -> Shapes:
        """Canonical names and shapes of a whole checkpoint."""
        head = self.head_of(config)
        return config.shapes() | (head_kind(head.kind).shapes(head, config.hidden_size) if head else {})

    def head_of(self, config: DecoderConfig) -> HeadSpec | None:
        """What a config of this family promises of a head; None: nothing."""
        if self.head is None or not config.num_mtp:
            return None
        recycle = config.mtp_recycle or self.head.recycle
        own = config.vocab_size if config.mtp_lm_heads else 0
        layer = config.head_layer
        return replace(self.head, layer=layer, num_modules=config.num_mtp, recycle=recycle, own_lm_head=own)

    def as_written(self, arrays: Arrays, config: DecoderConfig) -> Arrays:
        """Canonical arrays, as Hugging Face's files have them."""
        if self.restore:
            arrays = self.restore(arrays, config)
        if self.trailing and not self.names.of_modules:
            arrays = {trailing_name(name, config.num_layers): array for name, array in arrays.items()}
        return {self.names.theirs(name): array for name, array in arrays.items()}


_INDEXER = "sparse attention with an indexer (DSA)"
_STREAMS = "several residual streams (hyper-connections)"
UNSUPPORTED: Mapping[str, str] = {
    "glm5_next": f"Kimi delta attention and {_INDEXER}", "glm5-next": f"Kimi delta attention and {_INDEXER}",
    "qwen4_exp": _STREAMS, "qwen4exp": _STREAMS,
    "mimo_v2": "projections fused in the order of several devices, and pictures (MiMo-V2.5, Pro, Omni)",
    "nemotron_h_puzzle": "layers of several sizes (Puzzle)", "mamba2": "Mamba2 layers",
    "kimi_k3": "Kimi delta attention",
    "minicpm3": "MiniCPM3's latent attention", "phimoe": "sparse-mixer routing",
    "minimax_m3": "block-sparse attention",
    "bailing_hybrid": "lightning attention (Ling 2.5) or Kimi delta attention (Ling 3)",
    "bailingmoe3": "Kimi delta attention", "hy_v4": "hyper-connections over latent attention",
}  # fmt: skip
"""model_type (or llama.cpp's architecture) of a family that is not here -> what it has and no family here has."""
ELSEWHERE = "other engines have it: headstart launch vllm MODEL, or headstart launch llamacpp FILE.gguf"
DRAFTS: Mapping[str, str] = {
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "name that model, and this one with --head"),
    "gemma4-assistant": "name that model, and the safetensors of this one with --head",
}
"""model_type of what only drafts for another model -> what to do."""


def family_named(model_type: str) -> Family:
    """By the file's name, or one of the aliases that families declare. Raises ModelError, naming the feature that is
    missing where that is known."""
    names = registry.available("models")
    if model_type.replace("-", "_") not in names:
        for name in sorted(
            names, key=lambda name: (not model_type.startswith(name), -len(name))
        ):  # those like it first
            other: Family = registry.find("models", name).FAMILY
            if model_type in other.aliases:
                return other
    if hint := DRAFTS.get(model_type):
        raise ModelError(f"{model_type} is no model by itself: it reads the keys of the one that it drafts for", hint)
    if model_type not in names and (feature := UNSUPPORTED.get(model_type)):
        raise ModelError(f"{model_type} models need {feature}, which is not supported", ELSEWHERE)
    family: Family = registry.find("models", model_type).FAMILY
    return family


def is_known(model_type: str) -> bool:
    """Does a family here serve it?"""
    try:
        family_named(model_type)
    except ModelError:
        return False
    return True


SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip


def with_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """A text model's config with the sizes that its family takes where it names none."""
    kind = config.get("model_type")
    defaults = family_named(kind).defaults if isinstance(kind, str) and is_known(kind) else {}
    return {key: defaults[key] for key in SIZES if key in defaults} | dict(config)
