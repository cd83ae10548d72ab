"""`headstart export`: MiMo directories that draft as the source, copied tokenizer files, refused targets."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import torch
from transformers import AutoTokenizer

from headstart import hub
from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.engine.load import load_model
from headstart.errors import ModelError, UsageError
from headstart.formats.base import Checkpoint, text_readers
from headstart.formats.gguf_file import read as read_gguf
from headstart.formats.safetensors import bfloat16
from headstart.heads.base import HeadSpec
from headstart.heads.kind import head_kind
from headstart.models.small import random_arrays
from headstart.text.chat import ChatTemplate
from headstart.tools.export.plan import Plan
from headstart.tools.export.run import ExportOptions, run
from headstart.tools.export.source import ExportSource, add_text_side
from headstart.train.objective import unroll


def trunk_and_head(tmp_path: Path, hidden_first: bool, **keys: object) -> tuple[Path, Path]:
    """A tiny Llama with these keys in config.json, and an MTP head."""
    config, arrays = support.family_of("llama").tiny(tie_word_embeddings=True)
    config |= keys
    model = support.write_model(tmp_path / "model", config, arrays)
    sizes = support.family_of("llama").parse(config)
    spec = HeadSpec(layer=sizes.head_layer, hidden_first=hidden_first, tap="pre_norm")
    shapes = head_kind("mtp").shapes(spec, sizes.hidden_size)
    arrays = {name: bfloat16(array) for name, array in random_arrays(shapes, 5).items()}
    support.write_head(tmp_path / "head", sizes, spec, arrays, np.arange(0, sizes.vocab_size, 2))
    return model, tmp_path / "head"


@pytest.mark.slow
@pytest.mark.parametrize("hidden_first", [False, True])
def test_exported_mimo_directory_drafts_the_same_tokens(tmp_path: Path, hidden_first: bool) -> None:
    model, head = trunk_and_head(tmp_path, hidden_first)
    out = tmp_path / "mimo"
    assert run(ExportOptions(model=str(model), head=head, to="vllm-mimo", out=out)).ok
    assert {path.name for path in out.iterdir()} >= {"config.json", "model.safetensors", "configuration_mimo.py"}
    assert json.loads((out / "config.json").read_text())["auto_map"]["AutoConfig"] == "configuration_mimo.MiMoConfig"
    common: dict[str, Any] = {"backend": "reference", "dtype": "float64", "threads": 1, "max_model_len": 96}
    ours = load_model(str(out), EngineConfig(head=str(head), **common))  # the exported trunk with the original head
    native = load_model(str(out), EngineConfig(**common))
    assert native.head.source == "the checkpoint"
    rng, width = np.random.default_rng(0), native.config.hidden_size
    hidden, tokens = torch.from_numpy(rng.standard_normal((2, 9, width))), torch.randint(0, support.VOCAB, (2, 9))
    found = []
    for each in (ours.head, native.head):
        spec = replace(each.spec, mask_first=False)  # MiMo's rule for the first pair of a text
        found.append(unroll(each.modules, spec, native.decoder.embedding, hidden, tokens, 3))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = [support.prompt_of(12, seed) for seed in range(3)]
    llm = LLM(str(out), EngineConfig(depth=3, **common))
    assert llm.method == "mtp"
    plain = [each.token_ids for each in llm.generate(prompts, params, depth=0)]
    # The same head given by --head makes the same drafts.
    apart = LLM(str(out), EngineConfig(head=str(out), depth=3, **common))
    drafted = [[(each.token_ids, each.speculation) for each in one.generate(prompts, params)] for one in (llm, apart)]
    assert drafted[0] == drafted[1] and [tokens for tokens, _ in drafted[0]] == plain


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    ],
)
def test_exported_mimo_directory_has_the_rope_of_the_model(tmp_path: Path, keys: dict[str, Any]) -> None:
    model, head = trunk_and_head(tmp_path, False, **keys)
    assert run(ExportOptions(model=str(model), head=head, to="vllm-mimo", out=tmp_path / "mimo")).ok
    llama, mimo = (json.loads((folder / "config.json").read_text()) for folder in (model, tmp_path / "mimo"))
    layers = support.family_of("llama").parse(llama).layers, support.family_of("mimo").parse(mimo).layers
    assert layers[0][0].mixer.rope == layers[1][0].mixer.rope


def test_mimo_head_of_another_size_is_refused(tmp_path: Path) -> None:
    model, _ = trunk_and_head(tmp_path, False)
    _, head = trunk_and_head(tmp_path / "other", False, intermediate_size=40)
    with pytest.raises(ModelError, match="the head's block differs from its layers"):
        run(ExportOptions(model=str(model), head=head, to="vllm-mimo", out=tmp_path / "mimo"))


def test_chat_templates_and_tokenizers_are_copied(tmp_path: Path) -> None:
    model, head = trunk_and_head(tmp_path, True)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (model / "tokenizer.model").write_bytes(b"\xff\x00")
    out = tmp_path / "mimo"
    assert run(ExportOptions(model=str(model), head=head, to="vllm-mimo", out=out)).ok
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "tokenizer.model"):
        assert (out / name).read_bytes() == (model / name).read_bytes()


@pytest.mark.skipif(hub.cached_trunk() is None, reason="the default model is not in the cache: headstart pull")
def test_all_chat_templates_of_a_gguf_file_are_exported(tmp_path: Path) -> None:
    texts = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "rag": "{{ documents }}"}
    keys = {"tokenizer.chat_template." + name: text for name, text in texts.items() if name != "default"}
    metadata = read_gguf(hub.resolve()).metadata | keys | {"tokenizer.chat_template": texts["default"]}
    model = Checkpoint(Path("a.gguf"), "gguf", {}, {}, True, **text_readers("from_gguf", metadata))
    plan = Plan()
    add_text_side(plan, ExportSource("a", model, *[None] * 4))  # type: ignore[arg-type]
    for name, text in plan.texts.items():
        (tmp_path / name).write_text(text)
    exported = ChatTemplate.from_directory(tmp_path)
    assert exported and exported.sources == texts
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == texts


def test_refused_export_writes_no_files(tmp_path: Path) -> None:
    model, head = trunk_and_head(tmp_path, True)
    out = tmp_path / "out"
    refused = (
        ("sglang", UsageError, "unknown.*SGLang reads vllm-eagle3"), ("vllm-eagle3", ModelError, "not eagle3"),
    )  # fmt: skip
    for to, error, message in refused:
        with pytest.raises(error, match=message):
            run(ExportOptions(model=str(model), head=head, to=to, out=out))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "model"]
