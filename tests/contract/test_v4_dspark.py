"""DeepSeek-V4 with a DSpark drafter in the checkpoint (V4-Flash-0731), and V4.1: drafts equal a reading of DeepSeek's
and vLLM's code, the text equals plain decoding, and a broken drafter leaves the trunk served."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_drafts import assert_drafts, rotate_pairs, sinkhorn
from oracles import build_oracle, config_and_tensors
from readings import DeepseekV41
from support import EOS, family_of, make, model_at, new_folder, prompt_of, request, run, varied_requests
from tiny_models import write_model
from torch import Tensor
from torch.nn.functional import linear, softplus

from headstart.engine.load import Model
from headstart.errors import ModelError
from headstart.heads.kind import head_kind
from headstart.layers.weights import Weights
from headstart.models.small import Arrays
from headstart.tools.inspect import run as inspect
from headstart.tools.inspect.run import InspectOptions

WINDOW, STAGES, BLOCK_SIZE, NOISE, RANK, TARGETS = 64, 3, 5, 130, 6, [0, 2]
DSPARK: Mapping[str, Any] = {
    "dspark_block_size": BLOCK_SIZE, "dspark_markov_rank": RANK, "dspark_noise_token_id": NOISE,
    "dspark_target_layer_ids": TARGETS, "compress_ratios": [4, 128, 0, 0, 0, 0], "sliding_window": WINDOW,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
DSPARK_V41: Mapping[str, Any] = {
    "dspark_target_layer_ids": [1, 4, 5], "num_nextn_predict_layers": STAGES, "sliding_window": WINDOW,
}  # fmt: skip
KEYS = {"deepseek_v4": DSPARK, "deepseek_v41": DSPARK_V41}


@cache
def write_tiny_checkpoint(family: str = "deepseek_v4", **changes: Any) -> Path:
    return write_model(new_folder(), *family_of(family).tiny(**{**KEYS[family], **changes}))


@cache
def loaded(backend: str = "reference", dtype: str = "float64", family: str = "deepseek_v4", **changes: Any) -> Model:
    return model_at(write_tiny_checkpoint(family, **changes), backend, dtype)


def with_exact_drafter(model: Model) -> Model:
    """The model with unrounded matrices of its drafter, which the native backend quantizes by default."""
    assert model.head
    weights = Weights(model.weights.tensors, model.backend, "the file")
    modules = head_kind("block").modules(weights, model.head.spec, model.config.hidden_size)
    return replace(model, head=replace(model.head, modules=modules))


# A reading of vLLM 0.33 `models/deepseek_v4/nvidia/dspark.py` and `v1/attention/backends/mla/sparse_swa.py`
# (ComputeDSparkNoncausalSWAIndicesKernel), and of DeepSeek's `inference/model.py`, in torch, for one sequence.


class ReferenceDrafter:
    """The drafter's formulas over unrounded tensors, in float64."""

    markov = "markov_w1", "markov_w2"

    def __init__(self, config: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> None:
        self.config, self.arrays = config, {name: each.double() for name, each in arrays.items()}
        self.eps, self.streams = config["rms_norm_eps"], config["hc_mult"]
        self.embed, self.head = self.arrays["embed.weight"], self.arrays["head.weight"]

    def at(self, stage: int, name: str) -> Tensor:
        return self.arrays[f"mtp.{stage}.{name}"]

    def norm(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return normed if weight is None else normed * weight

    def rope(self, x: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
        width = self.config["qk_rope_head_dim"]
        return rotate_pairs(x, positions, self.config["rope_theta"], width, inverse=inverse)

    def keys(self, stage: int, x: Tensor, positions: Tensor) -> Tensor:
        """Keys, which are also the values, of all heads: [R, H] -> [R, D]."""
        kv = self.norm(linear(x, self.at(stage, "attn.wkv.weight")), self.at(stage, "attn.kv_norm.weight"))
        return self.rope(kv[:, None], positions)[:, 0]

    def attention(self, stage: int, x: Tensor, positions: Tensor, context: Tensor) -> Tensor:
        """Each row sees the last `sliding_window` positions of the context [N, D], and the whole block."""
        heads, dim = self.config["num_attention_heads"], self.config["head_dim"]
        low = self.norm(linear(x, self.at(stage, "attn.wq_a.weight")), self.at(stage, "attn.q_norm.weight"))
        q = self.norm(linear(low, self.at(stage, "attn.wq_b.weight")).unflatten(-1, (heads, dim)))
        context = context[-self.config["sliding_window"] :]
        q, kv = self.rope(q, positions), torch.cat((context, self.keys(stage, x, positions)))
        scores = torch.einsum("rhd,nd->rhn", q, kv) * dim**-0.5
        sink = self.at(stage, "attn.attn_sink").expand(len(x), heads)[..., None]
        shares = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        out = self.rope(torch.einsum("rhn,nd->rhd", shares, kv), positions, inverse=True)
        groups = self.config["o_groups"]
        down = self.at(stage, "attn.wo_a.weight").unflatten(0, (groups, -1))
        narrow = torch.einsum("rgw,gow->rgo", out.flatten(1).unflatten(-1, (groups, -1)), down)
        return linear(narrow.flatten(1), self.at(stage, "attn.wo_b.weight"))

    def mlp(self, at: str, x: Tensor) -> Tensor:
        w1, w2, w3 = (self.arrays[f"{at}.w{i}.weight"] for i in (1, 2, 3))
        gate, up = linear(x, w1).clamp(max=10), linear(x, w3).clamp(-10, 10)
        return linear(torch.nn.functional.silu(gate) * up, w2)

    def experts(self, stage: int, x: Tensor) -> Tensor:
        scores = softplus(linear(x, self.at(stage, "ffn.gate.weight"))).sqrt()
        top = (scores + self.at(stage, "ffn.gate.bias")).topk(self.config["num_experts_per_tok"]).indices
        rows = []
        for row, ids in enumerate(top):
            shares = scores[row, ids] / scores[row, ids].sum() * self.config["routed_scaling_factor"]
            parts = [self.mlp(f"mtp.{stage}.ffn.experts.{int(i)}", x[row]) for i in ids]
            rows.append(sum(share * part for share, part in zip(shares, parts, strict=True)))
        return torch.stack(rows) + self.mlp(f"mtp.{stage}.ffn.shared_experts", x)

    def mixes(self, stage: int, name: str, x: Tensor) -> Tensor:
        """[R, streams, H] -> [R, mixes]."""
        return linear(self.norm(x.flatten(1)), self.at(stage, f"{name}_fn"))

    def around(self, stage: int, name: str, x: Tensor, part: Any) -> Tensor:
        """Hyper-connection around a part of a layer, [R, streams, H]."""
        n, eps, mixes = self.streams, self.config["hc_eps"], self.mixes(stage, name, x)
        scale, base = self.at(stage, f"{name}_scale"), self.at(stage, f"{name}_base")
        pre = (mixes[:, :n] * scale[0] + base[:n]).sigmoid() + eps
        post = 2 * (mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n]).sigmoid()
        square = sinkhorn(mixes[:, 2 * n :] * scale[2] + base[2 * n :], self.config["hc_sinkhorn_iters"], eps)
        y = part((pre[..., None] * x).sum(1))
        return post[..., None] * y[:, None] + torch.einsum("rjk,rjh->rkh", square, x)

    def __call__(self, states: Tensor, anchor: int) -> tuple[Tensor, Tensor]:
        """From taps [N, taps * H] of positions 0 .. N - 1 and the token at N: base logits [B, V] and sums [B, H]."""
        main = self.norm(linear(states, self.at(0, "main_proj.weight")), self.at(0, "main_norm.weight"))
        before, positions = torch.arange(len(states)), len(states) + torch.arange(BLOCK_SIZE)
        ids = [anchor] + [NOISE] * (BLOCK_SIZE - 1)
        x = self.embed[ids][:, None].repeat(1, self.streams, 1)
        for i in range(STAGES):
            context, norms = self.keys(i, main, before), [self.at(i, f"{each}_norm.weight") for each in ("attn", "ffn")]
            x = self.around(
                i, "hc_attn", x, lambda y, i=i, c=context, w=norms[0]: self.attention(i, self.norm(y, w), positions, c)
            )
            x = self.around(i, "hc_ffn", x, lambda y, i=i, w=norms[1]: self.experts(i, self.norm(y, w)))
        last = STAGES - 1
        gates = self.mixes(last, "hc_head", x) * self.at(last, "hc_head_scale") + self.at(last, "hc_head_base")
        summed = ((gates.sigmoid() + self.config["hc_eps"])[..., None] * x).sum(1)
        return linear(self.norm(summed, self.at(last, "norm.weight")), self.head), summed

    def draft(self, states: Tensor, anchor: int) -> tuple[list[int], list[float]]:
        """Greedy tokens of a block, and the confidence in each."""
        (logits, summed), tokens, confidences, last = self(states, anchor), [anchor], list[float](), STAGES - 1
        for row in range(BLOCK_SIZE):
            table, out = (self.at(last, f"markov_head.{name}.weight") for name in self.markov)
            e = table[tokens[-1]]
            tokens.append(int((logits[row] + linear(e, out)).argmax()))
            both = torch.cat((summed[row], e))
            confidences.append(float(linear(both, self.at(last, "confidence_head.proj.weight")).sigmoid()))
        return tokens[1:], confidences


class ReferenceDrafterV41(ReferenceDrafter):
    markov = "embed", "head"

    def __call__(self, states: Tensor, anchor: int) -> tuple[Tensor, Tensor]:
        return reading_of(self.config, self.arrays).drafted(states, anchor)


def reading_of(config: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> DeepseekV41:
    reading = DeepseekV41(dict(config))
    reading.load_state_dict(arrays)
    return reading


def taps_of(model: Model, tokens: list[int]) -> tuple[ReferenceDrafter, Tensor]:
    """The reference drafter, and the mean of the oracle's streams after each target layer (V4.1: before it), [T, taps *
    H]."""
    if model.checkpoint.config["model_type"] != "deepseek_v4":
        arrays = {name: torch.tensor(each.float32()) for name, each in model.checkpoint.tensors.items()}
        drafter = ReferenceDrafterV41(model.checkpoint.config, arrays)
        _, means = reading_of(drafter.config, drafter.arrays).trunk(torch.tensor(tokens))
        return drafter, torch.cat([means[each] for each in DSPARK_V41["dspark_target_layer_ids"]], -1)
    config, tensors = config_and_tensors("deepseek_v4", model)
    trunk = {name: each for name, each in tensors.items() if not name.startswith("mtp.")}
    oracle, missing, unexpected = build_oracle("deepseek_v4", {**config, "num_nextn_predict_layers": 0}, trunk)
    assert not missing and not unexpected
    found: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        return lambda module, args, output: found.update({layer: output[0] if isinstance(output, tuple) else output})

    for layer in TARGETS:
        oracle.model.layers[layer].register_forward_hook(keep(layer))
    with torch.no_grad():
        oracle(torch.tensor([tokens]), use_cache=False)
    drafter = ReferenceDrafter(model.checkpoint.config, tensors)
    return drafter, torch.cat([found[each].reshape(len(tokens), -1, 48).mean(1) for each in TARGETS], -1).double()


@pytest.mark.parametrize("family", KEYS)
@pytest.mark.parametrize(("backend", "dtype"), [("reference", "float64"), ("native", "float32")])
@pytest.mark.parametrize(("length", "window"), [(1, 64), (7, 64), (40, 64), (11, 11), (12, 11), (40, 11), (40, 2)])
def test_drafts_match_public_code(backend: str, dtype: str, length: int, window: int, family: str) -> None:
    exact: dict[str, Any] = {"kv_cache_dtype": "float32"} if backend == "native" else {}
    path, tokens = write_tiny_checkpoint(family, sliding_window=window), [1, *prompt_of(length, 5)]
    model = model_at(path, backend, dtype, **exact)
    oracle, taps = taps_of(model, tokens)
    assert_drafts(with_exact_drafter(model), oracle, taps, tokens, backend=backend, dtype=dtype)


# Texts with every engine setting.


@cache
def plain(backend: str, dtype: str, temperature: float, family: str) -> Any:
    engine = make(loaded(backend, dtype, family), backend=backend, dtype=dtype, drafter="none", block_size=16)
    return {key: each.tokens for key, each in run(engine, varied_requests(temperature)).items()}


SETTINGS: Mapping[str, dict[str, Any]] = {
    "batch": {},
    "chunks": {"max_num_batched_tokens": 7},
    "preempted": {"kv_blocks": 10, "enable_prefix_caching": False},
    "auto": {"depth": "auto", "drafter": "mixed"},
    "preempted, chunks": {"kv_blocks": 10, "enable_prefix_caching": False, "max_num_batched_tokens": 24},
    "n-grams": {"drafter": "ngram"},
}


@pytest.mark.parametrize("family", KEYS)
@pytest.mark.parametrize(("backend", "dtype", "settings"), [
    *(("native", "float32", each) for each in SETTINGS),
    *(("reference", "float64", each) for each in ("batch", "preempted, chunks")),
])  # fmt: skip
def test_drafts_keep_the_text(backend: str, dtype: str, settings: str, family: str) -> None:
    for temperature in (0.0, 0.8):
        how = {"backend": backend, "dtype": dtype, "depth": BLOCK_SIZE, "block_size": 16, **SETTINGS[settings]}
        engine = make(loaded(backend, dtype, family), **how)
        for _ in range(2):  # the second turn uses the prefix cache
            found = {key: each.tokens for key, each in run(engine, varied_requests(temperature)).items()}
            assert found == plain(backend, dtype, temperature, family)
        assert engine.drafting.drafter.method == "block" or "drafter" in SETTINGS[settings]
        assert engine.stats.drafted > 20 or "drafter" in SETTINGS[settings]


def test_drafting_continues_beyond_the_window() -> None:
    """The window has 11 positions, the text 100."""
    model = loaded(sliding_window=11)
    requests = lambda: [request(prompt_of(60, 3), max_tokens=40, stops=())]  # noqa: E731
    drafted = run(make(model, depth=3), requests())["r", 0]
    assert drafted.stats.drafted > 20
    assert drafted.tokens == run(make(model, drafter="none"), requests())["r", 0].tokens


# Configs and files.


def write_changed_checkpoint(path: Path, change: Any = None, **keys: Any) -> Path:
    """A copy of the tiny checkpoint with changed config keys and tensors."""
    config, arrays = family_of("deepseek_v4").tiny(**DSPARK)
    return write_model(path, {**config, **keys}, change(arrays) if change else arrays)


def test_inspect_reports_the_drafter() -> None:
    report = inspect.run(InspectOptions(model=str(write_tiny_checkpoint())))
    heads = report.data["heads"]
    assert report.ok and heads["verdict"] == "alive" and report.data["here"]["runs"]
    assert [module["missing"] for module in heads["modules"]] == [[]] * STAGES
    assert f"{STAGES} DSpark layers are there" in heads["reason"]
    assert any("a DSpark drafter, not a classic MTP module" in line for line in report.lines)


def without(part: str) -> Any:
    return lambda arrays: {name: each for name, each in arrays.items() if part not in name}


def with_fewer_taps(arrays: Arrays) -> Arrays:
    name = "mtp.0.main_proj.weight"
    return {**arrays, name: np.ascontiguousarray(arrays[name][:, :-1])}


BROKEN: Mapping[str, tuple[Any, dict[str, Any], str]] = {
    "no main_proj": (without("main_proj"), {}, r"mtp\.0\.main_proj\.weight"),
    "no Markov head": (without("markov_w2"), {}, r"mtp\.2\.markov_head\.markov_w2\.weight"),
    "no confidence head": (without("confidence"), {}, r"mtp\.2\.confidence_head\.proj\.weight"),
    "no key of a layer": (without("mtp.1.attn.wkv"), {}, r"mtp\.1\.attn\.wkv\.weight"),
    "no drafter": (without("mtp."), {}, "no such tensors"),
    "main_proj of fewer taps": (with_fewer_taps, {}, r"mtp\.0\.main_proj\.weight is \[48, 95\]"),
    "a gated Markov head": (None, {"markov_head_type": "gated"}, "markov_head_type is 'gated'"),
    "a smaller draft vocabulary": (None, {"draft_vocab_size": 64}, "draft_vocab_size is 64"),
    "an unknown key": (None, {"dspark_gate": 3}, "dspark_gate 3"),
    "an absent layer": (None, {"dspark_target_layer_ids": [1, 3]}, r"dspark_target_layer_ids is \[1, 3\]"),
    "a noise token outside the vocabulary": (None, {"dspark_noise_token_id": 131}, "mask_token_id is 131"),
    "a long block": (None, {"dspark_block_size": 10**6}, "block_size is 1000000"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_drafter_leaves_the_trunk_served(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    change, keys, message = BROKEN[case]
    path = write_changed_checkpoint(tmp_path / "model", change, **keys)
    with caplog.at_level(logging.WARNING):
        model = model_at(path, dtype="float64")
    assert model.head is None
    assert "served without" in caplog.text
    texts = [request(prompt_of(20, 3), max_tokens=8, stops=(EOS,))]
    assert run(make(model), texts)["r", 0].tokens == run(make(loaded(), drafter="none"), texts)["r", 0].tokens
    with pytest.raises(ModelError, match=message):
        model_at(path, drafter="mtp")
    report = inspect.run(InspectOptions(model=str(path)))
    assert not report.ok and report.data["here"]["runs"] and report.data["heads"]["broken"]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert model_at(path, depth=0).head is None
    assert not caplog.text


def test_optional_drafter_keys_are_read(tmp_path: Path) -> None:
    """No confidence head, the experts of V4.1's drafter, and two stages."""
    keys = {"enable_confidence_head": False, "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2}
    model = loaded(n_mtp_layers=2, **keys)
    assert model.head and not model.head.spec.block.confidence and model.head.spec.block.num_layers == 2
    names = json.dumps([*model.checkpoint.tensors])
    assert "mtp.1.ffn.experts.3." in names and "mtp.1.ffn.experts.4." not in names and "confidence" not in names
    requests = [request(prompt_of(30, 3), max_tokens=20, stops=())]
    assert (
        run(make(model, depth=4), requests)["r", 0].tokens == run(make(model, drafter="none"), requests)["r", 0].tokens
    )
