"""EAGLE-3 heads: comparison with a plain computation, and files in the layouts of other engines."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.engine.load import attach_head
from headstart.errors import ModelError, UsageError
from headstart.formats.safetensors_file import read_file
from headstart.heads.base import HeadNetwork
from headstart.heads.files import read_head, write_head
from headstart.layers.network import Pools

MAPS = ("d2t", "t2d")
DRAFT_IDS = tuple(range(1, support.VOCAB, 3))


def head_folder(model: Any, path: Path, norms: tuple[str, ...] = (), qk_norm: bool = False, **changes: Any) -> Path:
    """An EAGLE-3 head; `norms` are those of EAGLE-3.1, by headstart's names."""
    spec = replace(support.eagle3_spec(model), num_layers=changes.get("num_layers", 1))
    if qk_norm:
        spec = replace(spec, layer=replace(spec.layer, mixer=replace(spec.layer.mixer, qk_norm=True)))
    arrays, width = support.eagle3_arrays(model, spec, DRAFT_IDS), 3 * model.config.hidden_size
    arrays |= {name: np.random.default_rng(len(name)).uniform(0.5, 2, width).astype(np.float32) for name in norms}
    return support.write_head(path, model.config, replace(spec, **changes), arrays, DRAFT_IDS)


def plain_eagle3(t: dict[str, Any], streams: Any, embedded: Any, spec: Any, inv_freq: Any, eps: float) -> Any:
    """Plain float64 computation from the paper's code: streams [T, 3 H] and embedded [T, H] of pairs at positions 1..
    -> logits [T, V'], recycled [T, H]."""

    def norm(x: Any, w: Any) -> Any:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w

    def rotate(x: Any) -> Any:
        angle = torch.arange(1, len(x) + 1)[:, None] * inv_freq
        cos, sin = (torch.cat((each, each), -1)[:, None] for each in (angle.cos(), angle.sin()))
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    if "input_norm.weight" in t:
        streams = norm(streams, t["input_norm.weight"])
    if "fc_norm.0.weight" in t:
        streams = torch.cat([norm(part, t[f"fc_norm.{i}.weight"]) for i, part in enumerate(streams.chunk(3, -1))], -1)

    def layer(at: str, x: Any, residual: Any) -> Any:
        q, k, v = (x @ t[f"{at}self_attn.{n}_proj.weight"].T for n in "qkv")
        q, k, v = (each.view(len(x), -1, spec.head_dim) for each in (q, k, v))
        if f"{at}self_attn.q_norm.weight" in t:
            q, k = norm(q, t[f"{at}self_attn.q_norm.weight"]), norm(k, t[f"{at}self_attn.k_norm.weight"])
        q, k = rotate(q), rotate(k)
        k, v = (each.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.head_dim**-0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf).softmax(-1)
        r = residual + torch.einsum("hqk,khd->qhd", scores, v).flatten(1) @ t[f"{at}self_attn.o_proj.weight"].T
        y = norm(r, t[f"{at}post_attention_layernorm.weight"])
        gate, up = (y @ t[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        return r + (torch.nn.functional.silu(gate) * up) @ t[f"{at}mlp.down_proj.weight"].T

    g = streams @ t["fc.weight"].T
    x = torch.cat((norm(embedded, t["midlayer.input_layernorm.weight"]), norm(g, t["midlayer.hidden_norm.weight"])), -1)
    out = layer("midlayer.", x, g)
    for i in range(1, 9):
        if (name := f"layers.{i}.input_layernorm.weight") in t:
            out = layer(f"layers.{i}.", norm(out, t[name]), out)
    return norm(out, t["norm.weight"]) @ t["lm_head.weight"].T, out


NORMS = ((), ("input_norm.weight",), ("tap_norms.weight",), ("input_norm.weight", "tap_norms.weight"))


@pytest.mark.parametrize(
    ("norms", "layers", "qk_norm"), [*((each, 1, False) for each in NORMS), ((), 3, False), ((), 2, True)]
)
def test_head_matches_plain_computation(tmp_path: Path, norms: tuple[str, ...], layers: int, qk_norm: bool) -> None:
    model = support.tiny_model("llama")
    path = head_folder(model, tmp_path / "head", norms, qk_norm, num_layers=layers)
    assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == layers
    attached, files = attach_head(model, path), read_file(path / "model.safetensors")
    tensors = {name: torch.from_numpy(each.float32()).double() for name, each in files.items() if name not in MAPS}
    rng, count, width = np.random.default_rng(0), 7, model.config.hidden_size
    streams, ids = torch.from_numpy(rng.standard_normal((count, 3 * width))), rng.integers(0, support.VOCAB, count)
    embedding, layer = model.decoder.embedding, support.plain_layer(model.config)
    expected, recycled = plain_eagle3(
        tensors, streams, embedding[torch.from_numpy(ids)], layer.mixer.spec,
        torch.tensor(layer.mixer.rope.inv_freq, dtype=torch.float64), layer.eps,
    )  # fmt: skip
    pools = [model.backend.kv_pool(32, each) for each in attached.modules[0].kv_specs]
    programs = HeadNetwork(attached, width, embedding, [attached.lm_head]).programs(Pools(pools))
    first, following = programs["pairs.0"].code, programs["next.0"].code
    plan = support.plan_at(1, ids, first_position=1)
    found = model.backend.run(first, plan, hidden=streams)
    torch.testing.assert_close(found["logits"], expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found["hidden"], recycled, rtol=1e-9, atol=1e-9)
    assert model.backend.run(following, plan, hidden=recycled)["logits"].shape == expected.shape


def test_files_have_the_layout_of_other_engines(tmp_path: Path) -> None:
    model = support.tiny_model("llama")
    path = head_folder(model, tmp_path / "head")
    document = json.loads((path / "config.json").read_text())
    expected = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(DRAFT_IDS), "rope_theta": 10000.0}
    assert {key: document[key] for key in expected} == expected
    tensors = read_file(path / "model.safetensors")
    assert {"fc.weight", "midlayer.hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} <= tensors.keys()
    offsets = tensors["d2t"].numpy()
    assert offsets.dtype == np.int64 and (offsets + np.arange(len(offsets))).tolist() == list(DRAFT_IDS)
    head, sizes = read_head(path), (model.config.hidden_size, model.config.vocab_size)
    assert (head.spec, head.trunk, head.hidden_size, head.vocab_size) == (support.eagle3_spec(model), "x", *sizes)
    assert head.draft_token_ids.tolist() == list(DRAFT_IDS)


@pytest.mark.parametrize("layout", ["SafeAILab", "speculators"])
@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "dynamic"])
def test_scaled_ropes_match_transformers(kind: str, layout: str, tmp_path: Path) -> None:
    """Rope scaling of a long-context trunk, under the config keys of both projects."""
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    named = {"linear": 1, "dynamic": 1, "llama3": 4, "yarn": 1}[kind]
    rope = {"rope_type": kind, "rope_theta": 5e4, **dict(list(scaling.items())[:named])}
    path = head_folder(support.tiny_model("llama"), tmp_path / "head")
    document = json.loads((path / "config.json").read_text())
    del document["rope_theta"]
    if layout == "speculators":
        document = as_speculators({**document, "rope_parameters": rope})
        inner = document["transformer_layer_config"]
    else:
        document |= {"rope_scaling": {key: rope[key] for key in rope if key != "rope_theta"}, "rope_theta": 5e4}
        inner = document
    (path / "config.json").write_text(json.dumps(document))
    wanted = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
    expected = LlamaRotaryEmbedding(LlamaConfig(**{key: inner[key] for key in wanted}, rope_parameters=rope))
    spec: Any = read_head(path).spec.layer.mixer.rope
    np.testing.assert_allclose(spec.inv_freq, expected.inv_freq.numpy(), rtol=1e-6)
    assert spec.scale == pytest.approx(expected.attention_scaling)


