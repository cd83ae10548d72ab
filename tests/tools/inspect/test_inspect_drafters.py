"""Standalone drafter checkpoints and their fit to a target."""

from pathlib import Path
from typing import Any

import pytest
from zoo import SIZES, ZOO, H, Tensors, V, config_of, heads, trunk, write

from headstart.tools.inspect import run as inspect
from headstart.tools.inspect.run import InspectOptions

BLOCK = {
    "self_attn.q_proj.weight": (32, H), "self_attn.k_proj.weight": (16, H), "self_attn.v_proj.weight": (16, H),
    "self_attn.o_proj.weight": (H, 32), "mlp.gate_proj.weight": (40, H), "mlp.up_proj.weight": (40, H),
    "mlp.down_proj.weight": (H, 40), "post_attention_layernorm.weight": (H,),
}  # fmt: skip
WIDE = {f"self_attn.{n}_proj.weight": (rows, 2 * H) for n, rows in (("q", 32), ("k", 16), ("v", 16))}
NORMED = BLOCK | {"input_layernorm.weight": (H,)}
QWEN3 = NORMED | {"self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,)}
EAGLE3 = NORMED | WIDE | {"hidden_norm.weight": (H,)}


def of(prefix: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {prefix + name: shape for name, shape in shapes.items()}


FUSED = {"fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (50, H), "d2t": (50,)}
DFLASH = {"fc.weight": (H, 2 * H), "hidden_norm.weight": (H,), "norm.weight": (H,), **of("layers.0.", QWEN3)}
MODULE = {f"{part}_layernorm.weight": (H,) for part in ("token", "hidden", "final")}
ONE_LAYER = {**SIZES, "num_hidden_layers": 1}
LINKING = ("enorm", "hnorm", "eh_proj", "shared_head")


def xllm_module(key: str) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Config and shapes of a family's module as xLLM's tool extracts it."""
    animal, shapes = ZOO[key], {name: shape for name, (_, shape) in heads(ZOO[key]).items()}
    for name in list(shapes) if key in ("glm4_moe", "deepseek_v32") else ():
        rest = name.removeprefix("model.layers.4.")
        shapes[f"model.{rest}" if rest.startswith(LINKING) else f"model.layers.0.{rest}"] = shapes.pop(name)
    for name in list(shapes) if key == "deepseek_v4" else ():
        shapes[name.replace("mtp.0.", "model.layers.0.")] = shapes.pop(name)
    if key == "qwen3_5":
        shapes |= {"model.language_model.embed_tokens.weight": (V, H), "lm_head.weight": (V, H)}
    return {**config_of(animal), "model_type": f"{key}_mtp", "architectures": ["SomeMtpForCausalLM"]}, shapes


DRAFTERS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "eagle3": (
        {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 50},
        {**FUSED, **of("midlayer.", EAGLE3)}),
    "eagle3 (speculators)": (
        {
            "speculators_model_type": "eagle3", "draft_vocab_size": 50, "transformer_layer_config": ONE_LAYER,
            "speculators_config": {"verifier": {"name_or_path": "org/target", "architectures": ["TargetForCausalLM"]}},
        },
        {**FUSED, **of("layers.0.", EAGLE3)}),
    "peagle": (
        {"architectures": ["PEagleLlama"], "draft_vocab_size": 50, "num_hidden_layers": 1},
        {**FUSED, **of("layers.0.", EAGLE3), "mask_hidden": (1, 1, 3 * H)}),
    "eagle": ({"model_type": "eagle", "num_hidden_layers": 1}, {"fc.weight": (H, 2 * H), **of("layers.0.", BLOCK)}),
    "eagle (as a Llama)": (
        {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1},
        {"fc.weight": (H, 2 * H), "embed_tokens.weight": (V, H), **of("layers.0.", BLOCK)}),
    "dflash": (
        {"architectures": ["DFlashDraftModel"], "num_hidden_layers": 1, "dflash_config": {"target_layer_ids": [1, 3]}},
        DFLASH),
    "dspark": (
        {"architectures": ["Qwen3DSparkModel"], "num_hidden_layers": 1, "target_layer_ids": [1, 3]},
        {**DFLASH, "markov_head.markov_w1.weight": (V, 4), "markov_head.markov_w2.weight": (V, 4)}),
    "medusa": (
        {"model_type": "medusa", "medusa_num_heads": 2},
        {"0.0.linear.weight": (H, H), "0.1.weight": (V, H), "1.0.linear.weight": (H, H), "1.1.weight": (V, H)}),
    "medusa (blocks)": (
        {"architectures": ["MedusaModel"], "num_heads": 1},
        {"medusa_heads.0.0.linear.weight": (H, H), "lm_heads.0.weight": (V, H)}),
    "speculators_mtp": (
        {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1, "transformer_layer_config": SIZES},
        of("mtp_layers.0.", {**MODULE, "input_proj.weight": (H, 2 * H)})),
    **{f"xllm_mtp ({key})": xllm_module(key) for key in ("glm4_moe", "deepseek_v32", "deepseek_v4", "mimo", "qwen3_5")},
    "assistant": (
        {"model_type": "gemma4_assistant", "num_hidden_layers": 1, "backbone_hidden_size": H},
        {
            "model.embed_tokens.weight": (V, H), "model.norm.weight": (H,), "pre_projection.weight": (H, 2 * H),
            "post_projection.weight": (H, H),
            **of("model.layers.0.", {
                **{n: s for n, s in NORMED.items() if ".k_" not in n and ".v_" not in n},
                "self_attn.q_norm.weight": (8,), "pre_feedforward_layernorm.weight": (H,),
                "post_feedforward_layernorm.weight": (H,)})}),
}  # fmt: skip


def write_drafter(folder: Path, kind: str, **changes: Any) -> Path:
    config, shapes = DRAFTERS[kind]
    tensors: Tensors = {name: ("I64" if name == "d2t" else "BF16", shape) for name, shape in shapes.items()}
    return write(folder, {"model_type": "llama", **SIZES, **config, **changes}, tensors)


def target(folder: Path, **changes: Any) -> str:
    kind = {"model_type": "gemma4", "architectures": ["TargetForCausalLM"]}
    return str(write(folder, {**SIZES, **kind, **changes}, trunk(ZOO["qwen3_5"])))


@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafter_kinds_are_recognized_and_fitted(tmp_path: Path, kind: str) -> None:
    model = str(write_drafter(tmp_path / "d", kind))
    report = inspect.run(InspectOptions(model=model, target=target(tmp_path / "t")))
    data = report.data
    assert (report.ok, data["heads"]["verdict"]) == (True, "alive"), data["heads"]["reason"]
    assert data["drafter"]["kind"] == kind.partition(" ")[0] and data["fit"]["fits"]
    assert list(data["parts"]) == ["drafter"]
    report = inspect.run(InspectOptions(model=model, target=target(tmp_path / "wide", hidden_size=2 * H)))
    assert (report.ok, report.data["heads"]["verdict"], report.data["fit"]["fits"]) == (False, "mismatch", False)
    assert "hidden size 32, but the target has 64" in report.data["heads"]["reason"]


@pytest.mark.parametrize(("kind", "changes", "what"), [
    ("eagle3", {"vocab_size": 95}, "vocabulary"),
    ("eagle3", {"num_hidden_layers": 2}, "layers read"),
    ("dflash", {"num_hidden_layers": 3}, "layers read"),
    ("eagle3 (speculators)", {"architectures": ["OtherForCausalLM"]}, "architecture"),
    ("assistant", {"model_type": "gemma3"}, "family"),
])  # fmt: skip
def test_mismatch_with_the_target_is_named(tmp_path: Path, kind: str, changes: dict[str, Any], what: str) -> None:
    more = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]} if kind == "eagle3" else {}
    options = InspectOptions(
        model=str(write_drafter(tmp_path / "d", kind, **more)), target=target(tmp_path / "t", **changes)
    )
    report = inspect.run(options)
    assert [check["what"] for check in report.data["fit"]["checks"] if not check["ok"]] == [what]


def test_verdicts_of_damaged_drafters(tmp_path: Path) -> None:
    config, shapes = DRAFTERS["eagle3"]
    whole: Tensors = {name: ("BF16", shape) for name, shape in shapes.items()}
    damaged = {
        "partial": {name: value for name, value in whole.items() if name != "fc.weight"},
        "mismatch": whole | {"norm.weight": ("BF16", (H + 1,))}, "stripped": {"x": ("F32", (1,))},
    }  # fmt: skip
    for verdict, tensors in damaged.items():
        folder = write(tmp_path / verdict, {**SIZES, **config}, tensors)
        assert inspect.run(InspectOptions(model=str(folder))).data["heads"]["verdict"] == verdict


@pytest.mark.parametrize(
    ("rope", "own"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, {}),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, {"rope_parameters": {"rope_type": "default"}}),
    ],
)
def test_unscaled_rope_of_a_drafter_is_reported(tmp_path: Path, rope: dict[str, Any], own: dict[str, Any]) -> None:
    scaled = target(tmp_path / "t", **rope, max_position_embeddings=4096)
    data = inspect.run(InspectOptions(model=str(write_drafter(tmp_path / "d", "eagle3", **own)), target=scaled)).data
    assert [finding["topic"] for finding in data["findings"]] == ["rope", "rope"]
