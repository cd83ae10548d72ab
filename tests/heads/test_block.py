"""Modules of block drafters: comparison with a plain computation, files, refused heads."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import torch

from headstart.core import Rows
from headstart.drafters.block import BlockNetwork
from headstart.engine.load import attach_head
from headstart.errors import ModelError
from headstart.formats.safetensors_file import read_file
from headstart.heads.files import read_head
from headstart.layers.network import Pools

DRAFT_IDS = tuple(range(1, support.VOCAB, 3))
MARKOV = {"markov_rank": 8, "confidence": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "dspark": {**MARKOV},
    "dflash": {"causal": False, "anchor_predicts": False, "qk_norm": True, "num_layers": 3},
    "markov alone": {"markov_rank": 4, "anchor_predicts": False, "mask_embedding": True},
    "confidence of the row": {**MARKOV, "confidence_markov": False, "logit_scale": 0.5, "num_layers": 1},
    "windows": {"causal": False, "windows": (3, 0), "sinks": True},
    "causal windows": {"causal": False, "windows": (4, 0), "causal_windows": True},
    "interleaved": {"interleaved": True, "qk_norm": True, "num_layers": 5, "mask_embedding": True},
    "gated": {**MARKOV, "markov_kind": "gated"},
    "rnn": {**MARKOV, "markov_kind": "rnn", "logit_scale": 0.5},
    "dflash2": {
        "markov_rank": 8,
        "markov_kind": "selector",
        "top_k": 3,
        "conv_taps": 2,
        "conv_group": 4,
        "causal": False,
        "anchor_predicts": False,
        "embedding_scale": 1.5,
        "logit_scale": 2.0,
        "logit_softcap": 3.0,
    },
}


def head_folder(model: Any, path: Path, own: tuple[str, ...] = (), draft_ids: Any = None, **facts: Any) -> Path:
    spec = support.block_spec(model, **facts)
    return support.write_head(path, model.config, spec, support.block_arrays(model, spec, draft_ids, own), draft_ids)


def float64_tensors(path: Path) -> dict[str, Any]:
    """Tensors of the head in float64."""
    stored = read_file(path / "model.safetensors").items()
    return {name: torch.from_numpy(each.float32().copy()).double() for name, each in stored if each.dtype[0] != "I"}


def norm(x: Any, w: Any, eps: float) -> Any:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w


def rotate(x: Any, positions: Any, inv_freq: Any, *, interleaved: bool) -> Any:
    """Rotary embedding of x [T, heads, D]."""
    angle = (positions[:, None] * inv_freq)[:, None]
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def plain_block(t: dict[str, Any], spec: Any, streams: Any, ids: list[int], embedding: Any) -> Any:
    """Plain float64 computation without pools: streams [n, taps * H] of positions 0 .. n - 1 and the token ids of a
    block at n, n + 1, ... -> y [rows, H]."""
    block, layer = spec.block, spec.layer
    attention, eps, inv_freq = layer.mixer.spec, layer.eps, torch.tensor(layer.mixer.rope.inv_freq, dtype=torch.float64)
    features = norm(streams @ t["fuse.weight"].T, t["hidden_norm.weight"], eps)
    x = embedding[torch.tensor(ids)].clone()
    if block.mask_embedding:
        x[[token == block.mask_token_id for token in ids]] = t["mask_embedding"]
    x = x * block.embedding_scale
    count, rows = len(features), len(ids)
    places = torch.arange(count + rows)
    for i in range(block.num_layers):
        at = lambda name: t[f"layers.{i}.{name}"]  # noqa: B023, E731
        h = before = norm(x, at("input_layernorm.weight"), eps)
        if block.conv_taps:
            h = plain_conv(t, f"layers.{i}.attention_conv.", h, before, 0)
        both = torch.cat((features, h))
        q = (h @ at("self_attn.q_proj.weight").T).unflatten(-1, (-1, attention.head_dim))
        k, v = ((both @ at(f"self_attn.{n}_proj.weight").T).unflatten(-1, (-1, attention.head_dim)) for n in "kv")
        if layer.mixer.qk_norm:
            q, k = norm(q, at("self_attn.q_norm.weight"), eps), norm(k, at("self_attn.k_norm.weight"), eps)
        q = rotate(q, places[count:], inv_freq, interleaved=block.interleaved)
        k = rotate(k, places, inv_freq, interleaved=block.interleaved)
        k, v = (each.repeat_interleave(attention.num_heads // attention.num_kv_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * attention.scale
        if block.is_causal(i):
            scores = scores.masked_fill(places[None, None, :] > places[None, count:, None], -torch.inf)
        if window := block.window(i):
            scores = scores.masked_fill(places[None, None, :] <= places[None, count:, None] - window, -torch.inf)
        if block.sinks:
            sinks = at("self_attn.sinks")[:, None, None].expand(-1, rows, 1)
            weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ at("self_attn.o_proj.weight").T
        x = x + (plain_conv(t, f"layers.{i}.attention_conv.", out, before, 1) if block.conv_taps else out)
        h = before = norm(x, at("post_attention_layernorm.weight"), eps)
        if block.conv_taps:
            h = plain_conv(t, f"layers.{i}.mlp_conv.", h, before, 0)
        gate, up = (h @ at(f"mlp.{n}_proj.weight").T for n in ("gate", "up"))
        out = (torch.nn.functional.silu(gate) * up) @ at("mlp.down_proj.weight").T
        x = x + (plain_conv(t, f"layers.{i}.mlp_conv.", out, before, 1) if block.conv_taps else out)
    return norm(x, t["norm.weight"], eps)


def plain_conv(t: dict[str, Any], at: str, x: Any, before: Any, side: int) -> Any:
    """out[i, c] = sum over taps of (base[tap, c] + delta[i, tap, group of c]) x[i - tap, c], at the input (side 0) or
    output (side 1) of a part whose input is `before`."""
    base = t[f"{at}base_kernel"][side]
    deltas = (before @ t[f"{at}kernel_projection.weight"].T).view(len(x), 2, len(base), -1)[:, side]
    out = torch.zeros_like(x)
    for i in range(len(x)):
        for tap in range(min(len(base), i + 1)):
            kernel = base[tap] + deltas[i, tap].repeat_interleave(x.shape[1] // deltas.shape[-1])
            out[i] += kernel * x[i - tap]
    return out


def plain_markov(t: dict[str, Any], block: Any, logits: Any, y: Any, before: list[int]) -> Any:
    """Logits [L, V'] with the Markov term of the token before each row: formulas of DeepSpec's markov_head.py and
    z-lab's CandidateSelector."""
    state, found = torch.zeros(block.markov_rank, dtype=torch.float64), []
    for row, h, token in zip(logits, y, before, strict=True):
        e, out = t["markov.embed.weight"][token], t["markov.out.weight"]
        if block.markov_kind == "selector":
            best = row.topk(block.top_k).indices
            chosen = torch.full_like(row, -1e30)
            chosen[best] = row[best] + out[best] @ (e * (t["markov.row.weight"] @ h))
            found.append(chosen)
            continue
        z = e
        if block.markov_kind == "gated":
            z = torch.sigmoid(t["markov.gate.weight"] @ torch.cat((h, e)) + t["markov.gate.bias"]) * e
        elif block.markov_kind == "rnn":
            joint = t["markov.joint.weight"] @ torch.cat((state, e, h)) + t["markov.joint.bias"]
            gate, candidate, output = joint.chunk(3)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            z = output.tanh()
        found.append(row + out @ z * block.logit_scale)
    return torch.stack(found)


@pytest.mark.parametrize("own", [(), ("lm_head", "embed_tokens")], ids=["shared", "own"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_block_matches_plain_computation(variant: str, own: tuple[str, ...], tmp_path: Path) -> None:
    model = support.tiny_model("llama")
    draft_ids = DRAFT_IDS if own else None
    path = head_folder(model, tmp_path / "head", own, draft_ids, **VARIANTS[variant])
    head, t = attach_head(model, path), float64_tensors(path)
    rng, count, width, block = np.random.default_rng(0), 7, model.config.hidden_size, head.spec.block
    streams = torch.from_numpy(rng.standard_normal((count, 2 * width)))
    embedding = model.decoder.embedding if head.embedding is None else head.embedding
    lm_head = head.lm_head or model.decoder.lm_head
    ids = [9] + [1] * 4
    y = plain_block(t, head.spec, streams, ids, embedding)
    expected = y @ lm_head.weight.T * block.logit_scale
    if cap := block.logit_softcap:
        expected = cap * torch.tanh(expected / cap)
    pools = [model.backend.kv_pool(32, spec) for spec in head.modules[0].kv_specs]
    network = BlockNetwork(head.modules[0], embedding, lm_head, 2 * width)
    codes = {name: each.code for name, each in network.programs(Pools(pools)).items()}
    run = model.backend.run
    for start, end in ((0, 4), (4, count)):
        run(codes["features"], support.plan_at(start, [5] * (end - start)), hidden=streams[start:end])
    found = run(codes["block"], support.plan_at(count, ids, None if block.all_causal else count + 4))
    torch.testing.assert_close(found["logits"][:, : expected.shape[1]], expected, rtol=1e-9, atol=1e-9)
    before = [9, 20, 21, 22, 23]
    if block.markov_rank:
        token_embeddings, wanted = t["markov.embed.weight"][before], plain_markov(t, block, expected, y, before)
        if block.markov_kind == "rnn":
            steps, rows = [], found["logits"].clone()
            for i, token in enumerate(before):
                if i:
                    rows[i, -block.markov_rank :] = steps[-1]["carry"]
                steps.append(run(codes["markov"], support.plan_at(count, [token]), hidden=rows[i : i + 1]))
            added = {name: torch.cat([step[name] for step in steps]) for name in steps[0]}
        else:
            added = run(codes["markov"], support.plan_at(count, before), hidden=found["logits"])
        torch.testing.assert_close(added["logits"], wanted, rtol=1e-9, atol=1e-9)
    if block.confidence:
        confidence = found["confidence"] + (added["confidence"] if block.confidence_markov else 0)
        read = torch.cat((y, token_embeddings), -1) if block.confidence_markov else y
        torch.testing.assert_close(
            confidence, read @ t["confidence.weight"].T + t["confidence.bias"], rtol=1e-9, atol=1e-9
        )


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["dspark", "dflash", "gated", "rnn", "dflash2"])
def test_engine_drafts_match_plain_computation(variant: str, tmp_path: Path) -> None:
    """Covers the hidden states, positions and tokens that the engine passes: prompt chunks, prefix hits, shortened
    drafts."""
    model = support.tiny_model("llama")
    model = replace(model, head=attach_head(model, path := head_folder(model, tmp_path / "head", **VARIANTS[variant])))
    t = float64_tensors(path)
    engine = support.make(model, depth=3, drafter="block", max_num_batched_tokens=16)
    runner, block, lm_head = engine.runner, model.head.spec.block, model.decoder.lm_head.weight
    drafts = support.record_drafts(engine)
    prompts = [support.prompt_of(30, 1), support.prompt_of(30, 1)[:20] + support.prompt_of(5, 2)]
    for i, prompt in enumerate(prompts):
        support.run(engine, [support.request(prompt, name=f"r{i}", max_tokens=12, stops=())])
    assert engine.scheduler.prefix_hits > 0
    for tokens, drafted in drafts:
        sequence = support.new_sequence(engine, tokens)
        runner.run(runner.trunk, "forward", [Rows(sequence, 0, tokens, 1)])
        size, table = engine.config.block_size, sequence.block_table
        streams = runner.trunk.pools.hidden[[table[i // size] * size + i % size for i in range(len(tokens))]]
        engine.memory.release(sequence)
        ids = [tokens[-1]] + [1] * (block.rows_for(len(drafted)) - 1)
        y = plain_block(t, model.head.spec, streams[: len(tokens) - 1], ids, model.decoder.embedding)
        y = y[-len(drafted) :] if drafted else y[:0]
        logits = y @ lm_head.T * block.logit_scale
        if cap := block.logit_softcap:
            logits = cap * torch.tanh(logits / cap)
        if block.markov_rank and drafted:
            logits = plain_markov(t, block, logits, y, [tokens[-1], *drafted[:-1]])
        assert drafted == logits.argmax(-1).tolist()
    assert sum(len(drafted) for _, drafted in drafts) > 20


def test_head_files_keep_all_facts(tmp_path: Path) -> None:
    model = support.tiny_model("llama")
    facts: dict[str, Any] = {**MARKOV, "windows": (3, 0), "sinks": True, "logit_scale": 0.5}
    head = read_head(head_folder(model, tmp_path / "head", (), DRAFT_IDS, **facts))
    assert head.spec == support.sized(support.block_spec(model, **facts), support.VOCAB, DRAFT_IDS)
    assert head.draft_token_ids.tolist() == list(DRAFT_IDS)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "block_size 0": ({"block_size": 0}, "block_size is 0, but must be 1 to 16"),
    "block_size 17": ({"block_size": 17}, "block_size is 17, but must be 1 to 16"),
    "block_size a word": ({"block_size": "8"}, "block_size '8' is missing or wrong"),
    "no layers": ({"num_layers": 0}, "num_layers is 0"),
    "mask outside": ({"mask_token_id": support.VOCAB}, f"mask_token_id is {support.VOCAB}, but must be 0 to 130"),
    "windows": ({"windows": [3]}, r"windows are \(3,\), for 2 layers"),
    "rank": ({"markov_rank": -1}, "markov_rank is -1"),
    "another rank": (
        {"markov_rank": 4},
        r"markov.embed.weight has shape \(131, 8\), but the config implies \(131, 4\)",
    ),
    "more layers": ({"num_layers": 3}, "no tensor layers.2"),
    "scale": ({"logit_scale": 0}, "logit_scale is 0.0"),
    "unknown key": ({"blocksize": 3}, "blocksize"),
    **{f"taps {tap}": ({"tap": tap}, "must ascend from 0 to 2") for tap in ([0, 9], [1, 0], [], [-1, 1], "post_norm")},
}


def test_unknown_facts_of_other_versions_may_be_false(tmp_path: Path) -> None:
    model = support.tiny_model("llama")
    path = head_folder(model, tmp_path / "head", **MARKOV)
    document = json.loads((path / "config.json").read_text())
    document["block_drafter"]["tap_norms"] = False
    (path / "config.json").write_text(json.dumps(document))
    assert attach_head(model, path).spec.block.confidence


@pytest.mark.parametrize("case", WRONG)
def test_invalid_facts_are_refused_by_name(case: str, tmp_path: Path) -> None:
    model = support.tiny_model("llama")
    path = head_folder(model, tmp_path / "head", **MARKOV)
    document = json.loads((path / "config.json").read_text())
    changes, message = WRONG[case]
    (document if "tap" in changes else document["block_drafter"]).update(changes)
    (path / "config.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match=message):
        attach_head(model, path)


def test_drafter_of_another_trunk_is_refused(tmp_path: Path) -> None:
    model = support.tiny_model("llama")
    path = head_folder(model, tmp_path / "head")
    other = replace(model, config=replace(model.config, hidden_size=model.config.hidden_size // 2))
    with pytest.raises(ModelError, match=r"its hidden_size is \d+, the model's is \d+"):
        attach_head(other, path)
