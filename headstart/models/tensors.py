"""Loads a checkpoint's decoder: finds the family, renames the tensors, and builds the layers on a backend."""

import logging
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headstart.core import Progress, no_progress
from headstart.errors import ModelError
from headstart.formats.base import Checkpoint, make_tensor
from headstart.formats.gguf_names import FOUND
from headstart.formats.quantization import ACTIVATIONS, readable, readable_shapes
from headstart.formats.rows import unpermute_rows
from headstart.heads.published import MARK, refuse_head
from headstart.kernels.ops import Backend, RawTensor
from headstart.kernels.streamed import StreamedBackend, lazy
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig, build_decoder
from headstart.layers.decoder import Decoder
from headstart.layers.ngram import NUMBERS
from headstart.layers.shapes import UnreadWeights, Valueless
from headstart.layers.vision import PREFIX, VisionConfig, VisionNetwork
from headstart.layers.weights import Weights
from headstart.models import _clip
from headstart.models.base import Family, VisionFamily
from headstart.models.families import all_families, family_named
from headstart.models.joined import split_joined
from headstart.models.names import Names, trailing_modules
from headstart.placeholder import DOWNLOAD
from headstart.text.image_prompt import ImageFormat
from headstart.text.tokenizer import read_config as read_json
from headstart.wording import option

log = logging.getLogger("headstart.models")


@dataclass(frozen=True)
class LoadedDecoder:
    """A checkpoint's trunk on a backend; its other tensors can still be taken from `weights`."""

    family: Family
    config: DecoderConfig
    weights: Weights
    decoder: Decoder


def load_decoder(
    checkpoint: Checkpoint, backend: Backend, progress: Progress = no_progress, context: int | None = None
) -> LoadedDecoder:
    """Loads a checkpoint's trunk. progress: counts weights. context: requested context length. Raises ModelError."""
    family = find_family(checkpoint)
    config = read_config(checkpoint, family, context)
    tensors = canonical_tensors(checkpoint, family, config)
    if isinstance(backend, StreamedBackend):
        tensors = {name: lazy(tensor) for name, tensor in tensors.items()}
    weights = Weights(tensors, backend, str(checkpoint.path), on_take=_counter(tensors, progress))
    decoder = build_decoder(weights, config)
    check_all_used(weights)
    return LoadedDecoder(family, config, weights, decoder)


class FoundVision(NamedTuple):
    """A vision tower in a checkpoint."""

    adapt: Callable[[], dict[str, RawTensor]]  # makes the tensors that VisionConfig.build takes
    config: VisionConfig
    format: ImageFormat


def find_vision(checkpoint: Checkpoint, family: Family, trunk: DecoderConfig) -> FoundVision | None:
    """A checkpoint's vision tower; None if its config has none. Raises ModelError if the tower cannot be used: the
    model then reads text only."""
    if checkpoint.projector is not None:
        source = _projector(checkpoint, checkpoint.projector)
    elif checkpoint.config.get(family.vision.key if family.vision else "vision_config"):
        source = _own_tower(checkpoint, family)
    else:
        return None
    vision, tensors = source.family, source.tensors
    if (declared := vision.read(source.config, trunk, source.preparation)) is None:
        raise _not_supported(checkpoint.config.get("model_type"))
    if missing := sorted(name for name in declared[0].shapes() if not {name, vision.stored(name)} & tensors.keys()):
        stored = missing[0] if source.from_gguf else vision.stored(missing[0])
        raise ModelError(f"tensor {source.names.theirs(stored)} of the vision tower is missing", DOWNLOAD)
    named = checkpoint.tensors if checkpoint.canonical_names else map(family.names.canonical, checkpoint.tensors)
    if absent := sorted({*vision.needed(trunk)} - {*named}):
        raise ModelError(f"tensor {family.names.theirs(absent[0])}, which images need, is missing", DOWNLOAD)
    return FoundVision(lambda: vision.adapt(tensors, declared[0], source.from_gguf), *declared)


class _Tower(NamedTuple):
    """The declarations and files of a vision tower."""

    family: VisionFamily
    names: Names
    tensors: dict[str, RawTensor]  # under canonical names
    config: Mapping[str, Any]  # keys of config.json
    preparation: Mapping[str, Any]  # keys of preprocessor_config.json
    from_gguf: bool


