"""Training of heads: equality with run time, learning, resumed runs, data."""

import errno
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import torch
from tiny_models import write_model

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.engine.load import load_model
from headstart.errors import CapacityError, GenerationError, ModelError, UsageError, status_of
from headstart.formats.base import make_tensor
from headstart.heads.base import DraftStep, HeadNetwork, HeadSpec
from headstart.heads.files import read_head, write_head
from headstart.heads.kind import HeadCheckpoint, head_kind, trained_kinds
from headstart.layers.linear import Linear
from headstart.layers.network import Pools
from headstart.layers.norm import RMSNorm
from headstart.layers.parts import join_pools
from headstart.train import generate, records, trainer as trainer_module
from headstart.train.dataset import TrainingData, plan_epoch, prepare_data
from headstart.train.frozen_model import FrozenModel, make_frozen_model
from headstart.train.generate import ConversationPrompt
from headstart.train.head_weights import first_weights, stream_scale
from headstart.train.hidden_states import FeatureCache, trunk_argmax, trunk_hidden
from headstart.train.losses import LossTerms, distill, likely_candidates, make_teacher
from headstart.train.objective import DistillationTarget, LossConfig, before_norm, unroll
from headstart.train.ops import TrainOps
from headstart.train.records import Shards
from headstart.train.run import TrainOptions, batch_tokens, run
from headstart.train.torch_weights import round_int4
from headstart.train.trainer import Recipe, Trainer, TrainingHooks, save_checkpoint, train

SPECS = [
    HeadSpec(),
    HeadSpec(recycle="pre_norm"),
    HeadSpec(hidden_first=True, mask_first=True),
    HeadSpec(num_modules=2, beyond="last"),
    HeadSpec(num_modules=4),
]
WORDS = ["the", "other", "thin", "thing", "in", "tower", "then", "hears", "an", "aunt", "or", "ant", "out", "there"]


# The unrolled forward equals the run-time forward.


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5", "mimo_v2_flash", "deepseek_v32", "minimax_m3"])
def test_unrolled_forward_equals_the_run_time_forward(spec: HeadSpec, family: str) -> None:
    changes = {"mimo_v2_flash": {"sliding_window": 3}, "deepseek_v32": {"index_topk": 4}}
    changes |= {"minimax_m3": {"index_n_heads": 1, "index_block_size": 2, "index_topk_blocks": 2}}
    model = support.tiny_model(family, **changes.get(family, {}))
    head = support.make_head(model, spec)
    length, depth, width = 9, 4, model.config.hidden_size
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, support.VOCAB, (2, length))
    hidden = torch.from_numpy(rng.standard_normal((2, length, width)))
    embedding = model.decoder.embedding
    ours = unroll(head.modules, spec, embedding, hidden, torch.from_numpy(tokens), depth)

    identity = Linear(torch.eye(width, dtype=torch.float64))  # makes `logits` equal to y
    for b in range(2):
        for origin in range(length - depth):
            row = tokens[b].tolist()
            programs, outs = [], []
            for module in head.modules:
                pool = join_pools([model.backend.kv_pool(32, each) for each in module.kv_specs])
                programs.append(DraftStep(spec, module, pool, embedding, identity))
                plan = support.plan_at(1, row[1 : origin + 2], first_position=1)
                outs.append(model.backend.run(programs[-1], plan, hidden=hidden[b, : origin + 1]))
            out = outs[0]
            for step in range(1, depth + 1):
                if step > 1:
                    # A module's rows are its true pairs, followed by its draft steps.
                    start = origin + 2 + spec.rows_before(step - 1)
                    plan = support.plan_at(start, [row[origin + step]], first_position=1)
                    out = model.backend.run(programs[spec.module_of(step - 1)], plan, hidden=out["hidden"][-1:])
                torch.testing.assert_close(ours[step - 1][b, origin], out["logits"][-1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "glm4_moe", "deepseek_v3", "glm_moe_dsa", "qwen3_5"])
