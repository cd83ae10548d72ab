"""Classification of published drafters, which inspect, launch, export and train share."""

import json
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest

from headstart.errors import UsageError
from headstart.formats.safetensors import save
from headstart.heads.files import is_head
from headstart.heads.published import published_formats
from headstart.hub import HEADS
from headstart.models.classify import OTHERS, classify, classify_path

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 128256}
ONE_LAYER = {**LLAMA, "num_hidden_layers": 1}
SPECULATORS = {"transformer_layer_config": {"model_type": "llama", "hidden_size": 64, "vocab_size": 128}}
ORIGINAL_MEDUSA = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2, "medusa_num_layers": 1}
DFLASH = {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669}

FORMS: list[tuple[str, str, dict[str, Any]]] = [
    ("eagle3", "eagle3", {**ONE_LAYER, "architectures": ["LlamaForCausalLMEagle3"]}),
    ("eagle3", "eagle3", {**ONE_LAYER, "draft_vocab_size": 32000}),  # SafeAILab
    ("eagle3", "eagle3", {**ONE_LAYER, "eagle_config": {"use_aux_hidden_state": True}}),
    ("eagle3", "eagle3", {**ONE_LAYER, "architectures": ["Eagle3LlamaForCausalLM"]}),  # AngelSlim
    ("eagle3", "eagle3", {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2"}),
    ("eagle3", "eagle3", {**SPECULATORS, "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}),
    ("peagle", "eagle3", {**SPECULATORS, "speculators_model_type": "peagle"}),
    ("eagle", "eagle", {"model_type": "eagle", "architectures": ["EAGLEModel"]}),
    ("eagle", "eagle", {**ONE_LAYER, "architectures": ["LlamaForCausalLMEagle"]}),
    ("eagle", "eagle", {**ONE_LAYER, "architectures": ["EagleLlama4ForCausalLM"]}),
    ("eagle", "eagle", ONE_LAYER),
    ("medusa", "medusa", ORIGINAL_MEDUSA),
    ("medusa", "medusa", {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 5}),
    ("mlp_speculator", "mlp_speculator", {"architectures": ["MLPSpeculatorPreTrainedModel"], "n_predict": 3}),
    ("dflash", "dflash", {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16}),
    ("dflash", "dflash", {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "dflash_config": DFLASH}),
    ("dflash", "dflash", {"model_type": "muse_glimmer_assistant", "block_size": 16}),
    ("dflash2", "dflash", {**SPECULATORS, "speculators_model_type": "dflash2"}),
    ("dspark", "dspark", {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "block_size": 7}),
    ("dspark", "dspark", {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "dspark"}}),
    ("k3_dspark", "dspark", {"architectures": ["K3DSparkModel"], "block_size": 7}),
    ("assistant", "mtp", {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant"}),
    ("assistant", "mtp", {"model_type": "gemma4_unified_assistant"}),
    ("speculators_mtp", "mtp", {**SPECULATORS, "speculators_model_type": "mtp"}),
    ("xllm_mtp", "mtp", {"model_type": "deepseek_v4_mtp", "architectures": ["DeepseekV4MtpForCausalLM"]}),
    ("headstart", "headstart", {"headstart_head": 1, "kind": "medusa"}),
    ("mtp", "mtp", {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}),
    ("mtp", "mtp", {"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 1}}),
    ("mtp", "dspark", {"model_type": "deepseek_v4", "dspark_block_size": 5, "n_mtp_layers": 3}),
    ("draft_model", "draft_model", {**LLAMA, "num_hidden_layers": 16}),
    (
        "draft_model", "draft_model",
        {"architectures": ["Eagle2_5_VLForConditionalGeneration"], "model_type": "eagle_vl"}),
    ("unknown", "", {**SPECULATORS, "speculators_model_type": "unheard_of", "architectures": ["Eagle3Speculator"]}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "method", "config"), FORMS)
def test_published_forms_are_classified(kind: str, method: str, config: dict[str, Any]) -> None:
    found = classify(config)
    assert (found.kind, found.method) == (kind, method) and found.separate == (kind not in OTHERS)


def test_every_kind_is_tested() -> None:
    assert {kind for kind, _, _ in FORMS} == {*(each.key for each in published_formats()), *OTHERS}


@pytest.mark.parametrize(("names", "kind"), [
    (["fc.weight", "layers.0.mlp.up_proj.weight"], "eagle"),
    (["fc.weight", "midlayer.self_attn.q_proj.weight"], "eagle3"),
    (["fc.weight", "d2t", "layers.0.self_attn.q_proj.weight"], "eagle3"),
    (["0.0.linear.weight"], "medusa"),
    (["model.layers.0.mlp.up_proj.weight"], "draft_model"),
])  # fmt: skip
def test_ambiguous_configs_are_classified_by_tensors(names: list[str], kind: str) -> None:
    assert classify({**LLAMA, "num_hidden_layers": 1}, names).kind == kind


def test_classification_gives_facts_for_launchers() -> None:
    eagle = classify({**ONE_LAYER, "draft_vocab_size": 32000})
    assert eagle.reduced_vocabulary and eagle.max_drafts is None
    assert not classify({**ONE_LAYER, "draft_vocab_size": 128256}).reduced_vocabulary
    assert classify({"architectures": ["DFlashDraftModel"], "block_size": 16}).max_drafts == 15
    spark = {"architectures": ["Qwen3DSparkModel"], "block_size": 7}
    assert classify(spark).max_drafts == 7 and classify({**spark, "sample_from_anchor": False}).max_drafts == 6


def test_folders_are_classified(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ONE_LAYER))
    assert classify_path(tmp_path).kind == "eagle"  # pickle files are not opened
    save(tmp_path / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": np.zeros((4, 4), np.float32)})
    assert classify_path(tmp_path).kind == "draft_model"
    save(tmp_path / "model.safetensors", {"d2t": np.zeros(4, np.int64)})
    assert (classify_path(tmp_path).kind, is_head(tmp_path)) == ("eagle3", False)
    shipped = [path for path in HEADS.iterdir() if (path / "config.json").exists()]
    assert {classify_path(path).kind for path in shipped} == {"headstart"}
    with pytest.raises(UsageError, match="no drafter at"):
        classify_path(tmp_path / "absent")


@pytest.mark.parametrize(("metadata", "kind", "method"), [
    ({"general.architecture": "eagle3"}, "eagle3", "eagle3"),
    ({"general.architecture": "dflash", "dflash.block_size": 16}, "dflash", "dflash"),
    ({"general.architecture": "gemma4-assistant"}, "assistant", "mtp"),
    ({"general.architecture": "qwen35", "qwen35.nextn_predict_layers": 1}, "mtp", "mtp"),
    ({"general.architecture": "llama"}, "draft_model", "draft_model"),
])  # fmt: skip
def test_gguf_files_are_classified(tmp_path: Path, metadata: dict[str, Any], kind: str, method: str) -> None:
    path = tmp_path / "drafter.gguf"
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
    gguf_files.written(writer, path)
    found = classify_path(path)
    assert (found.kind, found.method, found.container) == (kind, method, "gguf")
    assert found.max_drafts == (15 if kind == "dflash" else None)


def test_parts_of_a_split_gguf_model_are_classified_by_the_first(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "drafter.gguf", "eagle3", split_max_tensors=1)
    for name in ("fc.weight", "output_norm.weight"):
        writer.add_tensor(name, np.zeros(4, np.float32))
    gguf_files.written(writer, tmp_path / "drafter.gguf")
    assert [classify_path(path).kind for path in sorted(tmp_path.glob("*.gguf"))] == ["eagle3", "eagle3"]
