"""A GGUF file with only the head, for llama.cpp (`--spec-type draft-mtp` or `draft-eagle3`).

An MTP head comes from a Hugging Face directory (`gguf_model`), or is copied from a GGUF file of the whole model: the
blocks after the trunk's last, embedding, final norm and LM head, with all metadata. llama.cpp recognizes such a file by
the missing first block. An EAGLE-3 head has its own architecture and the trunk's tokenizer. Source: llama.cpp b11434,
`conversion/`, `src/models/`.
"""

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.base import Checkpoint
from headstart.formats.gguf import read_parts
from headstart.formats.json_object import read_object
from headstart.formats.safetensors import bfloat16
from headstart.formats.safetensors_file import join
from headstart.formats.sizes import text_config
from headstart.heads.kind import plain_parts
from headstart.hub import whole_name
from headstart.kernels.ops import RawTensor
from headstart.layers.rope import rope_base, unscaled_base
from headstart.models.classify import mtp_modules
from headstart.models.families import find_mtp_family, mtp_families
from headstart.tools.draft_depth import P_MIN
from headstart.tools.export.gguf_model import HeadModel, head_model
from headstart.tools.export.plan import Plan, Wrote
from headstart.tools.export.source import ExportRequest, ExportSource, open_directory

_ITEM = {"F32": 4, "BF16": 2}
BESIDE = ("token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight")
CONVERT = "llama.cpp's convert_hf_to_gguf.py --mtp does; or give a GGUF file of the whole model"
NUM_TAPS = 3
NAMES = {
    "fuse.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "block.input_layernorm.weight": "blk.0.attn_norm.weight",
    "block.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "block.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "block.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "block.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "block.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "block.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "block.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "block.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "block.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
}


def plan(request: ExportRequest) -> Plan:
    """Plans the GGUF file of a head. Raises ModelError for a head that llama.cpp has no graph for."""
    if request.has_own_head:
        return _eagle3(request.source("eagle3"))
    return _converted(open_directory(request.model)) if request.path.is_dir() else _copied(request.path)


def _use(file: str, method: str) -> str:
    """Returns llama.cpp's command that drafts with a file in `{out}`."""
    name = shlex.quote(file).replace("{", "{{").replace("}", "}}")
    limits = f"--spec-draft-n-max {{depth}} --spec-draft-p-min {P_MIN}"
    return f"llama-server -m MODEL.gguf -md {{out}}/{name} --spec-type draft-{method} {limits}"


def _converted(source: Checkpoint) -> Plan:
    model_type = str(source.config.get("model_type"))
    found = find_mtp_family(source.config)
    if found and (why := found.layout.not_llama_cpp):
        raise ModelError(f"llama.cpp has no graph for the MTP head of {model_type}: {why}", "use another --to")
    model = head_model(source)
    if model is None:
        raise ModelError(f"{model_type} cannot be converted to GGUF here", CONVERT)
    for needed in ("tokenizer.json", "tokenizer_config.json"):
        if not (source.path / needed).is_file():
            raise ModelError(f"{source.name} has no {needed}, which a GGUF file needs", "take it from the original")
    made = f"mtp-{source.title}.gguf"
    plan = Plan(
        use=_use(made, "mtp"), notes=model.notes, data={"architecture": model.architecture.architecture},
        drafter=mtp_modules(model.num_modules),
    )  # fmt: skip
    plan.other_bytes = sum(math.prod(each.shape) * _ITEM[each.dtype] for each in model.tensors)
    plan.writers[made] = partial(_write_converted, source, model)
    return plan


def _write_converted(source: Checkpoint, model: HeadModel, target: Path, wrote: Wrote) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(target, arch=model.architecture.architecture)
    _add_header(writer, f"MTP head of {source.title}")
    for key, (value, kind) in model.metadata.items():
        getattr(writer, f"add_{kind}")(key, value)
    _add_tokenizer(source, model, writer)
    for each in model.tensors:
        dtype = np.dtype(np.float32 if each.dtype == "F32" else np.float16)
        nbytes = math.prod(each.shape) * dtype.itemsize
        writer.add_tensor_info(each.name, each.shape, dtype, nbytes, GGMLQuantizationType[each.dtype])
    _write_tensors(writer, (each.array() for each in model.tensors), wrote)


def _add_header(writer: Any, name: str) -> None:
    from gguf import LlamaFileType
    from gguf.constants import GGML_QUANT_VERSION

    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    writer.add_quantization_version(GGML_QUANT_VERSION)