def test_trunk_over_whole_sequences_equals_the_engine(family: str) -> None:
    """The argmax of the cached hidden states is the engine's next token."""
    model = support.tiny_model(family)
    frozen_model = make_frozen_model(model, EngineConfig(dtype="float64", threads=1))
    prompt = support.prompt_of(20, 3)
    hidden = trunk_hidden(frozen_model.trunk, torch.tensor([prompt, prompt[:5] + [0] * 15]))
    llm = LLM(model, EngineConfig(dtype="float64", threads=1, drafter="none", max_model_len=64))
    answers = llm.generate([prompt, prompt[:5]], SamplingParams(max_tokens=1, ignore_eos=True))
    rows = torch.stack((hidden[0, 19], hidden[1, 4]))
    assert trunk_argmax(frozen_model.trunk, rows).tolist() == [each.token_ids[0] for each in answers]


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_untrainable_native_heads_are_refused_before_loading(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", *support.family_of(family).tiny())
    monkeypatch.setattr("headstart.train.run.load_frozen_model", lambda *_: pytest.fail("the model is loaded"))
    options = TrainOptions(model=str(model), out=tmp_path / "head", data=(tmp_path,), tokens=5, finetune=True)
    with pytest.raises(ModelError, match="own head has experts, or attention"):
        run(options)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen3_5"])
def test_heads_without_a_block_fit_any_trunk(family: str, tmp_path: Path) -> None:
    model = support.tiny_model(family, "float32")
    frozen_model = make_frozen_model(model, EngineConfig(backend="reference", threads=1), kind="medusa")
    masters = first_weights(head_kind("medusa").training, frozen_model.spec, model, 1.0)
    config = model.config
    head = HeadCheckpoint(spec=frozen_model.spec, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    write_head(tmp_path / "head", head, {name: tensor.numpy() for name, tensor in masters.items()})
    assert read_head(tmp_path / "head").spec == frozen_model.spec


def test_unrolled_eagle3_equals_the_run_time_forward() -> None:
    """EAGLE-3 fuses the tapped streams in the first step and reads its own output in later ones."""
    model = support.tiny_model("llama")
    head = support.make_eagle3(model, (0, 1, 2))
    module, embedding = head.modules[0], model.decoder.embedding
    rng, length, depth = np.random.default_rng(0), 9, 4
    row = rng.integers(0, support.VOCAB, length).tolist()
    streams = torch.from_numpy(rng.standard_normal((1, length, 3 * model.config.hidden_size)))
    ours = unroll([module], head.spec, embedding, streams, torch.tensor([row]), depth)
    identity = Linear(torch.eye(model.config.hidden_size, dtype=torch.float64))
    for origin in range(length - depth):
        pool = model.backend.kv_pool(32, module.kv_specs[0])
        programs = HeadNetwork(head, model.config.hidden_size, embedding, [identity]).programs(Pools([pool]))
        first, following = programs["pairs.0"].code, programs["next.0"].code
        plan = support.plan_at(1, row[1 : origin + 2], first_position=1)
        out = model.backend.run(first, plan, hidden=streams[0, : origin + 1])
        for step in range(1, depth + 1):
            if step > 1:
                plan = support.plan_at(origin + step, [row[origin + step]], first_position=1)
                out = model.backend.run(following, plan, hidden=out["hidden"][-1:])
            torch.testing.assert_close(ours[step - 1][0, origin], out["logits"][-1], rtol=0, atol=1e-9)


def test_loss_and_gradient_match_the_formula() -> None:
    torch.manual_seed(0)
    num, width, vocab, rank, terms = 7, 5, 11, 3, LossTerms(top1=0.4, variation=0.7)
    lm_head = torch.randn(vocab, width, dtype=torch.float64)
    labels = torch.tensor([3, -1, 0, 10, 2, 5, -1, 7, 1])
    teacher = make_teacher(torch.randn(9, width, dtype=torch.float64), lm_head, labels)
    rows, weight = torch.randint(0, 9, (num,)), torch.rand(num, dtype=torch.float64)
    y = torch.randn(num, width, dtype=torch.float64, requires_grad=True)
    before, out = (torch.randn(n, rank, dtype=torch.float64, requires_grad=True) for n in (num, vocab))
    loss, _, shared = distill(y, teacher, rows, weight, terms, (before, out))
    found = torch.autograd.grad(loss, (y, before, out))
    log_probs = (y @ lm_head.T + before @ out.T).log_softmax(-1)
    best = teacher.best[rows]
    hard = torch.where(best >= 0, log_probs.gather(1, best.clamp(min=0)[:, None])[:, 0], 0.0)
    agreed = torch.minimum(teacher.probs[rows], log_probs.exp()).sum(-1)
    each = -(teacher.probs[rows] * log_probs).sum(-1) - terms.top1 * hard + terms.variation * (1 - agreed)
    torch.testing.assert_close(loss, each @ weight)
    torch.testing.assert_close(shared, agreed.detach())
    torch.testing.assert_close(found, torch.autograd.grad(each @ weight, (y, before, out)))


def test_candidates_are_likely_tokens_and_a_weighted_random_sample() -> None:
    torch.manual_seed(0)
    lm_head, hidden = torch.randn(300, 4), 3 * torch.randn(9, 4)
    best = (hidden @ lm_head.T).argmax(-1)
    best[0] = -1
    found = likely_candidates(hidden, best, lm_head, 60, torch.Generator().manual_seed(1))
    assert len(found.ids) == 60 and set(best[1:].tolist()) <= set(found.ids.tolist())
    assert found.prior.exp().sum().round() == 300
    whole, part = make_teacher(hidden, lm_head, best), make_teacher(hidden, lm_head, best, found)
    assert torch.equal(found.ids[part.best[1:]], best[1:]) and part.best[0] == -1
    alone = found.prior == 0
    torch.testing.assert_close(part.probs[:, alone], whole.probs[:, found.ids[alone]], rtol=0.1, atol=0.1)


def test_states_before_the_final_norm_are_recovered_up_to_scale() -> None:
    torch.manual_seed(0)
    norm, own = RMSNorm(torch.randn(8), 1e-6), RMSNorm(torch.rand(8) + 0.5, 1e-6)
    ops, stream = TrainOps(torch.device("cpu"), torch.float32), 7 * torch.randn(3, 5, 8)
    torch.testing.assert_close(own(ops, before_norm(norm(ops, stream), norm.weight)), own(ops, stream))


# Learning, and use by the engine.


def write_texts(path: Path, count: int = 60) -> Path:
    rng = np.random.default_rng(1)
    with path.open("w") as file:
        for i in range(count):
            words = " ".join(rng.choice(WORDS, 40))
            if i % 2:
                record: dict[str, Any] = {"kind": "plain", "text": words}
            else:
                record = {"kind": "chat", "prompt": words[:30], "response": words[30:]}
            file.write(json.dumps(record) + "\n")
    return path


def tiny_folder(tmp_path: Path, softness: float = 0.3, layers: int = 2) -> Path:
    config, arrays = support.family_of("llama").tiny(num_hidden_layers=layers)
    return write_model(tmp_path / "model", config, support.soften(arrays, softness))


@pytest.mark.slow
def test_training_raises_held_out_acceptance(tmp_path: Path) -> None:
    frozen_model, data = frozen_model_and_data(tmp_path, softness=0.1)
    trainer = new_trainer(frozen_model, data, vocab=support.VOCAB, tokens=20_000)
    before = trainer.evaluate(data.held_out, data.features)["all"]
    hooks = TrainingHooks(on_checkpoint=lambda _: None, on_evaluation=lambda *_: False, on_step=lambda _: None)
    train(trainer, data, hooks)
    after = trainer.evaluate(data.held_out, data.features)["all"]
    assert after.cumulative[0] > before.cumulative[0] + 0.3 and after.cumulative[1] > before.cumulative[1] + 0.3


@pytest.mark.slow
@pytest.mark.parametrize("kind", trained_kinds())
def test_head_trained_from_prompts_drafts_in_the_engine(tmp_path: Path, kind: str) -> None:
    folder, prompts = tiny_folder(tmp_path, 0.1, {"eagle3": 7, "block": 4}.get(kind, 2)), tmp_path / "prompts.jsonl"
    asked = np.random.default_rng(2).choice(WORDS, (40, 3))
    prompts.write_text("".join(json.dumps({"prompt": " ".join(words)}) + "\n" for words in asked))
    options = TrainOptions(
        model=str(folder), out=tmp_path / "head", kind=kind, prompts=(prompts,), tokens=40_000, depth=2,
        draft_vocab=100, threads=1, measure_speedup=False,
    )  # fmt: skip
    report = run(options)
    rows = [json.loads(line) for line in (options.work / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, report.data["steps"]]
    assert report.data["held_out"]["all"]["length"] > 1.45 and "<svg" in (options.work / "acceptance.svg").read_text()
    head = read_head(options.out)
    ids = head.draft_token_ids
    assert ids is not None and len(ids) == 100 and support.EOS in ids
    assert report.data["tokens"] >= 40_000
    # The file holds the best evaluation, which for kinds other than mtp may be the first one on so soft a trunk.
    assert head.training["tokens"] in ((report.data["tokens"],) if kind == "mtp" else (0, report.data["tokens"]))
    assert "F32" not in {tensor.dtype for tensor in head.tensors.values()}

    llm = LLM(str(folder), EngineConfig(head=str(options.out), threads=1, max_model_len=256, depth=2))
    assert llm.method == kind
    questions = ["the other thing", "an ant out there", "then hears in the tower"]
    answers = llm.generate(questions, SamplingParams(max_tokens=60, ignore_eos=True))
    plain = llm.generate(questions, SamplingParams(max_tokens=60, ignore_eos=True), depth=0)
    assert [each.token_ids for each in answers] == [each.token_ids for each in plain]
    assert np.mean([each.speculation.acceptance_length for each in answers]) > 1.5


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_trained_eagle3_heads_fit_the_published_layout(tmp_path: Path, family: str) -> None:
    """The trunk's block may have scaled or partial RoPE, norms of q and k, or a gate."""
    changes = {"rope_parameters": LLAMA3} if family == "llama" else {}
    config, arrays = support.family_of(family).tiny(num_hidden_layers=8, **changes)
    model, texts = write_model(tmp_path / "model", config, arrays), write_texts(tmp_path / "t.jsonl", 12)
    options = {"model": str(model), "data": (texts,), "threads": 1, "measure_speedup": False, "draft_vocab": 50}
    run(TrainOptions(out=tmp_path / "head", kind="eagle3", tokens=300, **options))
    head = str(tmp_path / "head")
    assert load_model(str(model), EngineConfig(head=head, threads=1, backend="reference")).head.spec.kind == "eagle3"


def frozen_model_and_data(tmp_path: Path, softness: float = 0.3) -> tuple[FrozenModel, TrainingData]:
    model = support.tiny_model("llama", "float32", softness, num_hidden_layers=2)
    frozen_model = make_frozen_model(model, EngineConfig(backend="reference", dtype="float32", threads=1))
    return frozen_model, prepare_data(frozen_model, [write_texts(tmp_path / "t.jsonl")], tmp_path, 0, None, None)


def new_trainer(frozen_model: FrozenModel, data: TrainingData, vocab: int = 64, **recipe: Any) -> Trainer:
    found = records.draft_vocabulary(data.training, vocab, frozen_model.text.end_ids)
    ids = torch.arange(vocab) if vocab == support.VOCAB else torch.from_numpy(found)
    trunk = frozen_model.trunk
    scale = stream_scale(trunk.model, torch.from_numpy(data.training[0].tokens).long())
    return Trainer(
        first_weights(head_kind("mtp").training, frozen_model.spec, frozen_model.model, scale),
        frozen_model.spec,
        DistillationTarget.of(trunk, ids),
        Recipe(batch_tokens=256, dtype=torch.float32, loss=LossConfig(steps=(1.0, 0.5)), **recipe),
    )


@pytest.mark.slow
def test_head_that_does_not_pay_is_reported_and_a_better_head_is_kept(tmp_path: Path) -> None:
    folder, texts = tiny_folder(tmp_path, 1.0), write_texts(tmp_path / "t.jsonl", 60)
    common: dict[str, Any] = {"model": str(folder), "out": tmp_path / "head", "data": (texts,), "threads": 1}
    report = run(TrainOptions(tokens=8_000, draft_vocab=100, **common))
    gain = report.data["gain"]
    # Nearly every draft of this head is rejected.
    assert gain["acceptance_length"] < gain["needed_acceptance_length"] and gain["predicted_speedup"] < 1
    assert gain["measured_speedup"]["median"] < 1 and not report.ok
    assert any("DOES NOT PAY" in line for line in report.lines)
    before = (tmp_path / "head" / "model.safetensors").read_bytes()
    worse = run(TrainOptions(tokens=300, draft_vocab=4, resume=False, **common))
    assert worse.data["held_out"]["all"]["length"] < report.data["held_out"]["all"]["length"]
    assert (tmp_path / "head" / "model.safetensors").read_bytes() == before
    assert any("keeps it" in line for line in worse.lines)
    deep = {**common, "model": str(tiny_folder(tmp_path / "deep", layers=7))}
    with pytest.raises(UsageError, match="holds another head: kind mtp"):
        run(TrainOptions(tokens=300, kind="eagle3", **deep))


@pytest.mark.slow
def test_fine_tuning_starts_from_the_acceptance_of_the_head(tmp_path: Path) -> None:
    folder, texts = tiny_folder(tmp_path, 0.5), write_texts(tmp_path / "t.jsonl", 60)
    common: dict[str, Any] = {"model": str(folder), "data": (texts,), "threads": 1, "draft_vocab": 100,
                              "measure_speedup": False}  # fmt: skip
    first = run(TrainOptions(out=tmp_path / "first", tokens=12_000, **common))
    finetuned = run(TrainOptions(out=tmp_path / "again", tokens=300, finetune=True, head=tmp_path / "first", **common))
    rows = [json.loads(line) for line in Path(finetuned.data["log"]).read_text().splitlines()]
    start, end = rows[0]["held_out"]["all"]["length"], first.data["held_out"]["all"]["length"]
    assert start == pytest.approx(end, abs=0.1)  # the file is rounded; a new head starts near 1
    with pytest.raises(ModelError, match="no head of kind mtp to fine-tune"):
        run(TrainOptions(out=tmp_path / "none", tokens=300, finetune=True, **common))
    with pytest.raises(UsageError, match="add --finetune"):
        run(TrainOptions(out=tmp_path / "none", tokens=300, head=tmp_path / "first", **common))


def test_short_runs_use_smaller_batches() -> None:
    bounds = ({"minutes": 1.0}, {"minutes": 60.0}, {"minutes": 600.0}, {"tokens": 1_500_000})
    sizes = [batch_tokens(TrainOptions(model="m", out=Path("head"), **bound)) for bound in bounds]
    assert sizes == [512, 1320, 2048, 1000]


def test_update_share_interpolates_the_weights(tmp_path: Path) -> None:
    frozen_model, data = frozen_model_and_data(tmp_path)
    whole = new_trainer(frozen_model, data, tokens=600)
    part = new_trainer(frozen_model, data, tokens=600, update_share=0.25)
    start = {name: weight.clone() for name, weight in whole.average.items()}
    for trainer in (whole, part):
        for _ in range(2):
            trainer.step(data.training[:4], data.features)
    assert any(not torch.equal(start[name], weight) for name, weight in whole.weights.items())
    for name, weight in part.weights.items():
        torch.testing.assert_close(weight, start[name].lerp(whole.average[name], 0.25))
    assert part.evaluate(data.held_out, data.features)["all"].tried


@pytest.mark.slow
def test_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    frozen_model, data = frozen_model_and_data(tmp_path)
    checkpoint = tmp_path / "checkpoint.pt"

    def train_until(trainer: Trainer, stop_at: int | None) -> None:
        def on_step(each: Trainer) -> None:
            if each.progress.step == stop_at:
                raise KeyboardInterrupt

        hooks = TrainingHooks(
            on_checkpoint=lambda t: save_checkpoint(t, checkpoint), on_evaluation=lambda *_: False, on_step=on_step
        )
        train(trainer, data, hooks)

    whole = new_trainer(frozen_model, data, tokens=12_000)
    train_until(whole, None)
    for stop_at in (5, 20):
        broken = new_trainer(frozen_model, data, tokens=12_000)
        if stop_at > 5:
            broken.load_state(torch.load(checkpoint))
        with pytest.raises(KeyboardInterrupt):
            train_until(broken, stop_at)
    last = new_trainer(frozen_model, data, tokens=12_000)
    last.load_state(torch.load(checkpoint))
    assert last.progress.step == 20
    train_until(last, None)
    assert last.progress.step == whole.progress.step
    for name, weight in whole.masters.items():
        assert torch.equal(weight, last.masters[name]), name
        assert torch.equal(whole.average[name], last.average[name]), name


@pytest.mark.slow
def test_run_is_continued_with_new_data(tmp_path: Path) -> None:
    texts, folder = write_texts(tmp_path / "texts.jsonl", 30), tiny_folder(tmp_path)
    common: dict[str, Any] = {"model": str(folder), "out": tmp_path / "head", "depth": 1, "threads": 1,
                              "measure_speedup": False}  # fmt: skip
    first = run(TrainOptions(data=(texts,), tokens=4_000, **common))
    second = run(TrainOptions(data=(texts, write_texts(tmp_path / "more.jsonl", 50)), tokens=9_000, **common))
    assert first.data["tokens"] < second.data["tokens"] and second.data["steps"] > first.data["steps"]
    count = {name: row["sequences"] for name, row in second.data["data"].items()}
    assert sum(count.values()) > sum(row["sequences"] for row in first.data["data"].values())
    with pytest.raises(UsageError, match="not a head"):
        run(TrainOptions(data=(texts,), tokens=10, **{**common, "out": tmp_path}))


@pytest.mark.slow
def test_full_disk_is_reported_and_the_run_can_be_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, folder = write_texts(tmp_path / "texts.jsonl", 30), tiny_folder(tmp_path)
    options = TrainOptions(
        model=str(folder), data=(texts,), out=tmp_path / "head", depth=1, threads=1, tokens=4_000, measure_speedup=False
    )  # fmt: skip
    full = OSError(errno.ENOSPC, "No space left on device")

    def write(path: Path, content: Any) -> None:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "write_atomic", write)
        with pytest.raises(CapacityError, match=r"No space left on device .hint: make room"):
            run(options)
    assert not list(options.work.glob(".*")) and run(options).data["tokens"] >= 4_000
    with pytest.raises(CapacityError, match=r"cannot write to .*nowhere: .* .hint: may you write there"):
        run(replace(options, out=Path("/proc/nowhere")))


@pytest.mark.slow
def test_damaged_cache_is_rebuilt_and_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    texts, folder = write_texts(tmp_path / "texts.jsonl", 30), tiny_folder(tmp_path)
    options = TrainOptions(
        model=str(folder), data=(texts,), out=tmp_path / "head", depth=1, threads=1, tokens=2_000, measure_speedup=False
    )  # fmt: skip
    run(options)
    os.truncate(next(options.work.glob("cache-*/shard-*/hidden.bin")), 100)
    with (options.work / "log.jsonl").open("a") as log:
        log.write('{"tokens": 1')
    assert run(replace(options, tokens=3_000)).data["tokens"] >= 3_000
    for size in (1_000, 0):
        os.truncate(options.checkpoint, size)
        with pytest.raises(ModelError, match=r"checkpoint\.pt cannot be read: .* .hint: train with --restart"):
            run(replace(options, tokens=4_000))
    assert run(replace(options, resume=False)).data["tokens"] >= 2_000


def test_nan_weights_are_refused(tmp_path: Path) -> None:
    config, arrays = support.family_of("llama").tiny()
    arrays["model.layers.1.mlp.up_proj.weight"] = np.full_like(arrays["model.layers.1.mlp.up_proj.weight"], np.nan)
    model = str(write_model(tmp_path / "m", config, arrays))
    with pytest.raises(GenerationError, match=r"NaN or infinity \(hint: are the weights whole") as broken:
        LLM(model, EngineConfig(threads=1)).generate(["the"])
    assert status_of(broken.value).exit_code == 3
    options = TrainOptions(model=model, out=tmp_path / "h", data=(write_texts(tmp_path / "t.jsonl"),), tokens=1_000)
    with pytest.raises(ModelError, match="hidden states hold NaN or infinity"):
        run(options)


def test_feature_cache_is_filled_once_and_leaves_no_temporary_files(tmp_path: Path) -> None:
    frozen_model, data = frozen_model_and_data(tmp_path)
    cache = FeatureCache(tmp_path / "other", frozen_model.config.hidden_size)
    assert sum(cache.fill(data.training, frozen_model.trunk)) == sum(map(len, data.training))
    assert list(cache.fill(data.training, frozen_model.trunk)) == []
    finetuned = FeatureCache(tmp_path / "other", frozen_model.config.hidden_size)
    example = data.training[0]
    assert torch.equal(finetuned[example.key].hidden, cache[example.key].hidden)
    assert not list((tmp_path / "other").glob("writing-*"))


# Data.


def test_bad_lines_are_named_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    lines = ['{"text": "a good line"}', "{broken", '{"prompt": "no answer"}', "[1]", '{"messages": [{"role": "user"}]}']
    path.write_text("\n".join(lines) + "\n")
    skipped = records.SkippedRecords()
    assert [record.text for record in records.read_records([path], skipped)] == ["a good line"] and skipped.count == 4
    shown = "\n".join(skipped.lines())
    assert f"{path}:2: not JSON" in shown and f"{path}:3: has neither text, messages nor prompt and response" in shown
    assert f"{path}:5: a message lacks role or content" in shown


def test_files_without_records_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(UsageError, match=r"empty\.jsonl holds no training records"):
        records.read_records([empty], records.SkippedRecords())
    with pytest.raises(UsageError, match="does not exist"):
        records.read_records([tmp_path / "nowhere"], records.SkippedRecords())
    with pytest.raises(UsageError, match="holds no prompts"):
        generate.read_prompts([empty])
    (folder := tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=r"folder holds no \.jsonl file"):
        generate.read_prompts([folder])


def test_only_answers_carry_loss(tmp_path: Path) -> None:
    frozen_model, _ = frozen_model_and_data(tmp_path)
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "the thing"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "an ant"},
    ]
    record = records.parse_record({"messages": messages}, "x")
    assert not record.held_out
    (example,) = records.encode_records([record], frozen_model.text, records.SkippedRecords())
    text = frozen_model.model.tokenizer.decode(example.tokens[1:][example.loss[:-1]].tolist(), skip_special=False)
    assert text == "the thing<|im_end|>an ant<|im_end|>"


