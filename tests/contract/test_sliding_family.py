"""A family from one file that nobody else knows: windows, GELU, norms after parts, keys and values of other layers,
soft caps. Held against a plain restatement with whole matrices of scores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Output, make, prompt_of, request, run, tiny_model
from torch import Tensor
from torch.nn.functional import gelu, rms_norm

from headstart import registry
from headstart.config import EngineConfig
from headstart.engine.load import Model, load_model
from headstart.errors import HeadstartError
from headstart.heads.kind import head_kind, trained_kinds
from headstart.train.head import first_weights

FAMILY = "acme_sliding"
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "norms before parts": {"norm_places": "pre", "residual_multiplier": 0.4},
    "norms after parts": {"norm_places": "post"},
    "no gate, squared ReLU": {"mlp_gate": False, "hidden_act": "relu2"},
    "sinks": {"attention_sinks": True},
    "positions in windows only": {"rope_everywhere": False},
}
PROMPT = prompt_of(12, 7) * 3
NEW = 40


@pytest.fixture(scope="module", autouse=True)
def found() -> Iterator[None]:
    with registry.search_path("models", Path(__file__).parents[1] / "plug_ins" / "models"):
        yield


@pytest.fixture(scope="module", params=VARIANTS)
def model(found: None, request: pytest.FixtureRequest) -> Model:
    return tiny_model(FAMILY, **VARIANTS[request.param])


def plain_logits(model: Model, tokens: list[int]) -> Tensor:
    """[T, V] in float64, by the formulas alone: no cache, no layers of ours."""
    config: Any = model.checkpoint.config
    tensors = {name: torch.tensor(each.float32()).double() for name, each in model.checkpoint.tensors.items()}
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    hidden, eps, count = config["hidden_size"], config["rms_norm_eps"], len(tokens)
    kinds, num_own = config["layer_types"], len(config["layer_types"]) - config["num_kv_shared_layers"]
    distance = torch.arange(count)[:, None] - torch.arange(count)[None, :]
    kept: dict[str, tuple[Tensor, Tensor]] = {}  # of the last layer of each kind that has its own

    def norm(x: Tensor, name: str) -> Tensor:
        weight = tensors.get(f"decoder.{name}.weight")
        return x if weight is None else rms_norm(x, weight.shape, weight, eps)

    def turned(x: Tensor, theta: float) -> Tensor:
        if not theta:
            return x
        angles = torch.arange(count)[:, None] * theta ** (-torch.arange(0, dim, 2).double() / dim)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    x = tensors["decoder.tokens.weight"][tokens] * math.sqrt(hidden)
    for i, kind in enumerate(kinds):
        layer, sliding = f"h.{i}", kind == "sliding_attention"
        theta = config["rope_local_base_freq"] if sliding else config["rope_theta"]
        if not sliding and not config.get("rope_everywhere", True):
            theta = 0
        places = [f"{layer}.{name}" for name in ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")]
        if config.get("norm_places") == "pre":  # what stands after attention is then the next part's norm
            places = [places[0], "none", places[1], "none"]
        y = norm(x, places[0])
        q, k, v = (
            (y @ tensors[f"decoder.{layer}.attn.{part}_proj.weight"].T).view(count, -1, dim)
            if part == "q" or i < num_own
            else None
            for part in "qkv"
        )
        if k is not None and v is not None:
            kept[kind] = turned(norm(k, f"{layer}.attn.k_norm"), theta), v
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in kept[kind])
        scores = torch.einsum("qhd,khd->hqk", turned(norm(q, f"{layer}.attn.q_norm"), theta), k) / math.sqrt(dim)
        scores = config["attn_logit_softcapping"] * (scores / config["attn_logit_softcapping"]).tanh()
        seen = (distance >= 0) & ((distance < config["sliding_window"]) | (not sliding))
        sinks = tensors.get(f"decoder.{layer}.attn.sinks", torch.full((heads,), -math.inf))
        scores = scores.masked_fill(~seen, -math.inf)
        scores = torch.cat((scores, sinks[:, None, None].expand(heads, count, 1)), -1)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :-1], v).reshape(count, -1)
        y = norm(attended @ tensors[f"decoder.{layer}.attn.o_proj.weight"].T, places[1])
        x = x + config.get("residual_multiplier", 1.0) * y
        y = norm(x, places[2])
        up = y @ tensors[f"decoder.{layer}.mlp.up_proj.weight"].T
        if config.get("mlp_gate", True):
            up = gelu(y @ tensors[f"decoder.{layer}.mlp.gate_proj.weight"].T, approximate="tanh") * up
        else:
            up = up.relu() ** 2
        y = norm(up @ tensors[f"decoder.{layer}.mlp.down_proj.weight"].T, places[3])
        x = x + config.get("residual_multiplier", 1.0) * y
    logits = norm(x, "norm") @ tensors["decoder.tokens.weight"].T
    return config["final_logit_softcapping"] * (logits / config["final_logit_softcapping"]).tanh()


def generate(model: Model, **settings: Any) -> Output:
    engine = make(model, **settings)
    wanted = request(
        PROMPT, max_tokens=NEW, stops=(), logprobs=0, prompt_logprobs=0, repetition_penalty=0.6, temperature=0.7, seed=3
    )
    return run(engine, [wanted])["r", 0]


def logprobs_of(output: Output) -> list[float]:
    return [each.logprob for each in [*output.prompt_logprobs, *output.logprobs] if each]


@pytest.fixture(scope="module")
def expected(model: Model) -> tuple[Output, list[float]]:
    """The reference backend's text, and the plain logprobs of all its tokens."""
    output = generate(model, drafter="none")
    tokens = PROMPT + output.tokens
    plain = plain_logits(model, tokens).log_softmax(-1)
    return output, [float(plain[i, token]) for i, token in enumerate(tokens[1:])]


