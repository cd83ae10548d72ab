"""Fits a LoRA adapter to a trunk: finds the low-rank factors that are added to each of the trunk's weights.

Families rename, split, reorder and transpose the tensors of their files before layers take them. All of this is linear,
so the same code runs with the adapter's low-rank tensors in place of the model's. The layers then take the additions to
their weights in place of the weights.
"""

from collections.abc import Mapping
from typing import Any

from headstart.errors import ModelError
from headstart.formats.adapter import AdapterFile, LowRank, names_of
from headstart.formats.base import Checkpoint, strip_wrapper
from headstart.formats.quantization import readable
from headstart.formats.rows import RowSubset, Transposed
from headstart.kernels.ops import RawTensor
from headstart.layers.build import DecoderConfig, build_decoder
from headstart.layers.weights import Weights
from headstart.models.base import Family
from headstart.models.tensors import as_canonical, canonical_tensors, split_by_layers

REMEDY = "merge the adapter into the model, or train it on other modules"


class _Collector:
    """A backend that collects an adapter's tensors; None: the adapter does not change that weight."""

    def weight(self, tensor: RawTensor, **options: bool) -> LowRank | None:
        return _low_rank(tensor)

    def index(self, ids: Any) -> None:
        """No adapter changes integers."""


def _low_rank(tensor: Any) -> LowRank | None:
    """The low-rank form of a tensor or of rows of it; None for the model's own tensors. Raises ModelError for other
    tensors that are made of a low-rank one."""
    if isinstance(tensor, LowRank):
        return tensor
    source = getattr(tensor, "source", None)
    inner = _low_rank(source) if source is not None else None
    if inner is None:
        return None
    if isinstance(tensor, RowSubset):
        return inner.take_rows(tensor.rows)
    if isinstance(tensor, Transposed):
        return inner.transposed()
    raise ModelError(f"LoRA of {inner.name} is not supported", REMEDY)


def fit_adapter(
    adapter: AdapterFile, checkpoint: Checkpoint, family: Family, config: DecoderConfig
) -> list[LowRank | None]:
    """The adapter's addition to each of the trunk's weights, in the order of Weights.converted; None: no addition.
    Raises ModelError for matrices that the trunk lacks, has in another shape, or cannot adapt."""
    if adapter.from_gguf == checkpoint.canonical_names:
        tensors = _in_the_same_format(adapter, checkpoint, family, config)
    else:
        tensors = _in_another_format(adapter, checkpoint, family, config)
    weights = Weights(tensors, _Collector(), str(adapter.path))  # type: ignore[arg-type]  # it has the methods that `build_decoder` calls
    build_decoder(weights, config)
    found: list[LowRank | None] = weights.converted
    if left := adapter.tensors.keys() - {each.name for each in found if each}:
        raise ModelError(f"{adapter.path}: LoRA of {names_of(left)} is not supported", REMEDY)
    return found


def _in_the_same_format(
    adapter: AdapterFile, checkpoint: Checkpoint, family: Family, config: DecoderConfig
) -> Mapping[str, RawTensor]:
    read = readable(checkpoint.tensors, checkpoint.config)
    names = {strip_wrapper(name): name for name in read}
    named = {names.get(strip_wrapper(name), name): tensor for name, tensor in adapter.tensors.items()}
    own = _tied(named, next((name for name in read if name.endswith("embed_tokens.weight")), ""), config)
    _check_shapes(own, read, adapter)
    return as_canonical({**read, **own}, checkpoint, family, config)


def _in_another_format(
    adapter: AdapterFile, checkpoint: Checkpoint, family: Family, config: DecoderConfig
) -> Mapping[str, RawTensor]:
    """The adapter's matrices in canonical form, which is the same for all formats, among the model's."""
    tensors = canonical_tensors(checkpoint, family, config)
    try:
        own = split_by_layers(dict(adapter.tensors), family, config, from_gguf=adapter.from_gguf)
    except KeyError as error:
        what = f"{adapter.path} lacks {error}, which the model's other format is computed with"
        raise ModelError(what, "use the adapter with the model in its own format, safetensors or GGUF") from None
    own = _tied(own, "embed_tokens.weight", config)
    _check_shapes(own, tensors, adapter)
    return {**tensors, **own}


def _tied(own: Mapping[str, RawTensor], embedding: str, config: DecoderConfig) -> dict[str, RawTensor]:
    """The adapter's tensors, with that of an LM head tied to the embedding under the embedding's name."""
    return {embedding if config.tied and name.endswith("lm_head.weight") else name: each for name, each in own.items()}


def _check_shapes(own: Mapping[str, RawTensor], tensors: Mapping[str, RawTensor], adapter: AdapterFile) -> None:
    """Raises ModelError for a matrix that the model does not have, or has in another shape."""
    trained = f" (it was trained on {adapter.base})" if adapter.base else ""
    about = f"the adapter {adapter.path} does not fit{trained}"
    if missing := own.keys() - tensors.keys():
        raise ModelError(f"{about}: the model has no {names_of(missing)}", REMEDY)
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    embedding = next(tuple(each.shape) for name, each in tensors.items() if name.endswith("embed_tokens.weight"))
    for name, shape in (*shapes.items(), *adapter.copies.items()):
        if shape != (wanted := tuple(tensors[name].shape) if name in shapes else embedding):
            what = f"{about}: its {name} is {list(shape)}, the model's is {list(wanted)}"
            raise ModelError(what, "use an adapter of this model")
