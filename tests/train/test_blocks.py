"""Block drafters in training: same output as at run time, int8 export, resumed runs, anchors."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import support
import torch

from headstart.config import EngineConfig
from headstart.formats.safetensors_file import read_file
from headstart.heads.base import HeadSpec
from headstart.heads.files import read_head
from headstart.heads.kind import HeadCheckpoint, head_kind
from headstart.kernels.ops import StepInputs
from headstart.train.dataset import Batch
from headstart.train.frozen_model import make_frozen_model
from headstart.train.head_weights import export_head, first_weights
from headstart.train.objective import choose_anchors, draft_blocks
from headstart.train.run import TrainOptions, run
from headstart.train.torch_weights import build_modules


@pytest.mark.parametrize("change", [{}, {"causal": False}, {"windows": (0, 6), "causal_windows": True}])
def test_training_blocks_equal_the_run_time_blocks(change: dict[str, object]) -> None:
    model = support.tiny_model("llama", num_hidden_layers=7)
    frozen_model = make_frozen_model(model, EngineConfig(dtype="float64", threads=1), "block", 4)
    sizes = {"vocab_size": support.VOCAB, "draft_vocab_size": 50, "mask_token_id": support.EOS}
    spec = replace(frozen_model.spec, block=replace(frozen_model.spec.block, **sizes, **change))
    masters = first_weights(head_kind("block").training, spec, model, 1.0)
    module = build_modules(masters, spec, model.config.hidden_size, torch.float64)[0]
    length, rng = 20, np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, support.VOCAB - 8, (2, length)))
    streams = torch.from_numpy(rng.standard_normal((2, length, len(spec.tap) * model.config.hidden_size)))
    loss = torch.ones(2, length, dtype=torch.bool)
    loss[0, :4], loss[:, -1], loss[1, 12:] = False, False, False
    batch = Batch(tokens, streams, streams[..., :1], tokens, loss, loss, ("a", "b"), 2 * length, seed=3)
    embedding = model.decoder.embedding
    drafted = draft_blocks(module, embedding, batch, 4, 0.7)

    blocks = drafted.blocks
    behind = {(int(s), int(a)) for s, row in zip(blocks.source, blocks.anchors, strict=True) for a in row}
    assert {a for s, a in behind if s == 0} <= set(range(5, length - 1)) and len(behind) > 10
    assert blocks.valid.any(0).any(0).all()
    for chunk, place in blocks.valid[..., 0].nonzero().tolist():
        b, anchor = int(blocks.source[chunk]), int(blocks.anchors[chunk, place])
        pools = [model.backend.kv_pool(32, each) for each in module.kv_specs]

        def keep(ops, step: StepInputs, pools=pools):
            return {"x": module.keep(ops, step.hidden, step.positions, pools)}

        def rows(ops, step: StepInputs, pools=pools):
            embedded = ops.embed(embedding, step.token_ids)
            return {"y": module.draft(ops, embedded, step.token_ids, step.positions, pools)[0]}

        model.backend.run(keep, support.plan_at(0, tokens[b, :anchor].tolist()), hidden=streams[b, :anchor])
        block = [int(tokens[b, anchor]), *[support.EOS] * 3]
        found = model.backend.run(rows, support.plan_at(anchor, block, anchor + 3))["y"]
        torch.testing.assert_close(drafted.y[chunk, place], found, rtol=0, atol=1e-6)
        told = blocks.valid[chunk, place].tolist()
        assert told == [
            all(bool(loss[b, p]) if p < length else False for p in range(anchor, anchor + k + 1)) for k in range(4)
        ]


@pytest.mark.parametrize(("kind", "columns"), [("mtp", 128), ("block", 30)])
def test_heads_are_written_in_int8(tmp_path: Path, kind: str, columns: int) -> None:
    matrix = torch.randn(7, columns) * torch.logspace(-5, 2, 7)[:, None]
    matrix[3] = 0
    head = HeadCheckpoint(spec=HeadSpec(kind=kind), hidden_size=4, vocab_size=9)
    export_head(tmp_path / "head", head, {"a.weight": matrix, "norm.weight": torch.ones(4)})
    stored = read_file(tmp_path / "head" / "model.safetensors")
    assert {name: each.dtype for name, each in stored.items()} == {
        "a.weight": "I8", "a.weight_scale": "F16", "norm.weight": "BF16",
    }  # fmt: skip
    found = torch.from_numpy(read_head(tmp_path / "head").tensors["a.weight"].float32())
    # half a quantization step of the row, plus float16 rounding of the scale
    assert ((found - matrix).abs().amax(-1) <= matrix.abs().amax(-1) * 0.01 + 1e-5).all()


@pytest.mark.slow
def test_run_of_an_older_version_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions use the trunk's block, here one without norms of q and k."""
    config, arrays = support.family_of("llama").tiny(num_hidden_layers=5)
    model, texts = support.write_model(tmp_path / "model", config, support.soften(arrays, 0.1)), tmp_path / "t.jsonl"
    words = np.random.default_rng(1).choice(["the", "other", "thing", "in", "then", "ant"], (30, 40))
    texts.write_text("".join(json.dumps({"kind": "plain", "text": " ".join(row)}) + "\n" for row in words))
    common = {"model": str(model), "out": tmp_path / "head", "kind": "block", "data": (texts,), "depth": 2}
    kind = head_kind("block")
    training = replace(kind.training, layer=lambda layer, hidden: layer)
    with monkeypatch.context() as patch:
        patch.setattr("headstart.heads.block.HEAD", replace(kind, training=training))
        first = run(TrainOptions(tokens=3_000, threads=1, measure_speedup=False, **common))
    second = run(TrainOptions(tokens=6_000, threads=1, measure_speedup=False, **common))
    assert second.data["steps"] > first.data["steps"]
    begun = read_head(tmp_path / "head").spec
    assert not begun.layer.mixer.qk_norm
    anew = run(TrainOptions(tokens=300, threads=1, measure_speedup=False, **{**common, "out": tmp_path / "new"}))
    assert read_head(Path(anew.data["out"])).spec.layer.mixer.qk_norm


def test_anchors_depend_on_the_seed() -> None:
    loss = torch.ones(1, 200, dtype=torch.bool)
    first, again, other = (choose_anchors(loss, 4, 0.5, seed) for seed in (1, 1, 2))
    assert torch.equal(first.anchors, again.anchors) and not torch.equal(first.anchors, other.anchors)
    assert int(first.valid[..., 0].sum()) == 100 and first.anchors.min() > 0
