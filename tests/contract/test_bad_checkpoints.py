"""Invalid checkpoints: the error names the fault; the command line exits with code 2, one line and no traceback."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import family_of, plain_layer, tiny_model
from tiny_models import write_model

from headstart.api import LLM
from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.engine.load import load_model
from headstart.errors import ModelError
from headstart.formats.base import make_tensor
from headstart.formats.quantization import readable
from headstart.formats.rows import RowSubset
from headstart.heads.base import HeadSpec
from headstart.models.described import DESCRIBED
from headstart.models.families import family_named, is_known
from headstart.models.small import Arrays
from headstart.tools.export.targets import vllm_mimo

Change = Callable[[Arrays], None]


def without(*parts: str) -> Change:
    def change(arrays: Arrays) -> None:
        for name in [name for name in arrays if any(part in name for part in parts)]:
            del arrays[name]

    return change


def renamed(old: str, new: str) -> Change:
    def change(arrays: Arrays) -> None:
        name = next(name for name in arrays if name.endswith(old))
        arrays[name.removesuffix(old) + new] = arrays.pop(name)

    return change


def as_codes(end: str) -> Change:
    def change(arrays: Arrays) -> None:
        name = next(name for name in arrays if name.endswith(end))
        arrays[name] = (np.zeros(arrays[name].shape, np.uint8), "F8_E4M3")

    return change


@dataclass(frozen=True)
class Bad:
    """`config` and `change` modify a tiny checkpoint; `tiny` are changes before its tensors are made."""

    family: str
    says: str
    config: dict[str, Any] = field(default_factory=dict)
    change: Change = lambda arrays: None
    tiny: dict[str, Any] = field(default_factory=dict)


CASES = {
    "a width that the tensors do not have": Bad("llama", "but the config implies", {"hidden_size": 96}),
    "a vocabulary that they do not have": Bad("qwen3_5", "embed_tokens.weight has shape", {"vocab_size": 140}),
    "more layers than there are": Bad("glm4_moe", "has no tensor layers.4.", {"num_hidden_layers": 5}),
    "fewer layers than there are": Bad("glm4_moe",
        "the MTP tensors are those of layer 3, but", {"num_hidden_layers": 2}),
    "fewer layers, no head": Bad("llama", "says 2 layers, but", {"num_hidden_layers": 2}),
    "more experts than there are": Bad("qwen3_5_moe",
        "6 tensors are missing: mtp.layers.0.mlp.experts.7.gate_proj", {"num_experts": 9}),
    "an expert that is missing": Bad(
        "deepseek_v3", "has no tensor layers.2.mlp.experts.4.up_proj.weight",
        change=without("layers.2.mlp.experts.4.up_proj")),
    "all experts missing": Bad("qwen3_moe", "has no tensor layers.0.mlp.experts.0.", change=without("mlp.experts.")),
    "more MTP modules than there are": Bad(
        "glm4_moe", "promises 3 MTP modules (num_nextn_predict_layers = 3), but", {"num_nextn_predict_layers": 3}),
    "a sparse indexer": Bad("deepseek_v3", "index_n_heads is missing", {"index_topk": 64}),
    "a family that does not run": Bad("deepseek_v4", "latent attention with windows", {"model_type": "dots3_note"}),
    "a family with fused projections": Bad("qwen3", "mimo_v2 models need projections fused", {"model_type": "mimo_v2"}),
    "a head": Bad("qwen3", "is a head, not a whole model", {"headstart_head": 1}),
    "a published head": Bad("llama", "is a head, not a whole model", {"architectures": ["LlamaForCausalLMEagle3"]}),
    "no family": Bad("qwen3", "names no model_type", {"model_type": None}),
    "a family nobody knows": Bad("qwen3", "did you mean qwen3", {"model_type": "qwen33"}),
    "AWQ": Bad(
        "qwen3", "has no scales", {"quantization_config": {"quant_method": "awq"}},
        renamed("q_proj.weight", "q_proj.qweight")),
    "GPTQ": Bad(
        "glm4_moe", "has no scales", {"quantization_config": {"quant_method": "gptq"}},
        renamed("q_proj.weight", "q_proj.qweight")),
    "bitsandbytes": Bad(
        "llama", "quantized as bitsandbytes", {"quantization_config": {"quant_method": "bitsandbytes"}},
        renamed("q_proj.weight", "q_proj.weight.absmax")),
    "a quantization nobody knows": Bad(
        "llama", "names 'octal', which is unknown", {"quantization_config": {"quant_method": "octal"}}),
    "codes without scales": Bad("llama", "has no scales", change=as_codes("layers.0.mlp.up_proj.weight")),
    "scales beside plain weights": Bad(
        "qwen2", "is F32, but has scales model.layers.0.mlp.up_proj.weight_scale",
        change=lambda arrays: arrays.update({"model.layers.0.mlp.up_proj.weight_scale": np.ones(1, np.float32)})),
    "a window that no key tells": Bad(
        "qwen2", "layer type 'sliding_attention' is not supported", {"layer_types": ["sliding_attention"] * 3}),
    "a tensor that nobody takes": Bad(
        "qwen2", "the config leaves no place for layers.0.mlp.up_proj.bias",
        change=lambda arrays: arrays.update({"model.layers.0.mlp.up_proj.bias": np.ones(80, np.float32)})),
    "an LM head beside a tied embedding": Bad(
        "qwen2", "the config leaves no place for lm_head.weight", {"tie_word_embeddings": True}),
    "per-layer embeddings of too few tokens": Bad(
        "gemma4", "vocab_size_per_layer_input is 100, less than vocab_size 131", {"vocab_size_per_layer_input": 100}),
    "another number of experts": Bad("glm4_moe", "gate.weight is [7, 48], not [5, 48]", {"n_routed_experts": 5}),
    "more experts for a token than a group has": Bad(
        "deepseek_v3", "cannot take 5 of 4 experts", {"num_experts_per_tok": 5}),
    "more experts for a token than all": Bad("qwen3_moe", "cannot take 8 of 7 experts", {"num_experts_per_tok": 8}),
    "groups that do not divide": Bad("deepseek_v3", "8 experts do not make 3 groups", {"n_group": 3}),
    "another latent": Bad("deepseek_v3", "kv_a_proj_with_mqa.weight is [38, 48], not [36, 48]", {"kv_lora_rank": 30}),
    "softmax routing": Bad(
        "deepseek_v3", "scoring_func is 'softmax', which is not supported", {"scoring_func": "softmax"}),
    "an indexer that is too narrow": Bad("deepseek_v32", "4, but 6 features are rotated", {"index_head_dim": 4}),
    "another activation": Bad("glm4_moe", "hidden_act is 'selu'", {"hidden_act": "selu"}),
    "what is recycled": Bad("glm4_moe", "mtp_recycle is 'both'", {"mtp_recycle": "both"}),
    "a size that is a word": Bad("deepseek_v3", "is missing or not a number", {"moe_intermediate_size": "wide"}),
    "no size": Bad("deepseek_v3", "is missing or not a number", {"kv_lora_rank": None}),
    "a packing without scales": Bad(
        "glm4_moe", "has no weight_scale", {"quantization_config": {"quant_method": "compressed-tensors"}},
        renamed("layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight_packed")),
    "another number of value heads": Bad(
        "qwen3_5", "in_proj_a.weight has shape (6, 48), but the config implies (4, 48)", {"linear_num_value_heads": 4}
    ),
    "another kind of layer": Bad(
        "qwen3_next", "has no tensor layers.0.self_attn", {"layer_types": ["full_attention"] * 3}),
    "an unknown kind of layer": Bad("qwen3_5", "layer type 'mamba' is not supported", {"layer_types": ["mamba"] * 3}),
    "too few kinds": Bad("qwen3_next", "layer_types must name 3 layers", {"layer_types": ["full_attention"]}),
    "heads that do not divide": Bad("qwen3_next", "6 value heads of 8, 4 key heads", {"linear_num_key_heads": 4}),
    "no convolution": Bad("qwen3_5", "a convolution of 1", {"linear_conv_kernel_dim": 1}),
    "a size of linear attention": Bad("qwen3_5", "linear attention needs it", {"linear_key_head_dim": None}),
    "more MTP layers than there are": Bad(
        "qwen3_5", "tensors are missing: mtp.layers.1.", {"mtp_num_hidden_layers": 2}),
    "an embedding of its own": Bad("qwen3_5", "mtp_use_dedicated_embeddings", {"mtp_use_dedicated_embeddings": True}),
    "no gate": Bad("qwen3_5", "q_proj.weight is [192, 48], not [96, 48]", {"attn_output_gate": False}),
    "a wrapper around nothing": Bad("qwen3_5", "text_config is not an object", {"text_config": "none"}),
    **{
        f"no {name}": Bad(
            "qwen3_5", "has no tensor layers.2.linear_attn.", change=without(f"model.layers.2.linear_attn.{name}"))
        for name in ("conv1d.weight", "dt_bias", "A_log", "norm.weight", "in_proj_qkv.weight")},
    "keys beyond the kernels": Bad(
        "qwen3_5", "the native backend cannot run this model: recurrence", tiny={"linear_key_head_dim": 272}),
    "taps beyond the kernels": Bad(
        "qwen3_next", "the native backend cannot run this model: causal_conv", tiny={"linear_conv_kernel_dim": 20}),
    "experts beyond the kernels": Bad(
        "qwen3_moe", "the native backend cannot run this model: route",
        tiny={"num_experts": 1025, "num_hidden_layers": 1, "mlp_only_layers": [], "moe_intermediate_size": 2}),
    "values beyond the kernels": Bad(
        "deepseek_v3", "the native backend cannot run this model: attend",
        tiny={"kv_lora_rank": 528, "num_hidden_layers": 1, "num_nextn_predict_layers": 0}),
}  # fmt: skip


OF_HEADS = {
    "more experts than there are", "more MTP modules than there are", "a part of an MTP module missing",
    "another number of experts", "another latent", "more MTP layers than there are", "no gate",
}  # fmt: skip
"""Cases of a head that is asked for by name: without it the trunk is read first, or is whole."""


def write_case(case: str, path: Path) -> Path:
    bad = CASES[case]
    if "kernels" in case:
        pytest.importorskip("headstart.kernels.native._native")
    config, arrays = family_of(bad.family).tiny(**bad.tiny)
    bad.change(arrays)
    return write_model(path, {**config, **bad.config}, arrays)


@pytest.mark.parametrize("case", CASES)
def test_faults_are_named(case: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=re.escape(CASES[case].says)):
        drafter = "mtp" if case in OF_HEADS else "auto"
        LLM(str(write_case(case, tmp_path)), EngineConfig(threads=1, kv_blocks=40, drafter=drafter))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a width that the tensors do not have", "AWQ", "values beyond the kernels"])
def test_fault_is_one_line_on_the_command_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_case(case, tmp_path)
    assert main(["generate", str(folder), "--prompt", "a", "--max-tokens", "2", "--kv-blocks", "40"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("headstart: error:")] == lines[:1]
    assert CASES[case].says in " ".join(lines) and "Traceback" not in " ".join(lines)


@pytest.mark.slow
def test_aliases_name_their_family() -> None:
    assert family_named("glm4moe") is family_of("glm4_moe") and family_named("deepseek2") is family_of("deepseek_v3")
    assert family_named("qwen35moe") is family_of("qwen3_5_moe") and not any(map(is_known, DESCRIBED))


def export_source(family: str, **changes: Any) -> SimpleNamespace:
    """A source for exporting in MiMo's layout, with a head that fits; `changes` apply to the attention of the first
    layer."""
    sizes = tiny_model(family).config
    head = SimpleNamespace(spec=HeadSpec(layer=plain_layer(sizes), tap="pre_norm"))
    first = replace(sizes.layers[0], mixer=replace(sizes.layers[0].mixer, **changes))
    return SimpleNamespace(name=family, sizes=replace(sizes, layers=(first, *sizes.layers[1:])), head=head)


@pytest.mark.parametrize(("family", "changes", "why"), [
    ("qwen3", {}, "q and k are normed"), ("qwen3_5", {}, "q and k are normed"),
    ("glm4_moe", {}, "q and k are normed"), ("deepseek_v3", {}, "there are experts"),
    ("llama", {"gated": True}, "attention is gated"), ("llama", {"o_bias": True}, "output has a bias"),
    ("llama", {"rope": None}, "a part of each head is not rotated"),
    ("llama", {"qkv_bias": True}, "its layers are not all"),
])  # fmt: skip
def test_mimo_layout_refuses_other_trunks(family: str, changes: dict[str, Any], why: str) -> None:
    """The head would fit in each case."""
    with pytest.raises(ModelError, match=why):
        vllm_mimo.check(export_source(family, **changes))
    vllm_mimo.check(export_source("llama"))


def test_row_subsets_have_the_values_of_taken_rows() -> None:
    """Rows gathered late equal rows gathered at once, in FP8 as well."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x70, (300, 130)).astype(np.uint8)
    scales = rng.random((3, 2)).astype(np.float32)
    stored = {
        "w": make_tensor("w", codes.shape, "F8_E4M3", codes.reshape(-1)),
        "w_scale_inv": make_tensor("w_scale_inv", scales.shape, "F32", scales.reshape(-1).view(np.uint8)),
    }
    scaled, rows = readable(stored, {})["w"], rng.permutation(300)[:170]
    whole = scaled.float32()
    np.testing.assert_array_equal(scaled.take_rows(rows).float32(), whole[rows])
    np.testing.assert_array_equal(RowSubset(scaled, rows).float32(), whole[rows])
    again = rows[rows < len(rows)]
    np.testing.assert_array_equal(RowSubset(RowSubset(scaled, rows), again).float32(), whole[rows][again])


def test_loading_reports_progress(tmp_path: Path) -> None:
    """One report for each matrix and vector of the trunk and its MTP module."""
    config, arrays = family_of("qwen3_5").tiny()
    reports: list[tuple[int, int, str]] = []
    settings = EngineConfig(backend="reference", threads=1)
    model = load_model(str(write_model(tmp_path, config, arrays)), settings, lambda *each: reports.append(each))
    assert len(reports) == len(model.weights.used) and {text for *_, text in reports} == {"loading, million weights"}
