"""`Family`: the declaration of a model family. Each family has a file here, named after its `model_type`."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headstart import exact
from headstart.errors import ModelError
from headstart.heads.base import BlockSpec, HeadSpec
from headstart.heads.kind import head_kind
from headstart.kernels.ops import RawTensor
from headstart.layers.build import DecoderConfig, OwnDrafter
from headstart.layers.decoder import LayerConfig
from headstart.layers.rope import CONTEXT
from headstart.layers.vision import VisionConfig
from headstart.layers.weights import Shapes
from headstart.models.keys import Config
from headstart.models.mtp import MTPLayout
from headstart.models.names import Names, trailing_name
from headstart.models.reading import Reading
from headstart.models.small import TINY, Arrays, random_arrays
from headstart.text.image_prompt import ImageFormat

NOTHING: Mapping[str, str] = {}
DECAY_RATE = ".decay_rate"  # end of the canonical names of decay rates


def drafter_spec(own: OwnDrafter, num_layers: int, vocab_size: int, layer: LayerConfig) -> HeadSpec:
    """Spec of a block drafter inside a checkpoint. Raises ModelError naming the value that is out of range."""
    block = BlockSpec(
        block_size=own.block_size, num_layers=num_layers, mask_token_id=own.mask_token_id, causal=False,
        anchor_predicts=True, markov_rank=own.markov_rank, confidence=own.confidence, in_checkpoint=True,
        vocab_size=vocab_size, draft_vocab_size=vocab_size,
    )  # fmt: skip
    return HeadSpec(kind="block", layer=layer, tap=own.tap, block=block)


@dataclass(frozen=True, kw_only=True)
class ProjectorLayout:
    """A family's vision tower in llama.cpp's projector files (see models/_clip.py)."""

    model_types: Mapping[str, str]  # type of the projector -> model_type
    names: Names  # the file's names -> canonical names under `vision.`
    # (metadata, names of the file's tensors) -> keys of config.json, keys of preprocessor_config.json
    read: Callable[[Config, Collection[str]], tuple[dict[str, Any], dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class VisionFamily:
    """Config keys and tensor names of a family's vision tower."""

    # (config.json, the trunk's sizes, preprocessor_config.json) -> (the tower, how images are prepared); None for a
    # tower of a model type that is not supported
    read: Callable[[Config, DecoderConfig, Config], tuple[VisionConfig, ImageFormat] | None]
    names: Names  # published names -> canonical names under `vision.`
    # (tensors under canonical names, sizes, whether they come from a GGUF file) -> those that VisionConfig.build takes
    adapt: Callable[[dict[str, RawTensor], VisionConfig, bool], dict[str, RawTensor]]
    # canonical name of a tensor that VisionConfig.build takes -> of the checkpoint's tensor that holds its values
    stored: Callable[[str], str] = str
    projector: ProjectorLayout | None = None
    key: str = "vision_config"  # of config.json, which promises the tower
    # canonical names of the trunk's tensors without which it reads no images
    needed: Callable[[DecoderConfig], Collection[str]] = lambda trunk: ()


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family: how to read its config.json and tensors, and its native MTP modules."""

    parse: Callable[[Config], DecoderConfig]  # config.json -> sizes and layers
    small: Mapping[str, Any] = field(default_factory=dict)  # config keys of the tiny test model, added to small.TINY
    defaults: Mapping[str, Any] = field(default_factory=dict)  # Hugging Face's defaults of absent config keys
    harmless: Mapping[str, str] = field(default_factory=dict)  # config key that may be ignored -> the reason
    names: Names = field(default_factory=Names)  # tensor names
    head: HeadSpec | None = None  # formula of native MTP modules; None: the family has none
    mtp: MTPLayout | None = None  # where checkpoints keep MTP modules
    variants: tuple[MTPLayout, ...] = ()  # of checkpoints with other modules; the first that serves a config is used
    interleaved_rope: bool = False  # GGUF files store the two elements of a rotary pair (rows of q and k) side by side
    interleaved_files: bool = False  # all files store rotary pairs like that
    # canonical names of norms whose factor is 1 + w, w the weight in Hugging Face's files; GGUF files have the factor
    shifted_norms: re.Pattern[str] | None = None
    # (tensors under canonical names, sizes, whether they come from a GGUF file) -> canonical tensors
    adapt: Callable[[dict[str, RawTensor], DecoderConfig, bool], dict[str, RawTensor]] | None = None
    restore: Callable[[Arrays, DecoderConfig], Arrays] | None = None  # the inverse of `adapt` for Hugging Face files
    # ends of canonical names of MTP modules that GGUF files have as they are, though `restore` joins or splits them
    whole_in_gguf: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()  # other model types of the family: text parts of wrappers, llama.cpp's architectures
    vision: VisionFamily | None = None  # None: no tower is built, images are refused
    scratch: Mapping[str, Any] = field(default_factory=dict)  # for `train --from-scratch`: keys added to small.SCRATCH
    nested: bool = False  # the first channels, heads and experts may be a smaller model (models/slices.py)
    unsupported: str = ""  # feature that the engine lacks (models/described.py); empty: the engine runs the family

    def read(
        self, config: Config, where: str = "config.json", *, beside: Mapping[str, str] = NOTHING, strict: bool = True,
        context: int | None = None,
    ) -> DecoderConfig:  # fmt: skip
        """Sizes and layers of a config. Raises ModelError for wrong values and, if strict, for unknown keys. where:
        file name for errors. beside: further harmless keys. context: requested context length, for some ropes."""
        reading = Reading(config, {**self.defaults, CONTEXT: context})
        sizes = self.parse(reading)
        if layout := self.layout(config):
            sizes = replace(sizes, num_mtp=self._num_mtp(layout, reading, strict))
        if strict:
            reading.check({**self.harmless, **beside}, where)
        return sizes

    @property
    def norm(self) -> Literal["w", "1+w"]:
        """Factor of RMSNorm, w being the weight in Hugging Face's files."""
        return "1+w" if self.shifted_norms else "w"

    def is_shifted(self, name: str) -> bool:
        """Whether `shifted_norms` include a canonical name."""
        return self.shifted_norms is not None and self.shifted_norms.search(name) is not None

    def read_values(self, name: str, tensor: RawTensor) -> RawTensor:
        """A tensor of Hugging Face's files as layers take it: factors of norms, decay rates in place of their
        logarithms. name: canonical."""
        if name.endswith(DECAY_RATE):
            return tensor.exp().affine(-1, 0)
        return tensor.affine(1, 1) if self.is_shifted(name) else tensor

    def _stored_values(self, name: str, array: Any) -> Any:
        """Inverse of `read_values`."""
        if name.endswith(DECAY_RATE):
            return exact.logs(-array)
        return array - 1 if self.is_shifted(name) else array

    def layout(self, config: Config) -> MTPLayout | None:
        """Where a checkpoint with this config keeps its modules."""
        return next((each for each in self.variants if each.serves(config)), self.mtp)

    def _num_mtp(self, mtp: MTPLayout, config: Config, strict: bool) -> int:
        """Number of MTP modules of a config. Raises ModelError, if strict, for more than the engine runs."""
        declared = mtp.declared(config)
        if not mtp.serves(config):
            return 0
        if declared.key is None and config.get("model_type") not in mtp.llama_cpp:
            return declared.modules or mtp.released
        if strict and mtp.served and declared.modules > mtp.served:
            what = f"config.json promises {declared.modules} MTP modules, but {mtp.served} is served here"
            raise ModelError(what, f"lower {declared.key} to {mtp.served}: a module drafts several tokens, one by one")
        return declared.modules

    def tiny_config(self, **changes: Any) -> dict[str, Any]:
        """config.json of the tiny test model. changes: keys to add or replace."""
        return {**TINY, **self.small, **changes}

    def tiny(self, **changes: Any) -> tuple[dict[str, Any], Arrays]:
        """A small random model: config.json and tensors under Hugging Face's names."""
        config = self.tiny_config(**changes)
        sizes = self.read(config)
        return config, self.as_published(random_arrays(self.shapes(sizes)), sizes)

    def shapes(self, config: DecoderConfig) -> Shapes:
        """Canonical names and shapes of a whole checkpoint."""
        head = self.head_of(config)
        return config.shapes() | (head_kind(head.kind).shapes(head, config.hidden_size) if head else {})

    def head_of(self, config: DecoderConfig) -> HeadSpec | None:
        """Spec of the native MTP modules that a config declares; None if it declares none."""
        if self.head is None or not config.num_mtp:
            return None
        if config.drafter:
            return drafter_spec(config.drafter, config.num_mtp, config.vocab_size, config.head_layer)
        recycle = config.mtp_recycle or self.head.recycle
        rows = config.vocab_size if config.mtp_lm_heads else 0
        layer = config.head_layer
        return replace(
            self.head, layer=layer, layers=config.mtp_layers, num_modules=config.num_mtp, recycle=recycle,
            own_lm_head=rows,
            output_norm=self.head.output_norm and config.mtp_output_norm, logit_scale=config.logit_scale,
        )  # fmt: skip

    def as_published(self, arrays: Arrays, config: DecoderConfig) -> Arrays:
        """Converts canonical arrays to the names and shapes of Hugging Face's files."""
        arrays = {name: self._stored_values(name, array) for name, array in arrays.items()}
        if self.restore:
            arrays = self.restore(arrays, config)
        if self.head and not self.names.of_modules:
            arrays = {trailing_name(name, config.num_layers): array for name, array in arrays.items()}
        return {self.names.theirs(name): array for name, array in arrays.items()}