PEAGLE = {"speculative_tokens": 5}
MASK_TOKEN = 1  # the mask token of support.peagle_spec


def peagle_folder(model: Any, path: Path) -> Path:
    """A P-EAGLE head of two layers in the layout of speculators."""
    spec = support.peagle_spec(model)
    path = support.write_head(path, model.config, spec, support.eagle3_arrays(model, spec, DRAFT_IDS), DRAFT_IDS)
    document = json.loads((path / "config.json").read_text())
    container = as_speculators({**document, "architectures": ["PEagleSpeculator"]}) | {
        "speculators_model_type": "peagle", "mask_token_id": document.pop("ptd_token_id"),
        "speculators_config": {"algorithm": "peagle", "proposal_methods": [PEAGLE]},
        "eagle_aux_hidden_state_layer_ids": document["eagle_aux_hidden_state_layer_ids"],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(container))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_peagle_drafts_match_plain_computation(tmp_path: Path, backend: str) -> None:
    """As in speculators' core.py, rows of the mask token's embedding and of `mask_hidden` follow the last pair, all
    causal; only pairs of true states stay cached. The text is the trunk's."""
    folder = support.write_model(tmp_path / "model", *support.family_of("llama").tiny())
    trunk, path = support.tiny_model("llama"), peagle_folder(support.tiny_model("llama"), tmp_path / "head")
    settings: dict[str, Any] = {"backend": backend, "dtype": {"reference": "float64", "native": "float32"}[backend]}
    model = support.model_at(folder, **settings)
    settings["block_size"] = 16
    prompts = [support.prompt_of(18, 1), support.prompt_of(18, 1)[:10] + support.prompt_of(4, 2)]
    requests = [support.request(each, name=f"r{i}", max_tokens=10, stops=()) for i, each in enumerate(prompts)]
    plain = support.run(support.make(model, drafter="none", **settings), requests)
    model = replace(model, head=attach_head(model, path))
    assert model.head.spec.depth_limit == 5
    engine = support.make(model, drafter="peagle", depth=4, max_num_batched_tokens=8, **settings)
    drafts = support.record_drafts(engine)
    assert {k: each.tokens for k, each in support.run(engine, requests).items()} == {
        k: each.tokens for k, each in plain.items()
    }
    files = read_file(path / "model.safetensors").items()
    t = {name: torch.from_numpy(each.float32().copy()).double() for name, each in files if name not in MAPS}
    layer, same, streams_of = support.plain_layer(trunk.config), list[bool](), trunk_streams(trunk)
    for tokens, drafted in drafts:
        masks = len(drafted) - 1
        streams = torch.cat((streams_of(tokens)[:-1], t["mask_hidden"].view(1, -1).expand(masks, -1)))
        ids = torch.tensor([*tokens[1:], *[MASK_TOKEN] * masks])
        logits, _ = plain_eagle3(
            t, streams, trunk.decoder.embedding[ids], layer.mixer.spec,
            torch.tensor(layer.mixer.rope.inv_freq, dtype=torch.float64), layer.eps,
        )  # fmt: skip
        wanted = logits[-len(drafted) :].argmax(-1).tolist()
        same += [DRAFT_IDS[a] == b for a, b in zip(wanted, drafted, strict=True)]
    assert len(same) > 40 and not any(MASK_TOKEN in tokens for tokens, _ in drafts)
    assert np.mean(same) > (0.75 if backend == "native" else 0.9999)  # native drafters have int4 weights