def _own_tower(checkpoint: Checkpoint, family: Family) -> _Tower:
    if (vision := family.vision) is None:
        raise _not_supported(checkpoint.config.get("model_type"))
    canonical = vision.names.canonical
    own = {name: each for name, each in checkpoint.tensors.items() if (canonical(name) or "").startswith(PREFIX)}
    read = readable(own, checkpoint.config)
    tensors = {name: tensor for each, tensor in read.items() if (name := canonical(each))}
    if not tensors:
        raise ModelError(f"config.json has a {vision.key}, but no file has its tensors", DOWNLOAD)
    preparation = read_json(checkpoint.path / "preprocessor_config.json")
    preparation = preparation or read_json(checkpoint.path / "processor_config.json").get("image_processor") or {}
    return _Tower(vision, vision.names, tensors, checkpoint.config, preparation, False)


def _projector(checkpoint: Checkpoint, path: Path) -> _Tower:
    """The tower of a projector file, whichever family it is of."""
    file = _clip.open_projector(path)
    kind = _clip.projector_type(file)
    assert kind is not None, "open_projector checks it"
    for vision in (family.vision for family in all_families().values()):
        if vision and (layout := vision.projector) and kind in layout.model_types:
            try:
                config, preparation = layout.read(file.metadata, file.tensors.keys())
            except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
                what = f"{path}: a wrong or missing metadata key: {error}"
                raise ModelError(what, "convert the model again") from error
            config = {**checkpoint.config, "model_type": layout.model_types[kind], **config}
            return _Tower(vision, layout.names, _clip.canonical_tensors(file, layout.names), config, preparation, True)
    raise _not_supported(kind)


def _not_supported(model_type: object) -> ModelError:
    what = f"the vision tower of {model_type} models is not supported"
    return ModelError(what, "headstart launch vllm MODEL runs it with images")


def load_vision(
    checkpoint: Checkpoint, family: Family, trunk: DecoderConfig, backend: Backend
) -> tuple[FoundVision | None, VisionNetwork | None, str]:
    """A checkpoint's vision tower, the tower on a backend, and why it is not used although the config promises one."""
    try:
        found = find_vision(checkpoint, family, trunk)
        if found and found.format.is_marked and backend.runs_on != "cpu":
            what = f"backend {backend.name} does not read images of {checkpoint.config.get('model_type')} models"
            raise ModelError(what, "use " + option("backend", "native"))
        if found:
            weights = Weights(found.adapt(), backend, str(checkpoint.projector or checkpoint.path))
            return found, found.config.build(weights), ""
    except ModelError as error:
        log.warning("%s reads text only: %s; %s", checkpoint.name, error.message, error.hint)
        return None, None, error.message + "; " + error.hint
    return None, None, ""


def read_config(checkpoint: Checkpoint, family: Family, context: int | None = None) -> DecoderConfig:
    """Sizes and layers of a checkpoint. Raises ModelError for wrong values and unknown config keys."""
    if not checkpoint.canonical_names:
        return family.read(checkpoint.config, str(checkpoint.path / "config.json"), context=context)
    return family.read(checkpoint.config, str(checkpoint.path), beside=FOUND, context=context)


LM_HEAD = "lm_head.weight"
LEFT: Mapping[str, str] = {
    r"rope_freqs\.weight": "read with the RoPE keys of the config",
    rf".*\.({'|'.join(ACTIVATIONS)})": "scales of quantized activations, which headstart does not quantize",
    r".*\.rotary_emb\.inv_freq": "computed from the config",
}
"""Patterns of tensor names that may stay unused -> the reason."""


def unused_tensors(weights: Weights, modules: int | None = None) -> list[str]:
    """Names of tensors that no layer has used: of the trunk (modules None), or of the first `modules` MTP modules."""
    left = {name: each for name, each in weights.tensors.items() if name not in weights.used}
    return sorted(name for name, each in left.items() if 0 not in each.shape and not _may_be_left(name, modules))


