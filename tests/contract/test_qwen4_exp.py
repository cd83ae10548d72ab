"""Qwen3.8-Flash-Next: n-gram hashes across end tokens, block selection beyond the budget, tables in parts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import build_oracle, config_and_tensors, logits_of_oracle
from support import family_of, make, model_at, new_sequence
from tiny_models import write_model

from headstart.cli.main import main
from headstart.core import Span
from headstart.errors import ModelError
from headstart.layers.ngram import hash_factors, primes_from

LENGTH, END = 90, 2


@pytest.mark.parametrize("longest", [2, 3, 4])
def test_logits_with_end_tokens_and_selected_blocks_match_transformers(tmp_path: Path, longest: int) -> None:
    """Passes have sizes from one row to most of the text."""
    changes = {"ngram_size": longest, "ple_layer_ids": [1, 3], "ple_embed_dim": 24, "heads_per_ngram": 2}
    model = model_at(write_model(tmp_path, *family_of("qwen4_exp").tiny(**changes, mtp_num_hidden_layers=0)))
    config, tensors = config_and_tensors("qwen4_exp", model)
    oracle, missing, _ = build_oracle("qwen4_exp", config, tensors)
    assert not missing
    tokens = [3 + (7 * i * i + 3 * i // 5) % 120 for i in range(LENGTH)]
    for place in (0, 20, 40, 41, 60, 62, LENGTH - 2):
        tokens[place] = END
    theirs = logits_of_oracle(oracle, tokens)
    every = build_oracle("qwen4_exp", config | {"indexer_budget": 3 * LENGTH}, tensors)[0]
    assert (logits_of_oracle(every, tokens) - theirs)[-9:].abs().max() > 1e-2  # some blocks are skipped
    for backend in ("reference", "native"):
        engine = make(model, backend=backend, dtype="float32", drafter="none", max_model_len=LENGTH, kv_blocks=LENGTH)
        sequence, ours = new_sequence(engine, tokens, computed=0), []
        for begin, end in [(0, 1), (1, 2), (2, 50), (50, LENGTH - 1), (LENGTH - 1, LENGTH)]:
            ours.append(engine.runner.forward([Span(sequence, begin, end - begin, end - begin)]).logits)
        found = torch.cat([torch.as_tensor(each).float() for each in ours])
        torch.testing.assert_close(found, theirs, atol=2e-4, rtol=0)


def test_ngram_table_in_parts_is_joined(tmp_path: Path) -> None:
    """As published: parts `shard_N` of the table, and tensors with values that the config states too."""
    config, arrays = family_of("qwen4_exp").tiny()
    (name,) = [each for each in arrays if ".ngram_embedding." in each]
    whole = model_at(write_model(tmp_path / "whole", config, arrays))
    parts = np.split(arrays[name], [40, 41, 100])
    more = {name.replace("weight", f"shard_{i}.weight"): part for i, part in enumerate(parts)}
    more |= {name.replace("ngram_embedding.weight", "layer_multipliers"): np.ones(3, np.float32)}
    rest = {each: array for each, array in arrays.items() if each != name}
    split = model_at(write_model(tmp_path / "split", {**config, "split_ngram_parts": 4}, rest | more))
    table = "layers.0.memory.embed_tokens.weight"
    np.testing.assert_array_equal(*(each.weights.tensors[table].float32() for each in (whole, split)))


def test_inspect_deep_measures_the_mtp_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path, *family_of("qwen4_exp").tiny())
    main(["inspect", str(folder), "--deep"])
    assert "not measured" not in (output := capsys.readouterr().out) and "acceptance" in output


def test_hash_primes_and_factors_match_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    for layer in (0, 2):
        theirs = modeling._build_layer_multipliers(248320, 3, layer, 1234)
        assert hash_factors(248320, 3, 1234 + 10007 * layer) == tuple(theirs.tolist())
    found = [modeling._find_nth_prime_after(20_000_000 - 1, 16 + i + 1) for i in range(4)]
    assert primes_from(20_000_000, 20)[16:] == tuple(found)
    # values of the published checkpoint
    assert hash_factors(248320, 3, 1234) == (23703573157769, 20109073645365, 8052911324071)
    assert sum(primes_from(20_000_000, 16)) == 320_001_446


@pytest.mark.parametrize(
    "changes",
    [
        {"ple_layer_ids": [2]}, {"ple_layer_ids": [4]}, {"ple_layer_ids": 1}, {"ple_embed_dim": 25},
        {"indexer_budget": 13}, {"indexer_kv_heads": 2}, {"output_gate_type": "relu"}, {"hc_count": 1},
        {"mtp_num_hidden_layers": 2}, {"model_type": "qwen4exp"}, {"eos_token_id": None}, {"indexer_head_dim": 2},
        {"heads_per_ngram": 10**6}, {"mtp": {"hybrid": False}},
    ],
)  # fmt: skip
def test_unsupported_configs_are_refused(changes: dict[str, object]) -> None:
    family = family_of("qwen4_exp")
    with pytest.raises(ModelError):
        family.read(family.tiny_config(**changes))
