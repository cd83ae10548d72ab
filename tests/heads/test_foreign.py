"""EAGLE and Medusa heads as their projects publish them: drafts equal those of their formulas, invalid files are
refused."""

import json
import pickle
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import assert_same, make, new_sequence, prompt_of, run, tiny_model, varied_requests
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from headstart.cli.main import main
from headstart.core import Span
from headstart.drafters.base import DraftRequest
from headstart.engine.load import Model, attach_head
from headstart.engine.runner import span_rows
from headstart.errors import ModelError
from headstart.formats.pickled import read_pickle
from headstart.heads.files import is_head

DEPTH = 3
SCALED = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


trunk = partial(tiny_model, "llama", softness=0.3)


def write_folder(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / file)
    else:
        torch.save(tensors, path / file)
    return path


def share_of_equal_drafts(model: Model, kind: str, expected: Any, depth: int = DEPTH) -> float:
    """Share of draft tokens equal to `expected(hidden states [T, H], tokens)`, over prefixes of every length."""
    engine, tokens, same = make(model, drafter=kind, depth=depth), prompt_of(20, 4), list[bool]()
    for length in range(2, len(tokens)):
        sequence = new_sequence(engine, tokens, length)
        forward = engine.runner.run(engine.runner.trunk, "forward", [span_rows(Span(sequence, 0, length - 1, 1))])
        sequence.num_computed = length - 1
        engine.drafting.drafter.propose([DraftRequest(sequence, depth)])
        with torch.inference_mode():
            wanted = expected(forward["hidden"].clone(), tokens[:length])
        same += [a == b for a, b in zip(sequence.draft.tokens, wanted, strict=True)]
        engine.memory.release(sequence)
    return float(np.mean(same))


def assert_same_text(model: Model, headed: Model, **settings: Any) -> None:
    requests = varied_requests(0.8)
    plain = run(make(model, drafter="none", max_num_seqs=1), requests)
    assert_same(run(make(headed, **settings), requests), plain)