def _add_tokenizer(source: Checkpoint, model: HeadModel, writer: Any) -> None:
    """Adds a byte-level BPE tokenizer. Unused ids get a name, since every row of the embedding needs one."""
    from gguf import SpecialVocab, TokenType

    document = read_object(source.path / "tokenizer.json")
    vocabulary = {int(number): str(token) for token, number in document["model"]["vocab"].items()}
    added = {int(each["id"]): each for each in document.get("added_tokens") or []}
    vocabulary |= {number: str(each["content"]) for number, each in added.items()}
    size = int(text_config(source.config)["vocab_size"])
    kinds = {number: _token_type(each) for number, each in added.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(model.architecture.pre_tokenizer)
    writer.add_token_list([vocabulary.get(number, f"[PAD{number}]") for number in range(size)])
    used = {number: int(kinds.get(number, TokenType.NORMAL)) for number in vocabulary}
    writer.add_token_types([used.get(number, int(TokenType.UNUSED)) for number in range(size)])
    special = SpecialVocab(source.path, load_merges=True)
    ids = {token: number for number, token in vocabulary.items()}
    special.special_token_ids |= {name: ids[each] for name, each in model.architecture.special.items() if each in ids}
    special.add_to_gguf(writer, quiet=True)


def _token_type(added: Mapping[str, Any]) -> int:
    from gguf import TokenType

    marked = re.fullmatch(r"<[|\uff5c].*[|\uff5c]>", str(added["content"])) is not None
    return int(TokenType.CONTROL if added.get("special") or marked else TokenType.USER_DEFINED)


def _copied(path: Path) -> Plan:
    parts = read_parts(path)
    metadata, tensors = parts[0].metadata, join({str(part.path): part.tensors for part in parts}, str(path))
    architecture = str(metadata.get("general.architecture"))
    heads = int(metadata.get(f"{architecture}.nextn_predict_layers") or 0)
    blocks = int(metadata.get(f"{architecture}.block_count") or 0)
    if not heads:
        hint = "was it converted with --no-mtp, or from a checkpoint that had lost its head?"
        raise ModelError(f"{path} holds no MTP head: {architecture}.nextn_predict_layers is not set", hint)
    known = [name for layout in mtp_families().values() for name in layout.llama_cpp]
    if architecture not in known:
        hint = f"it has for {', '.join(known)}"
        raise ModelError(f"llama.cpp has no MTP graph for {architecture}", hint)
    names = [name for name in tensors if name in BESIDE or _block(name) >= blocks - heads]
    if not any("nextn" in name for name in names):
        hint = "the metadata promises it: convert the model again"
        raise ModelError(f"{path} holds no tensors of an MTP head in blocks {blocks - heads} and up", hint)
    made = f"mtp-{whole_name(path.name)}"
    data = {"architecture": architecture, "tensors": len(names)}
    plan = Plan(use=_use(made, "mtp"), data=data, drafter=mtp_modules(heads))
    plan.other_bytes = sum(tensors[name].nbytes for name in names)
    plan.writers[made] = partial(_write_copied, [part.path for part in parts], frozenset(names))
    return plan


def _block(name: str) -> int:
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _write_copied(parts: list[Path], names: frozenset[str], target: Path, wrote: Wrote) -> None:
    from gguf import GGUFReader, GGUFWriter

    readers = [GGUFReader(part) for part in parts]
    writer = GGUFWriter(target, arch=readers[0].fields["general.architecture"].contents())
    _copy_metadata(readers[0], writer, "")
    chosen = [tensor for reader in readers for tensor in reader.tensors if tensor.name in names]
    for tensor in chosen:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    _write_tensors(writer, (tensor.data for tensor in chosen), wrote)


def _copy_metadata(reader: Any, writer: Any, prefix: str) -> None:
    for key, field in reader.fields.items():
        if key.startswith(prefix) and not key.startswith(("GGUF.", "general.architecture", "split.")):
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub_type)