def trunk_streams(model: Any) -> Any:
    """A function of tokens: the streams [T, 3 H] that layers 0, 1, 2 of the trunk read."""
    code = model.decoder.program([model.backend.kv_pool(128, each) for each in model.decoder.kv_specs], None, (0, 1, 2))
    return lambda tokens: model.backend.run(code, support.plan_at(0, tokens))["tapped"]


def as_speculators(document: dict[str, Any]) -> dict[str, Any]:
    outside = {key: document.pop(key) for key in ("architectures", "draft_vocab_size")}
    return {**outside, "speculators_model_type": "eagle3", "transformer_layer_config": document}


def test_speculators_names_and_default_taps_are_read(tmp_path: Path) -> None:
    """Tensor prefix layers.0 instead of midlayer, sizes in transformer_layer_config; without tap ids the head taps a
    low, middle and high layer."""
    model = support.tiny_model("llama", num_hidden_layers=8)
    path = head_folder(model, tmp_path / "head", tap=())
    (path / "config.json").write_text(json.dumps(as_speculators(json.loads((path / "config.json").read_text()))))
    assert attach_head(model, path).spec.tap == (2, 4, 5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_drafts_of_a_two_layer_head_keep_the_text(tmp_path: Path, backend: str) -> None:
    config, arrays = support.family_of("llama").tiny()
    folder = support.write_model(tmp_path / "model", config, arrays)
    path = head_folder(support.tiny_model("llama"), tmp_path / "head", NORMS[-1], num_layers=2)
    common: dict[str, Any] = {"backend": backend, "threads": 1, "max_model_len": 96, "max_num_batched_tokens": 16}
    if backend == "reference":
        common["dtype"] = "float64"
    params = [SamplingParams(max_tokens=24, temperature=t, seed=7, ignore_eos=True) for t in (0.0, 0.8, 1.0)]
    prompts = [support.prompt_of(20, seed) for seed in range(3)]
    plain = LLM(str(folder), EngineConfig(depth=0, **common)).generate(prompts, params)
    llm = LLM(str(folder), EngineConfig(head=str(path), depth=3, **common))
    assert llm.method == "eagle3"
    drafted = llm.generate(prompts, params)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert sum(each.speculation.drafted for each in drafted) > 60


def test_deepspec_layer_ids_count_layer_outputs(tmp_path: Path) -> None:
    path = with_changes(head_folder(support.tiny_model("llama"), tmp_path / "a"), {}, target_layer_ids=[0, 1])
    assert read_head(path).spec.tap == (1, 2)


@pytest.mark.parametrize(("ids", "tap"), [([1, 2, 3], (2, 3, 4)), ([2, 4, 5], (2, 4, 5))])
def test_eagle_config_ids_starting_at_one_count_layer_outputs(
    ids: list[int], tap: tuple[int, ...], tmp_path: Path
) -> None:
    named: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": ids}
    path = with_changes(head_folder(support.tiny_model("llama"), tmp_path / "a", tap=()), {}, eagle_config=named)
    assert read_head(path).spec.tap == tap


def test_mismatched_heads_are_refused(tmp_path: Path) -> None:
    model = support.tiny_model("llama")
    with pytest.raises(ModelError, match="taps the layers"):
        attach_head(model, head_folder(model, tmp_path / "a", tap=(0, 1, 9)))
    with pytest.raises(ModelError, match="rope scaling type 'spiral'"):
        read_head(with_changes(head_folder(model, tmp_path / "b"), {}, rope_scaling={"rope_type": "spiral"}))
    with pytest.raises(UsageError, match="its head is of kind eagle3"):
        support.make(replace(model, head=attach_head(model, head_folder(model, tmp_path / "c"))), drafter="mtp")


def with_changes(path: Path, more: dict[str, Any], **keys: Any) -> Path:
    """Adds tensors and config keys to the head at `path`."""
    (path / "config.json").write_text(json.dumps({**json.loads((path / "config.json").read_text()), **keys}))
    save_file({**load_file(path / "model.safetensors"), **more}, path / "model.safetensors")
    return path


@pytest.mark.parametrize("name", ["layers.1.input_layernorm.weight", "midlayer.self_attn.g_proj.weight", "fc.bias"])
def test_unknown_tensors_are_refused(name: str, tmp_path: Path) -> None:
    path = with_changes(head_folder(support.tiny_model("llama"), tmp_path / "head"), {name: torch.ones(8)})
    with pytest.raises(ModelError, match=re.escape(f"{name} is not known of an EAGLE-3 head")):
        read_head(path)


def test_norms_are_read_only_if_the_config_enables_them(tmp_path: Path) -> None:
    model = support.tiny_model("llama")
    width, unused = 3 * model.config.hidden_size, {"input_norm.weight", "verifier_norm.weight", "rotary_emb.inv_freq"}
    path = with_changes(head_folder(model, tmp_path / "a"), {name: torch.ones(width) for name in unused})
    assert not unused & read_head(path).tensors.keys()
    path = with_changes(path, {}, eagle_config={"norm_before_fc": True})
    assert "input_norm.weight" in read_head(path).tensors
    for key in ("norm_before_fc", "fc_norm"):
        with pytest.raises(ModelError, match=f"config.json says {key}, but its tensors are missing"):
            read_head(with_changes(head_folder(model, tmp_path / key), {}, **{key: True}))


def test_published_layout_round_trips(tmp_path: Path) -> None:
    path = head_folder(support.tiny_model("llama"), tmp_path / "a", ("tap_norms.weight",), recycle="post_norm")
    document, names = json.loads((path / "config.json").read_text()), set(load_file(path / "model.safetensors"))
    assert document["fc_norm"] and document["norm_output"] and {f"fc_norm.{i}.weight" for i in range(3)} <= names
    head = read_head(path)
    support.write_published(tmp_path / "b", head, {name: each.float32() for name, each in head.tensors.items()})
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == document
    assert load_file(tmp_path / "b" / "model.safetensors").keys() == names


def test_headstart_layout_round_trips(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"recycle": "post_norm", "num_layers": 2, "norm_before_residual": True}
    head = read_head(head_folder(support.tiny_model("llama"), tmp_path / "a", ("tap_norms.weight",), **changes))
    write_head(tmp_path / "b", head, {name: each.float32() for name, each in head.tensors.items()})
    again = read_head(tmp_path / "b")
    assert (again.spec, again.tensors.keys()) == (head.spec, head.tensors.keys())
    assert head.draft_token_ids is not None and again.draft_token_ids is not None
    assert again.draft_token_ids.tolist() == head.draft_token_ids.tolist()
    for name, tensor in head.tensors.items():
        np.testing.assert_array_equal(again.tensors[name].float32(), tensor.float32())
