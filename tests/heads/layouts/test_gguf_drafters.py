"""Block drafters in llama.cpp's GGUF files (architecture dflash): same head and same drafts as their safetensors.

The files are written as llama.cpp's converter writes them and read by its names (src/models/dflash.cpp)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import support
from gguf_files import add_vocabulary, written as finished
from test_published import PUBLISHED, H, trunk_of, write_published

from headstart.engine.load import attach_head
from headstart.errors import ModelError
from headstart.formats.json_object import read_object
from headstart.formats.safetensors_file import read_file
from headstart.heads.files import read_head
from headstart.models.classify import classify_path
from headstart.tools.inspect import run as inspect

TOP = {
    "fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm", "embed_tokens": "token_embd",
    "lm_head": "output", "markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj", "candidate_selector.hidden_projection": "selector_hidden",
    "candidate_selector.predecessor_codebook": "selector_predecessor",
    "candidate_selector.successor_codebook": "selector_successor",
}  # fmt: skip
LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj", "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}  # fmt: skip
FORMS = ("z-lab", "SpecForge, windows", "SpecForge, DSpark", "DeepSpec", "z-lab, DFlash2", "speculators, DFlash")
"""Forms that llama.cpp's converter knows. It does not have speculators' causal windows, scales of embeddings, gates."""


def gguf_name(name: str) -> str:
    stem, suffix = (name.rpartition(".")[0], name.rpartition(".")[2]) if name.endswith((".weight", ".bias")) else (
        name, "weight" if "codebook" in name else "")  # fmt: skip
    parts = stem.split(".", 2)
    made = f"blk.{parts[1]}.{LAYER[parts[2]]}" if parts[0] == "layers" else TOP[stem]
    return f"{made}.{suffix}" if suffix else made


def convert_to_gguf(path: Path, directory: Path, **changes: Any) -> Path:
    """The GGUF file of a published folder, as llama.cpp's converter writes it."""
    head, config = read_head(directory), read_object(directory / "config.json")
    inner = config.get("transformer_layer_config") or config
    flash = {**config, **config.get("dflash_config", {})}
    writer = gguf.GGUFWriter(path, "dflash")
    for key, value in {
        "embedding_length": H, "block_count": inner["num_hidden_layers"], "context_length": 512,
        "feed_forward_length": inner["intermediate_size"], "attention.head_count": inner["num_attention_heads"],
        "attention.head_count_kv": inner["num_key_value_heads"], "attention.key_length": inner["head_dim"],
        "attention.value_length": inner["head_dim"], "rope.dimension_count": inner["head_dim"],
        "block_size": flash["block_size"],
        **{key: flash[key] for key in ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
           if key in flash},
        **changes,
    }.items():  # fmt: skip
        writer.add_uint32(f"dflash.{key}", value)
    writer.add_float32("dflash.attention.layer_norm_rms_epsilon", inner["rms_norm_eps"])
    writer.add_float32("dflash.rope.freq_base", inner["rope_theta"])
    for key, theirs in (("logit_scale", "output_multiplier"), ("final_logit_softcapping",) * 2):
        if theirs in flash:
            writer.add_float32(f"dflash.{key}", flash[theirs])
    if "sliding_attention" in inner["layer_types"]:
        writer.add_uint32("dflash.attention.sliding_window", inner["sliding_window"])
        sliding = [each == "sliding_attention" for each in inner["layer_types"]]
        writer.add_array("dflash.attention.sliding_window_pattern", sliding)
    assert head.spec.block and isinstance(head.spec.tap, tuple)
    writer.add_array("dflash.target_layers", list(head.spec.tap))
    writer.add_bool("dflash.sample_from_anchor", head.spec.block.anchor_predicts)
    add_vocabulary(writer, support.VOCAB)
    writer.add_uint32("tokenizer.ggml.mask_token_id", head.spec.block.mask_token_id)
    for name, tensor in read_file(directory / "model.safetensors").items():
        if name == "d2t":
            assert head.draft_token_ids is not None
            writer.add_tensor("d2t", head.draft_token_ids.astype(np.int64))
        elif name != "t2d":
            writer.add_tensor(gguf_name(name.replace("codebook.weight", "codebook")), tensor.float32())
    return finished(writer, path)


@pytest.mark.parametrize("name", FORMS)
def test_gguf_head_equals_its_safetensors(tmp_path: Path, name: str) -> None:
    changes: dict[str, Any] = {}
    if name == "z-lab, DFlash2":  # llama.cpp does not scale embeddings
        flash = {**PUBLISHED[name].config["dflash_config"], "input_embedding_scale": 1.0}
        changes = {"dflash_config": flash}
    directory = write_published(tmp_path / "a", PUBLISHED[name], **changes)
    file = convert_to_gguf(tmp_path / "drafter.gguf", directory)
    theirs, ours = read_head(directory), read_head(file)
    assert (ours.spec.block, ours.spec.tap, ours.vocab_size) == (theirs.spec.block, theirs.spec.tap, theirs.vocab_size)
    assert ours.spec.layer and theirs.spec.layer
    assert ours.spec.layer.eps == pytest.approx(theirs.spec.layer.eps)
    assert ours.spec.layer.mixer == theirs.spec.layer.mixer and ours.spec.layer.mlp == theirs.spec.layer.mlp
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all((each.float32() == theirs.tensors[key].float32()).all() for key, each in ours.tensors.items())
    assert (ours.draft_token_ids is None) == (theirs.draft_token_ids is None)
    assert ours.draft_token_ids is None or (ours.draft_token_ids == theirs.draft_token_ids).all()
    attached = attach_head(trunk_of(), file)
    assert attached.spec.depth_limit == 4
    method = {"DSparkDraftModel": "dspark", "Qwen3DSparkModel": "dspark"}
    names = PUBLISHED[name].config.get("architectures") or [""]
    report = inspect.run(inspect.InspectOptions(model=str(file)))
    assert report.lines[0].startswith(f"{report.data['drafter']['title']} (gguf)")
    assert report.ok, report.lines
    assert classify_path(file).method == method.get(names[0], "dflash")


def test_gguf_head_drafts_like_its_safetensors(tmp_path: Path) -> None:
    directory = write_published(tmp_path / "a", PUBLISHED["DeepSpec"])
    file, found = convert_to_gguf(tmp_path / "drafter.gguf", directory), []
    for path in (directory, file):
        model = trunk_of()
        engine = support.make(replace(model, head=attach_head(model, path)), depth=4, dtype="float64")
        drafts = support.record_drafts(engine)
        outputs = support.run(engine, support.varied_requests(0.0))
        found.append((drafts, {key: each.tokens for key, each in outputs.items()}))
    assert found[0] == found[1] and len(found[0][0]) > 10


@pytest.mark.parametrize(("changes", "message"), [
    ({"hyper_connection.count": 4}, "DeepSeek-V4's DSpark drafter in a file of its own"),
    ({"block_size": 1}, "block_size is 1"),
    ({"embedding_length": H + 1}, "asks for"),
])  # fmt: skip
def test_unsupported_gguf_files_are_refused(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    file = convert_to_gguf(tmp_path / "drafter.gguf", write_published(tmp_path / "a", PUBLISHED["z-lab"]), **changes)
    with pytest.raises(ModelError, match=message):
        read_head(file)