def eagle_files(
    model: Model, *, bias: bool = True, qkv_bias: bool = False, further: bool = False
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a random EAGLE head; `further` adds a second layer with both norms."""
    torch.manual_seed(3)
    hidden, heads, kv, dim, inner = model.config.hidden_size, 6, 2, 8, 40
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": inner, "hidden_act": "silu",
        "vocab_size": model.config.vocab_size, "rms_norm_eps": 1e-5, "bias": bias, "max_position_embeddings": 512,
        "head_dim": dim,
    }  # fmt: skip
    sizes = {
        "fc.weight": (hidden, 2 * hidden), "layers.0.self_attn.q_proj.weight": (heads * dim, hidden),
        "layers.0.self_attn.k_proj.weight": (kv * dim, hidden), "layers.0.self_attn.v_proj.weight": (kv * dim, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, heads * dim), "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden), "layers.0.mlp.down_proj.weight": (hidden, inner),
        "layers.0.post_attention_layernorm.weight": (hidden,), "embed_tokens.weight": (model.config.vocab_size, hidden),
        **({"fc.bias": (hidden,)} if bias else {}),
    }  # fmt: skip
    if further:
        config |= {"num_hidden_layers": 2, "architectures": ["EagleLlamaForCausalLM"]}
        layer = {name.replace("rs.0", "rs.1"): size for name, size in sizes.items() if name.startswith("layers.0")}
        sizes |= {**layer, "layers.1.input_layernorm.weight": (hidden,)}
    if qkv_bias:
        sizes |= {f"layers.0.self_attn.{n}_proj.bias": (s * dim,) for n, s in (("q", heads), ("k", kv), ("v", kv))}
    return config, {
        name: torch.randn(size) * (size[-1] ** -0.5 if len(size) > 1 else 0.5) for name, size in sizes.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "changes", "further"),
    [
        ("pytorch_model.bin", {}, False), ("model.safetensors", {"rope_scaling": SCALED}, False),
        ("model.safetensors", {}, True),
    ],
)  # fmt: skip
def test_eagle_drafts_match_the_published_formula(
    file: str, changes: dict[str, Any], further: bool, tmp_path: Path
) -> None:
    """cnets1.py: a Llama layer without its first norm over fc [e ; h], with the trunk's embedding and LM head."""
    model, own = trunk(), bool(changes)
    config, tensors = eagle_files(model, bias=not own, qkv_bias=own, further=further)
    path = write_folder(tmp_path / "eagle", {**config, **changes, "attention_bias": own}, tensors, file)
    llama_config = LlamaConfig(**{**config, **changes, "attention_bias": own}, attn_implementation="eager")
    layers, rotary = (
        [LlamaDecoderLayer(llama_config, i).eval().double() for i in range(1 + further)],
        LlamaRotaryEmbedding(llama_config),
    )
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    layers[0].input_layernorm = torch.nn.Identity()
    for i, layer in enumerate(layers):
        if own:
            layer.self_attn.o_proj.bias = None
        at = f"layers.{i}."
        layer.load_state_dict({n.removeprefix(at): each for n, each in tensors.items() if n.startswith(at)})
    embedding, lm_head = model.decoder.embedding, model.decoder.lm_head.weight

    def expected(hidden: Tensor, tokens: list[int]) -> list[int]:
        found, ids = [], tokens[1:]
        for _ in range(DEPTH):
            x = torch.cat((embedding[ids], hidden), -1) @ tensors["fc.weight"].T + tensors.get("fc.bias", 0)
            count = len(ids)
            mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
            places = rotary(x[None], torch.arange(count)[None])
            y = x[None]
            for layer in layers:
                y = layer(y, attention_mask=mask, position_embeddings=places)
            y = y.reshape(count, -1)
            found.append(int((y[-1] @ lm_head.T).argmax()))
            ids, hidden = [*ids, found[-1]], torch.cat((hidden, y[-1:]))
        return found

    headed = replace(model, head=attach_head(model, path))
    assert share_of_equal_drafts(headed, "eagle", expected) >= 0.99
    assert_same_text(model, headed, drafter="eagle", depth=4)


def test_model_of_one_layer_is_not_a_head(tmp_path: Path) -> None:
    config, tensors = eagle_files(trunk())
    del tensors["fc.weight"]
    assert not is_head(write_folder(tmp_path / "one", config, tensors, "model.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize(("own_lm_heads", "layout"), [(True, "medusa_lm_head.pt"), (True, "vllm"), (False, "vllm")])
def test_medusa_drafts_match_the_published_formula(own_lm_heads: bool, layout: str, tmp_path: Path) -> None:
    model, layers = trunk(), 2
    hidden, vocab = model.config.hidden_size, model.config.vocab_size
    torch.manual_seed(5)
    blocks = [
        [(torch.randn(hidden, hidden) * hidden**-0.5, torch.randn(hidden)) for _ in range(layers)] for _ in range(DEPTH)
    ]
    exact = [torch.randn(vocab, hidden) * hidden**-0.5 for _ in range(DEPTH)]
    layer, last = (
        ("blocks.{}.layers.{}.", "lm_heads.{}.weight") if layout == "vllm" else ("{}.{}.linear.", "{}.2.weight")
    )
    tensors = {
        layer.format(k, j) + word: values
        for k, parts in enumerate(blocks)
        for j, pair in enumerate(parts)
        for word, values in zip(("weight", "bias"), pair, strict=True)
    }
    if own_lm_heads:
        tensors |= {last.format(k): each for k, each in enumerate(exact)}
    config = {"medusa_num_heads": DEPTH, "medusa_num_layers": layers, "base_model_name_or_path": "lmsys/vicuna-7b"}
    if layout == "vllm":
        config = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": DEPTH,
                  "num_hidden_layers": layers, "hidden_size": hidden, "vocab_size": vocab}  # fmt: skip
    file = "model.safetensors" if layout == "vllm" else layout
    headed = replace(model, head=attach_head(model, write_folder(tmp_path / "medusa", config, tensors, file)))
    lm_head = model.decoder.lm_head.weight

    def expected(states: Tensor, tokens: list[int]) -> list[int]:
        found = []
        for parts, own in zip(blocks, exact, strict=True):
            y = states[-1]
            for weight, bias in parts:
                y = y + torch.nn.functional.silu(weight.double() @ y + bias.double())
            found.append(int(((own.double() if own_lm_heads else lm_head) @ y).argmax()))
        return found

    assert share_of_equal_drafts(headed, "medusa", expected) >= 0.99
    assert_same_text(model, headed, drafter="medusa", depth=3)


@pytest.mark.parametrize(("changes", "more", "said"), [
    ({"speculators_model_type": "peagle"}, {}, "holds no mask_hidden"),
    ({"speculators_model_type": "peagle"}, {"mask_hidden": torch.ones(3)}, "mask_token_id is None, but must be"),
    ({"num_hidden_layers": 2, "model_type": "eagle"}, {}, "no tensor layers.1"),
    ({"num_hidden_layers": 99, "model_type": "eagle"}, {}, "num_hidden_layers 99 is missing or wrong"),
    ({}, {"embedding_layernorm.weight": torch.ones(48)}, "embedding_layernorm.weight is not known of"),
    ({"hidden_size": None}, {}, "is missing or wrong"),
    ({"hidden_act": "gelu"}, {}, "hidden_act is 'gelu'"),
    ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, {}, "rope scaling type 'spiral'"),
    ({"vocab_size": 7}, {}, "its vocab_size is 7, the model's is 131"),
])  # fmt: skip
def test_unsupported_heads_are_refused_by_name(
    changes: dict[str, Any], more: dict[str, Tensor], said: str, tmp_path: Path
) -> None:
    config, tensors = eagle_files(trunk())
    path = write_folder(tmp_path / "head", {**config, **changes}, {**tensors, **more}, "model.safetensors")
    with pytest.raises(ModelError, match=said):
        attach_head(trunk(), path)


class MaliciousObject:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this must not run",))


@pytest.mark.parametrize(("content", "said"), [
    ({"fc.weight": MaliciousObject()}, "it names __builtin__.print"),
    ({"fc.weight": torch.ones(4, 6).T}, "do not follow each other"),
    ({"fc.weight": 3}, "something other than tensors"),
    ([torch.ones(2)], "something other than tensors"),
    ({"fc.weight": torch.ones(2).to_sparse()}, "which no tensor needs"),
])  # fmt: skip
def test_pickles_do_not_execute_code(
    content: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=said):
        read_pickle(tmp_path / "pytorch_model.bin")
    assert capsys.readouterr().out == ""


def test_damaged_pickles_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.arange(100.0), "b": torch.nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))}, path)
    found = read_pickle(path)
    np.testing.assert_array_equal(found["a"].float32(), np.arange(100))
    assert (found["b"].shape, found["b"].dtype) == ((3, 2), "BF16")
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(whole), 3):
            damaged[place] = rng.integers(256)
        path.write_bytes(bytes(damaged[: rng.integers(len(whole) // 2, len(whole) + 1)]))
        try:
            for tensor in read_pickle(path).values():
                assert tensor.begin + tensor.nbytes <= path.stat().st_size
        except ModelError as error:
            assert "is not a file of tensors" in error.message and "torch.load" in error.hint
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ModelError, match="not a zip file"):
        read_pickle(path)


def test_compressed_storages_are_refused(tmp_path: Path) -> None:
    path, packed = tmp_path / "whole.bin", tmp_path / "packed.bin"
    torch.save({"a": torch.zeros(1000)}, path)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.infolist():
            target.writestr(member.filename, source.read(member))
    with pytest.raises(ModelError, match="is compressed or too short"):
        read_pickle(packed)


def test_inspect_reads_heads_in_pickles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = trunk()
    path = write_folder(tmp_path / "head", *eagle_files(model), "pytorch_model.bin")
    assert main(["inspect", str(path), "--target", str(model.checkpoint.path)]) == 0
    assert "EAGLE: ALIVE" in capsys.readouterr().out
    assert main(["inspect", str(model.checkpoint.path), "--head", str(path)]) == 0
    assert "attached head: eagle" in capsys.readouterr().out
    (path / "pytorch_model.bin").write_bytes(b"x")
    assert main(["inspect", str(path)]) == 2 and "is not a file of tensors" in capsys.readouterr().err
