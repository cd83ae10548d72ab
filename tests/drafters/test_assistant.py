"""Assistant heads, whose layers read the trunk's keys: drafts of transformers, and the text of plain decoding."""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import torch
from support import assert_same, make, new_sequence, prompt_of, request, run, tiny_model, varied_requests
from tiny_models import write_model
from transformers import AutoModelForCausalLM, Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from headstart.config import EngineConfig
from headstart.drafters.base import DraftRequest
from headstart.engine.load import Model, attach_head, load_model
from headstart.errors import ModelError
from headstart.heads.assistant import read

KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
TRUNK = {
    "vocab_size_per_layer_input": support.VOCAB + 1, "num_hidden_layers": 6, "layer_types": KINDS * 2,
    "num_kv_shared_layers": 2,
}  # fmt: skip
OWN = {
    "vocab_size": support.VOCAB + 1, "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 3,
    "layer_types": KINDS, "num_attention_heads": 4, "head_dim": 16, "global_head_dim": 24, "attention_k_eq_v": True,
    "num_global_key_value_heads": 1, "sliding_window": 11, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False, "num_kv_shared_layers": 3,
}  # fmt: skip
"""A vocabulary that makes twelve groups."""


@cache
def trunk(backend: str = "reference", dtype: str = "float32") -> Model:
    config, arrays = support.family_of("gemma4").tiny(vocab_size=OWN["vocab_size"], **TRUNK)
    folder = write_model(support.new_folder(), config, support.soften(arrays, 0.3))
    return load_model(str(folder), EngineConfig(backend=backend, dtype=dtype, threads=1))


@cache
def oracle_at(groups: int, seed: int = 1) -> tuple[Gemma4AssistantForCausalLM, Path]:
    """A random assistant for the tiny trunk, and its folder."""
    torch.manual_seed(seed)
    config = trunk().checkpoint.config
    text = Gemma4TextConfig(**OWN, num_key_value_heads=config["num_key_value_heads"])
    sizes = {"backbone_hidden_size": config["hidden_size"], "num_centroids": 12, "centroid_intermediate_top_k": 3}
    settings = Gemma4AssistantConfig(text_config=text, use_ordered_embeddings=groups > 0, **sizes)
    with pytest.MonkeyPatch.context() as patch:
        # transformers 5.23 refuses models whose layers all share keys, including its own assistants
        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", ["reuse"] * OWN["num_hidden_layers"])
        assistant = Gemma4AssistantForCausalLM(settings).eval()
    with torch.no_grad():
        for weight in assistant.parameters():
            is_norm = weight.ndim == 1
            weight.copy_(torch.randn_like(weight) * (0.2 if is_norm else 0.3) + (1 if is_norm else 0))
        if groups:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(OWN["vocab_size"]))
    path = support.new_folder()
    assistant.save_pretrained(path)
    return assistant, path


def with_assistant(model: Model, groups: int = 0) -> Model:
    return replace(model, head=attach_head(model, oracle_at(groups)[1]))