def test_only_layers_with_keys_of_their_own_have_pools(model: Model) -> None:
    assert [spec.window for spec in model.decoder.kv_specs] == [11, 11, 0]
    assert [layer.mixer.shares for layer in model.decoder.layers] == [None, None, None, 1, 2, 1]
    assert len(model.weights.used) == len(model.checkpoint.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [512, 7])
def test_logits_are_those_of_the_formulas(model: Model, expected: tuple[Output, list[float]], rows: int) -> None:
    """With the prompt in one pass, and in chunks that end inside windows."""
    output = generate(model, drafter="none", max_num_batched_tokens=rows, max_num_seqs=1)
    assert len(logprobs_of(output)) == len(PROMPT) - 1 + NEW
    torch.testing.assert_close(logprobs_of(output), expected[1], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_drafting_does_not_change_the_text(model: Model, expected: tuple[Output, list[float]]) -> None:
    output = generate(model, drafter="ngram", depth=3)
    assert output.tokens == expected[0].tokens
    assert output.stats and 0 < output.stats.accepted < output.stats.drafted
    torch.testing.assert_close(logprobs_of(output), expected[1], rtol=0, atol=1e-6)


def test_a_head_is_refused_before_it_is_trained(model: Model) -> None:
    """Its block would be as the trunk's last layer, which a head's files cannot describe."""
    for kind in trained_kinds():
        training, block = head_kind(kind).training, head_kind(kind).block
        assert training
        spec = replace(training.spec(7, 3), layer=model.config.head_layer if block else None)
        with pytest.raises(HeadstartError, match="a block") if block else nullcontext():
            first_weights(training, spec, model.decoder, 1.0)


def test_native_gives_the_same(model: Model, expected: tuple[Output, list[float]]) -> None:
    """The compiled kernels, with and without drafts."""
    pytest.importorskip("headstart.kernels.native._native")
    native = load_model(str(model.checkpoint.path), EngineConfig(backend="native", threads=2, kv_cache_dtype="float32"))
    settings = {"backend": "native", "dtype": "float32", "block_size": 16, "kv_cache_dtype": "float32"}
    outputs = [generate(native, drafter=drafter, depth=3, **settings) for drafter in ("none", "ngram")]
    assert outputs[0].tokens == outputs[1].tokens == expected[0].tokens
    assert logprobs_of(outputs[0]) == logprobs_of(outputs[1])
    torch.testing.assert_close(logprobs_of(outputs[0]), expected[1], rtol=0, atol=1e-4)