def check_all_used(weights: Weights) -> None:
    """Raises ModelError for a trunk tensor that no layer has used: the model would compute something else."""
    left = unused_tensors(weights)
    for name in left:
        if name == LM_HEAD and _same(weights.tensors[name], weights.tensors["embed_tokens.weight"]):
            continue
        raise _no_place(weights, name, len(left) - 1)


def check_trunk(checkpoint: Checkpoint, family: Family, config: DecoderConfig) -> None:
    """Raises ModelError where `load_decoder` would, as far as names and shapes tell. Of remote files whose headers do
    not tell all shapes nothing is compared."""
    if checkpoint.here:
        read = readable(checkpoint.tensors, checkpoint.config)
    elif (shapes := readable_shapes(checkpoint.tensors, checkpoint.config)) is not None:
        read = {name: Valueless(name, shape) for name, shape in shapes.items()}
    else:
        return
    weights = UnreadWeights(as_canonical(read, checkpoint, family, config), str(checkpoint.path))
    build_decoder(weights, config)
    # An LM head beside tied embeddings is refused only if its values differ.
    if left := [name for name in unused_tensors(weights) if name != LM_HEAD]:
        raise _no_place(weights, left[0], len(left) - 1)


def _no_place(weights: Weights, name: str, num_others: int) -> ModelError:
    what = f"{weights.source}: the config leaves no place for {name}{f' and {num_others} more' if num_others else ''}"
    if name == LM_HEAD:
        hint = "tie_word_embeddings is true, but lm_head.weight differs from the embedding: one of the two is wrong"
        return ModelError(what, hint)
    return ModelError(what, "the config and the weights do not belong together, or headstart cannot run this variant")


def _may_be_left(name: str, modules: int | None) -> bool:
    module = re.match(r"mtp\.(\d+)\.", name)
    if module is None or modules is None:
        return module is not None or modules is not None or any(re.fullmatch(known, name) for known in LEFT)
    return int(module[1]) >= modules