def test_token_ids_of_records_are_used_unchanged() -> None:
    line = {"prompt": "a", "response": "b", "prompt_ids": [5, 6], "response_ids": [7, 8, 2]}
    (example,) = [records._encode_exact(records.parse_record(line, "x"))]
    assert example.tokens.tolist() == [5, 6, 7, 8, 2] and example.loss.tolist() == [False, True, True, True, False]


@pytest.mark.parametrize(("change", "message"), [
    ({"tokens": None}, "exactly one of.*for example --minutes 60"),
    ({"minutes": 5.0}, "exactly one of.*leave one out"),
    ({"tokens": 0}, "above 0"),
    ({"data": ()}, "text to learn from"),
])  # fmt: skip
def test_impossible_options_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"model": "x", "out": tmp_path / "h", "data": (tmp_path,), "tokens": 5, **change}
    with pytest.raises(UsageError, match=message):
        run(TrainOptions(**options))


def test_epoch_contains_every_example_once() -> None:
    lengths = np.random.default_rng(0).integers(5, 300, 700).tolist()
    plan = plan_epoch(lengths, 1024, seed=3, epoch=1)
    assert sorted(i for batch in plan for i in batch) == list(range(700))
    assert plan == plan_epoch(lengths, 1024, seed=3, epoch=1) != plan_epoch(lengths, 1024, seed=3, epoch=2)
    assert all(len(batch) * max(lengths[i] for i in batch) <= 1024 for batch in plan)


