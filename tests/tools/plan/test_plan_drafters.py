"""Drafters in a plan: size, cost of a draft, maximum depth; prices; random configs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from headstart.cli.main import main
from headstart.errors import HeadstartError, UsageError
from headstart.tools.plan import run as plan
from headstart.tools.plan.drafters import DRAFTER_TYPES, parse_drafters, with_drafter
from headstart.tools.plan.machine import device_price, make_machine
from headstart.tools.plan.roofline import draft_seconds
from headstart.tools.plan.shape import SizedModel, Split, estimate_memory
from headstart.tools.plan.sources import CARD_NAMES, CARDS, find_shape, shape_of, with_head

Capture = pytest.CaptureFixture[str]
MADE = [name for name, kind in DRAFTER_TYPES.items() if kind.typical is not None]


def sized(card: str, drafter: str) -> SizedModel:
    shape = with_drafter(find_shape(card), drafter)
    return SizedModel(shape=shape, kv=2)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [*MADE, "mtp"])
def test_every_drafter_has_a_size_and_a_cost_on_every_card(drafter: str) -> None:
    for card in CARD_NAMES:
        model = sized(card, drafter)
        machine = make_machine("h200", 8, model.format.compute)
        seconds = [draft_seconds(model, machine, 4, 2048, depth) for depth in (1, 4)]
        assert all(map(math.isfinite, seconds)), card
        assert (seconds[0] > 0) == (drafter != "none"), card
        assert (model.weight_bytes()["head"] > 0) == (drafter not in ("none", "ngram")), card
        assert estimate_memory(model, Split(device=1e13), 2048).verdict == "fits", card


def test_chain_drafts_cost_per_token_and_block_drafts_once() -> None:
    machine = make_machine("h100", 1, "bf16")
    models = (sized("qwen3.5-9b", kind) for kind in ("eagle3", "dflash"))
    chain, block = (draft_seconds(each, machine, 1, 0, 8) / draft_seconds(each, machine, 1, 0, 1) for each in models)
    assert chain == pytest.approx(8) and block < 1.2


def test_head_sizes_match_published_ones() -> None:
    # Medusa for Vicuna-7B, from the paper: a layer and an LM head per drafted token.
    assert sized("llama-2-7b", "medusa").weight_bytes()["head"] == 4 * 2 * (4096 * 4096 + 32000 * 4096)
    # EAGLE-3 for an 8B Llama: 0.85 GB in bfloat16, with an LM head of 32,000 rows.
    assert sized("qwen3.5-9b", "eagle3").weight_bytes()["head"] == pytest.approx(0.85e9, rel=0.1)
    head = sized("mimo-v2-flash", "mtp").shape.drafter
    assert head.num_modules == 3
    assert not head.layers[0].cost.feed_forward.experts  # dense with a window, unlike the last layer of the trunk
    assert head.layers[0].cost.mixer.window == 128


def test_draft_model_counts_all_its_parameters(capsys: Capture) -> None:
    words = "plan qwen3.6-27b --gpu h100 --drafter draft_model --head qwen3.5-2b --json"
    assert main(words.split()) == 0
    (drafter,) = json.loads(capsys.readouterr().out)["drafters"]
    whole = sum(count for part, count in find_shape("qwen3.5-2b").parameters().items() if part != "head")
    assert (drafter["parameters"], drafter["kind"]) == (whole, "draft_model")


EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 1,
    "vocab_size": 128256, "draft_vocab_size": 32000, "model_type": "llama",
}  # fmt: skip
DFLASH = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 5, "block_size": 16,
    "vocab_size": 248320, "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 8, 15, 22, 29]},
}  # fmt: skip


ASSISTANT = {
    "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "backbone_hidden_size": 2560,
    "text_config": {
        "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 262144},
}  # fmt: skip


@pytest.mark.parametrize("config", [EAGLE3, DFLASH, ASSISTANT])
def test_planning_a_drafter_alone_is_refused(config: dict[str, Any], tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--gpu", "h100"]) == 2
    found = capsys.readouterr()
    assert "not a complete model" in found.err and f"--head {tmp_path}" in found.err and not found.out


@pytest.mark.parametrize(("config", "kind", "most"), [(EAGLE3, "eagle3", None), (DFLASH, "dflash", 15)])
def test_drafter_config_sets_size_and_max_depth(
    config: dict[str, Any], kind: str, most: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    head = with_head(find_shape("qwen3.5-9b"), str(tmp_path)).drafter
    assert (head.kind, head.max_depth, head.assumed) == (kind, most, False)
    attention = 4096 * 128 * (32 + 8 + 8) * (2 if kind == "eagle3" else 1) + 4096 * 4096
    assert head.layers[0].cost.mixer.weights == attention


def test_drafter_names_are_parsed() -> None:
    assert parse_drafters(None) == (None,) and parse_drafters("EAGLE3, draft-model") == ("eagle3", "draft_model")
    assert parse_drafters("all") == ("mtp", *(name for name in MADE if name != "none"))


@pytest.mark.parametrize(("arguments", "message"), [
    ("--drafter magic", "known: mtp"),
    ("--drafter draft_model", "needs a checkpoint"),
    ("--drafter assistant", "needs a checkpoint"),
    ("--drafter mtp --head qwen3.5-2b", "leave --drafter out"),
    ("--price-per-hour nan", "above 0"),
    ("--price-per-hour inf", "above 0"),
    ("--price-per-hour 1e30", "above 0"),
    ("--price-per-hour spot --price-list nowhere.toml", "no file"),
    ("--price-per-hour 3 --api-price 0", "above 0"),
    ("--context 5000000", "the model's context is"),
    ("--acceptance nan", "between 0 and 1"),
])  # fmt: skip
def test_bad_input_is_named(arguments: str, message: str, capsys: Capture) -> None:
    assert main(["plan", "qwen3.6-27b", "--gpu", "h200", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_user_price_list_overrides_the_packaged_one(tmp_path: Path, capsys: Capture) -> None:
    assert device_price("spot", "h200", None).dollars == 3.31
    arguments = ["plan", "qwen3.6-27b", "--gpu", "a100", "--price-per-hour", "spot"]
    assert main(arguments) == 2 and "listed: b200, h200" in capsys.readouterr().err
    mine = tmp_path / "mine.toml"
    mine.write_text('date = "today"\n[devices.a100-80g]\nspot = 1.5\n')
    assert main([*arguments, "--price-list", str(mine)]) == 0
    printed = capsys.readouterr().out
    assert "1.5 $/h" in printed and "of today" in printed
    mine.write_text("[devices.a100-80g]\nspot = nan\n")
    with pytest.raises(UsageError, match="above 0"):
        device_price("spot", "a100-80g", str(mine))


KEYS = sorted({key for name in CARD_NAMES for key in CARDS[name]["config"]})
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.text(max_size=3), st.lists(st.integers(0, 200), max_size=3),
    st.sampled_from([10**12, math.inf, math.nan, {}, {"a": 1}]),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=100)
@given(card=st.sampled_from(CARD_NAMES), changes=st.dictionaries(st.sampled_from(KEYS), ODD, min_size=1, max_size=2))
def test_random_configs_give_a_shape_or_an_error(card: str, changes: dict[str, Any]) -> None:
    config = {**CARDS[card]["config"], **changes}
    try:
        shape = shape_of(card, config)
    except HeadstartError:
        return
    model = SizedModel(shape=shape, kv=2)
    estimate_memory(model, Split(device=80e9), 2048)
    draft_seconds(model, make_machine("h100", 1, "bf16"), 1, 2048, 3)


def test_default_context_is_limited_by_the_model(tmp_path: Path) -> None:
    config = {**CARDS["llama-2-7b"]["config"], "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plan.run(plan.PlanOptions(model=str(tmp_path), gpu="h100")).data["context"] == 512