def _same(one: RawTensor, other: RawTensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.fingerprint() != other.fingerprint():
        return False
    step = max(1, (1 << 22) // max(one.shape[-1], 1))
    for begin in range(0, one.shape[0], step):
        rows = np.arange(begin, min(begin + step, one.shape[0]))
        if not np.array_equal(one.take_rows(rows).float32(), other.take_rows(rows).float32()):
            return False
    return True


def find_family(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint by its model_type. Raises ModelError for a head, and for a missing or unknown
    model_type."""
    model_type = checkpoint.config.get("model_type")
    if not _declares_model(checkpoint.config):
        refuse_head(checkpoint.config, checkpoint.path)
    if not isinstance(model_type, str):
        raise ModelError(f"{checkpoint.path}: config.json names no model_type", "download the model again")
    engine = "llamacpp" if checkpoint.format == "gguf" else "vllm"
    return family_named(model_type, f"{engine} {shlex.quote(checkpoint.name)}")


def _declares_model(config: Mapping[str, Any]) -> bool:
    """True if `architectures` has a class of the model_type, such as LlamaForCausalLM of llama. Such a config is not
    compared with the formats of heads: the comparison imports all kinds of heads, at each start."""
    names, kind = config.get("architectures"), str(config.get("model_type")).removesuffix("_text")
    prefix = kind.replace("_", "").lower()
    classes = [str(each).replace("_", "").lower() for each in names] if isinstance(names, list) else []
    whole = any(name.startswith(f"{prefix}for") and name.endswith(("lm", "generation")) for name in classes)
    return whole and MARK not in config


def canonical_tensors(checkpoint: Checkpoint, family: Family, config: DecoderConfig) -> Mapping[str, RawTensor]:
    """The checkpoint's tensors under canonical names, q and k rows in the half-split rope order."""
    return as_canonical(readable(checkpoint.tensors, checkpoint.config), checkpoint, family, config)


def as_canonical(
    read: Mapping[str, RawTensor], checkpoint: Checkpoint, family: Family, config: DecoderConfig
) -> Mapping[str, RawTensor]:
    """`canonical_tensors` of tensors that are readable already."""
    tensors = split_by_layers(read, family, config, from_gguf=checkpoint.canonical_names)
    tensors |= _token_numbers(checkpoint, config)
    _check_layers(tensors, family, config, checkpoint)
    return trailing_modules(tensors, config.num_layers) if family.head else tensors


def _token_numbers(checkpoint: Checkpoint, config: DecoderConfig) -> dict[str, RawTensor]:
    """The tensor NUMBERS of the checkpoint's tokenizer (of remote files zeros), if a memory reads it. Ids without a
    token have the number 0."""
    declared = next((each.memory.normalized for each in config.layers if each.memory and each.memory.normalized), None)
    if declared is None:
        return {}
    if not checkpoint.here:
        return {NUMBERS: Valueless(NUMBERS, (declared[0], 1))}
    (size, count), found = declared, checkpoint.load_tokenizer().normalized_numbers()[: declared[0]]
    if found.max(initial=-1) + 1 != count:
        what = f"{checkpoint.name}: the tokenizer has {found.max(initial=-1) + 1} different normalized tokens, but "
        raise ModelError(f"{what}engram_compressed_vocab_size is {count}", "is it this model's tokenizer?")
    values = np.zeros(size, np.float32)
    values[: len(found)] = found
    return {NUMBERS: make_tensor(NUMBERS, (size, 1), "F32", values.view(np.uint8))}


def split_by_layers(
    read: Mapping[str, RawTensor], family: Family, config: DecoderConfig, *, from_gguf: bool
) -> dict[str, RawTensor]:
    """`renamed_tensors` with q and k rows in the half-split rope order."""
    tensors = renamed_tensors(read, family, config, from_gguf=from_gguf)
    if family.interleaved_files or (from_gguf and family.interleaved_rope):
        return _half_split(tensors, config)
    return tensors


def renamed_tensors(
    read: Mapping[str, RawTensor], family: Family, config: DecoderConfig, *, from_gguf: bool
) -> dict[str, RawTensor]:
    """Tensors under canonical names, fused matrices split, values as layers take them. MTP modules keep layer names."""
    rename = family.names.of_gguf if from_gguf else family.names.canonical
    named = ((rename(name), tensor) for name, tensor in read.items())
    tensors = split_joined({name: tensor for name, tensor in named if name is not None}, config)
    if family.adapt:
        tensors = family.adapt(tensors, config, from_gguf)
    if from_gguf:
        return tensors
    return {name: family.read_values(name, each) for name, each in tensors.items()}


def _half_split(tensors: Mapping[str, RawTensor], config: DecoderConfig) -> dict[str, RawTensor]:
    """Reorders the rows of q and k from llama.cpp's interleaved order to that of Ops.rope, in all layers."""
    mixers = [layer.mixer for layer in config.layers if isinstance(layer.mixer, AttentionConfig)]
    spec, rotary = mixers[0].spec, next((mixer.rope.rotary_dim for mixer in mixers if mixer.rope), None)
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}
    found = dict(tensors)
    for name, tensor in tensors.items():
        if (part := name.split(".")[-2] if "." in name else "") in heads:
            found[name] = unpermute_rows(tensor, heads[part], rotary)
    return found


def _check_layers(tensors: Iterable[str], family: Family, config: DecoderConfig, checkpoint: Checkpoint) -> None:
    """Raises ModelError for layers beyond the config's number that are no MTP modules, declared or whole."""
    names = set(tensors)
    held = {int(name.split(".")[1]) for name in names if re.match(r"layers\.\d+\.", name)}
    for layer in sorted(each for each in held if each >= config.num_layers + config.num_mtp):
        if not family.head or f"layers.{layer}.eh_proj.weight" not in names:
            said = f"config.json says {config.num_layers} layers"
            what = f"{said}, but {checkpoint.path} holds layer {layer}, counted from 0"
            raise ModelError(what, "correct num_hidden_layers")


def _counter(tensors: Mapping[str, RawTensor], progress: Progress) -> Callable[[RawTensor], None]:
    """Callback for Weights.on_take that reports the number of loaded weights, in millions, to `progress`."""
    total, done = sum(math.prod(tensor.shape) for tensor in tensors.values()), 0

    def taken(tensor: RawTensor) -> None:
        nonlocal done
        progress(done // 10**6, total // 10**6, "loading, million weights")
        done += math.prod(tensor.shape)

    return taken