def expected_drafts(oracle: Any, assistant: Any, tokens: list[int], depth: int) -> list[int]:
    """Drafts of transformers' SinglePositionMultiTokenCandidateGenerator, over the keys of one full pass; sliding
    layers see only the keys that their cache keeps."""
    kept = {"sliding_attention": OWN["sliding_window"] - 1, "full_attention": len(tokens)}
    hidden, last, found = None, tokens[-1], []
    with torch.inference_mode():
        known = oracle(torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
        keys = {
            kind: tuple(each[:, :, -kept[kind] :] for each in pair) for kind, pair in known.shared_kv_states.items()
        }
        hidden = known.hidden_states[-1][:, -1:]
        for _ in range(depth):
            embedded = oracle.get_input_embeddings()(torch.tensor([[last]]))
            output = assistant(
                inputs_embeds=torch.cat((embedded, hidden), -1),
                position_ids=torch.tensor([[len(tokens) - 1]]),
                shared_kv_states=keys,
            )
            hidden, last = output.last_hidden_state, int(output.logits[0, -1].argmax())
            found.append(last)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("groups", [0, 12])
def test_drafts_match_transformers(groups: int) -> None:
    """Compared at every length, within sliding windows and beyond."""
    model = with_assistant(trunk(), groups)
    oracle = AutoModelForCausalLM.from_pretrained(model.checkpoint.path, dtype=torch.float32).eval()
    engine = make(model, dtype="float32", drafter="assistant", depth=4)
    tokens = prompt_of(40, 3)
    found, expected = [], []
    for length in range(2, len(tokens)):
        sequence = new_sequence(engine, tokens, length, length - 1)
        engine.drafting.drafter.propose([DraftRequest(sequence, 4)])
        found += sequence.draft.tokens
        expected += expected_drafts(oracle, oracle_at(groups)[0], tokens[:length], 4)
        engine.memory.release(sequence)
    assert np.mean(np.equal(found, expected)) >= 0.99


CELLS: tuple[dict[str, Any], ...] = (
    {"depth": 3}, {"depth": 16, "kv_blocks": 24, "max_num_batched_tokens": 9}, {"depth": 5, "max_num_seqs": 2},
)  # fmt: skip


def own_settings(backend: str) -> dict[str, Any]:
    return {"backend": backend, "dtype": "float64" if backend == "reference" else "float32", "block_size": 16}


@cache
def plain(backend: str, temperature: float) -> support.Outputs:
    """Plain decoding, one request after another."""
    own = own_settings(backend)
    engine = make(trunk(backend, own["dtype"]), **own, drafter="none", max_num_seqs=1, kv_blocks=40)
    return run(engine, varied_requests(temperature))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("groups", [0, 12])
def test_assistant_drafts_keep_the_text(backend: str, groups: int) -> None:
    """Greedy and sampled, batched, in chunks, preempted."""
    own = own_settings(backend)
    model = with_assistant(trunk(backend, own["dtype"]), groups)
    for temperature, cell in zip((0.0, 0.8, 1.2), CELLS, strict=True):
        engine = make(model, **own, drafter="assistant", **cell)
        assert_same(run(engine, varied_requests(temperature)), plain(backend, temperature))
        assert engine.stats.drafted > 30


def test_whole_draft_equals_stepwise_draft() -> None:
    """Rule `exact` makes the draft in one call of the backend, rule `rejection` in one pass a token."""
    model, drafts = with_assistant(trunk("native"), 12), []
    for rule in ("exact", "rejection"):  # `rejection` keeps distributions and drafts stepwise
        engine = make(model, backend="native", dtype="float32", block_size=16, drafter="assistant", depth=5, rule=rule)
        (sequence,) = engine.submit(request(prompt_of(30, 2), max_tokens=9, stops=()))
        while sequence.num_computed < 29:
            engine.step(lambda deltas: None)
        drafts.append(sequence.draft.tokens)
    assert drafts[0] == drafts[1] and len(drafts[0]) == 5


def assistant_with_config(tmp_path: Path, groups: int = 12, **changes: Any) -> Path:
    """A copy of the assistant's folder with config values changed, in text_config for keys that are there."""
    folder = tmp_path / "changed"
    shutil.copytree(oracle_at(groups)[1], folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        (config if key in config else config["text_config"])[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("changes", "said"), [
    ({"backbone_hidden_size": 40}, "its hidden_size is 40, the model's is 48"),
    ({"vocab_size": 133}, "its vocab_size is 133, the model's is 132"),
    ({"head_dim": 12}, "layer 0 of the assistant reads keys with head_dim 12, the model's sliding_attention"),
    ({"num_centroids": 9}, "does not put 132 tokens into 9 groups"),
    ({"num_centroids": None}, "is missing or wrong"),
    ({"text_config": 3}, "text_config is 3, not an object"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    ({"layer_types": ["full_attention"] * 2}, "layer_types .* is missing or wrong"),
    ({"sliding_window": 1}, "with a window of 1 is missing or wrong"),
    ({"enable_moe_block": True}, "enable_moe_block is True, which is not known of an assistant"),
    ({"intermediate_size": 30}, "has shape"),
])  # fmt: skip
def test_mismatched_assistants_are_refused_by_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        attach_head(trunk(), assistant_with_config(tmp_path, **changes))


def test_config_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    """Sizes missing in text_config, for both families."""
    for kind, window in (("gemma4_assistant", 512), ("gemma4_unified_assistant", 1024)):
        settings: dict[str, Any] = {"model_type": kind, "text_config": {"num_hidden_layers": 4, "hidden_size": 256}}
        found = read({**settings, "backbone_hidden_size": 1536}, {}, tmp_path)
        assert (found.vocab_size, found.hidden_size) == (262144, 1536)
        specs = [layer.mixer.spec for layer in found.spec.reader.layers]
        assert [(spec.head_dim, spec.window) for spec in specs] == [(256, window)] * 3 + [(512, 0)]


def test_trunks_of_another_family_are_refused() -> None:
    _, path = oracle_at(0)
    with pytest.raises(ModelError, match=r"has none|reads keys with"):
        attach_head(tiny_model("llama", dtype="float32", vocab_size=OWN["vocab_size"]), path)