# Answers of the model.


def test_answers_are_resumed_and_valid_records(tmp_path: Path) -> None:
    model, folder = tiny_folder(tmp_path), tmp_path / "answers"
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"kind": "k", "prompt": f"the {word}"}) + "\n" for word in sorted(set(WORDS))))
    prompts = generate.read_prompts([path])
    llm = LLM(str(model), EngineConfig(threads=1, drafter="none", max_model_len=128))
    with Shards(folder, "answers", per_shard=5) as shards:
        generate.answer_prompts(llm, prompts[:4], shards, max_tokens=12)
    with (folder / "answers-00000.jsonl").open("a") as file:
        file.write('{"key": "cut off')
    with Shards(folder, "answers", per_shard=5) as shards:
        generate.answer_prompts(llm, prompts, shards, max_tokens=12)
        answers = list(shards)
    assert sorted(record["key"] for record in answers) == sorted(prompt.key for prompt in prompts)
    assert {record["temperature"] > 0 for record in answers} == {True, False}
    with Shards(tmp_path / "whole", "answers") as shards:
        generate.answer_prompts(llm, prompts, shards, max_tokens=12)
        by_key = {record["key"]: record for record in shards}
    assert all(record["response_ids"] == by_key[record["key"]]["response_ids"] for record in answers)
    assert len(list(folder.glob("*.jsonl"))) == -(-len(prompts) // 5)
    assert records.read_records([folder], records.SkippedRecords())


def test_model_answers_every_turn_of_a_conversation(tmp_path: Path) -> None:
    path, turns = tmp_path / "turns.jsonl", [("system", "be in"), ("user", "the"), ("assistant", "!"), ("user", "or")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path.write_text("\n".join(json.dumps(each) for each in ({"messages": messages}, {"turns": ["an", "ant", "in"]})))
    prompts = generate.read_prompts([path])
    assert [(len(each.messages), each.later_questions) for each in prompts] == [(2, ("or",)), (1, ("ant", "in"))]
    llm = LLM(str(tiny_folder(tmp_path)), EngineConfig(threads=1, drafter="none", max_model_len=160))
    with Shards(tmp_path / "answers", "answers") as shards:
        generate.answer_prompts(llm, prompts, shards, max_tokens=12)
        for record in shards:
            for before in (turn for turn in record["messages"][:-1] if turn["role"] == "assistant"):
                assert before["content"] != "!"
        asked = Counter(record["messages"][-2]["content"] for record in shards)
        stopped = sum(record["finish_reason"] == "stop" for record in shards)
        assert asked["the"] == asked["an"] == 1 and len(shards) <= 2 + stopped
    whole = ConversationPrompt(({"role": "user", "content": "an"},), "k", later_questions=("ant", "in"))
    with Shards(tmp_path / "resumed", "answers") as shards:
        record = {"key": whole.key, "finish_reason": "stop", "messages": [*whole.messages, {"content": "aunt"}]}
        shards.append(record)
        generate.answer_prompts(llm, [whole], shards, max_tokens=12)
        assert [turn["content"] for turn in list(shards)[1]["messages"][:3]] == ["an", "aunt", "ant"]


def test_int4_rounding_is_as_accurate_as_the_native_backend() -> None:
    """It has at most 16 levels per group, and gradients pass through."""
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0), requires_grad=True)
    rounded = round_int4(weight)
    rounded.sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.ones_like(weight))
    groups = rounded.detach().view(-1, 32)
    assert max(len(group.unique()) for group in groups) <= 16
    native = pytest.importorskip("headstart.kernels.native.packing", exc_type=ImportError)
    values, pool = weight.detach().numpy(), native.ThreadPool(1)
    packed = native.pack(make_tensor("w", values.shape, "F32", values.reshape(-1).view(np.uint8)), pool, "int4")
    errors = [np.square(found - values).mean() for found in (rounded.detach().numpy(), native.dequantize(packed, pool))]
    assert errors[0] < 1.1 * errors[1]
    odd = torch.randn(4, 20)
    assert round_int4(odd) is odd


@pytest.mark.parametrize("family", ["gemma3n", "gemma4", "deepseek_v4"])
def test_stream_scale_with_per_layer_embeddings_or_several_streams(family: str) -> None:
    model = support.tiny_model(family, "float32")
    assert 0.5 < stream_scale(model.decoder, torch.tensor(support.prompt_of(20, 3))) < 10