def _write_tensors(writer: Any, data: Iterator[NDArray[Any]], wrote: Wrote) -> None:
    """Writes the header, then one tensor at a time, so that only one is in memory."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for each in data:
        writer.write_tensor_data(each)
        wrote(each.nbytes)
    writer.close()


def _eagle3(source: ExportSource) -> Plan:
    head, trunk = source.head, source.checkpoint
    if head.spec.kind != "eagle3":
        what = f"the head {source.head_path} is of kind {head.spec.kind}, and llama.cpp has no architecture for it"
        raise ModelError(what, "headstart train --kind eagle3 makes one that it runs")
    if not isinstance(head.spec.tap, tuple) or len(head.spec.tap) != NUM_TAPS:
        raise ModelError(f"the head taps {head.spec.tap}, but llama.cpp wants {NUM_TAPS} layers")
    if trunk.format != "gguf":
        hint = "name the trunk's .gguf"
        raise ModelError(f"{source.name} is not a GGUF file, from which the tokenizer is taken", hint)
    if unknown := [name for name in source.head_tensors if name not in NAMES]:
        what = f"llama.cpp's eagle3 has no place for {unknown[0]}"
        raise ModelError(what, "--to vllm-eagle3 writes this head for vLLM and SGLang")
    if head.spec.recycle == "post_norm":
        raise ModelError("the head's next step reads what its LM head reads (norm_output), which llama.cpp's does not")
    rope = plain_parts(head.spec.layer)[0].rope
    if rope is None or unscaled_base(rope, rope.rotary_dim) is None:
        raise ModelError("the head's RoPE is scaled, which is not written to GGUF files", "use another --to")
    made = f"eagle3-{whole_name(trunk.path.name)}"
    plan = Plan(use=_use(made, "eagle3"), data={"architecture": "eagle3", "tensors": len(source.head_tensors)})
    plan.other_bytes = sum(4 * math.prod(tensor.shape) for tensor in source.head_tensors.values())
    plan.writers[made] = partial(_write_eagle3, source)
    return plan


def _write_eagle3(source: ExportSource, target: Path, wrote: Wrote) -> None:
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

    writer = GGUFWriter(target, arch="eagle3")
    _copy_metadata(GGUFReader(source.checkpoint.files[0]), writer, "tokenizer.")
    _describe(source, writer)
    arrays: list[Callable[[], NDArray[Any]]] = []
    for name, tensor in source.head_tensors.items():
        kind, load = _array(source, name, tensor)
        size = 2 if kind == GGMLQuantizationType.BF16 else 4
        dtype = np.dtype(np.float16 if size == 2 else np.float32)
        writer.add_tensor_info(NAMES[name], tensor.shape, dtype, math.prod(tensor.shape) * size, kind)
        arrays.append(load)
    if source.head.draft_token_ids is not None:
        ids = source.head.draft_token_ids.astype(np.int64)
        writer.add_tensor_info("d2t", ids.shape, ids.dtype, ids.nbytes, GGMLQuantizationType.I64)
        arrays.append(lambda: ids)
    _write_tensors(writer, (load() for load in arrays), wrote)


def _array(source: ExportSource, name: str, tensor: RawTensor) -> tuple[Any, Callable[[], NDArray[Any]]]:
    """Returns the GGUF type of a tensor and a function that loads it: matrices in bfloat16, norms in float32; rows of q
    and k in llama.cpp's interleaved RoPE order."""
    from gguf import GGMLQuantizationType

    if len(tensor.shape) == 1:
        return GGMLQuantizationType.F32, tensor.float32
    attention = plain_parts(source.head.spec.layer)[0].spec
    heads = {"q_proj": attention.num_heads, "k_proj": attention.num_kv_heads}.get(name.split(".")[-2])

    def load() -> NDArray[Any]:
        values = tensor.float32()
        if heads is not None:
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        return np.asarray(bfloat16(values)[0])

    return GGMLQuantizationType.BF16, load


def _describe(source: ExportSource, writer: Any) -> None:
    head, (mixer, mlp) = source.head, plain_parts(source.head.spec.layer)
    attention = mixer.spec
    assert mixer.rope and head.spec.layer
    _add_header(writer, f"EAGLE-3 head of {source.name}")
    writer.add_block_count(1)
    writer.add_context_length(source.sizes.max_length)
    writer.add_embedding_length(head.hidden_size)
    writer.add_feed_forward_length(mlp.inner)
    writer.add_head_count(attention.num_heads)
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_layer_norm_rms_eps(head.spec.layer.eps)
    writer.add_rope_dimension_count(mixer.rope.rotary_dim)
    writer.add_rope_freq_base(rope_base(mixer.rope))
    writer.add_vocab_size(head.vocab_size)
    writer.add_array("eagle3.target_layers", list(head.spec.tap) if isinstance(head.spec.tap, tuple) else [])
    writer.add_uint32("eagle3.target_hidden_size", source.sizes.hidden_size)
    writer.add_bool("eagle3.norm_before_residual", head.spec.norm_before_residual)
    writer.add_bool("eagle3.norm_before_fc", "input_norm.weight" in head.tensors)


EXPORT = plan
