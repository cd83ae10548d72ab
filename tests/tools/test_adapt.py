"""`headstart adapt`: held-out split, comparison of heads, saved heads, refused records."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import torch
from lora_files import random_adapter
from support import family_of, soften, write_model

from headstart.cli.main import main
from headstart.cli.options import with_adapted
from headstart.config import EngineConfig
from headstart.core import Progress, Report
from headstart.engine.load import Model, load_model
from headstart.errors import CapacityError, ModelError, UsageError
from headstart.formats.adapter import digest_of
from headstart.heads.base import HeadSpec
from headstart.heads.files import read_head
from headstart.heads.kind import head_kind
from headstart.server.records import RecordedModel, RecordFiles, TextRecord, claim_folder
from headstart.tools.adapt.evaluation import HeadComparison, split_records
from headstart.tools.saved import WORK, AdaptedHead, find_adapted_head, folder_of, forget, save_head

CONFIG = EngineConfig(threads=1)
FACTS = AdaptedHead(kind="mtp", date="2026-11-22", base="", before=1.5, after=2.0)


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A softened trunk without a head."""
    config, arrays = family_of("llama").tiny(num_hidden_layers=2, vocab_size=support.VOCAB)
    return str(write_model(tmp_path_factory.mktemp("model"), config, soften(arrays, 0.1)))


def load(name: str) -> Model:
    return load_model(name, EngineConfig(threads=1, backend="reference", dtype="float64"))


def write_head(folder: Path, name: str, *, agreeing: bool) -> Path:
    """A head with high acceptance if `agreeing`, else with low acceptance."""
    model = load(name)
    spec = HeadSpec(layer=model.config.head_layer)
    return support.write_head(folder, model.config, spec, support.mtp_arrays(model, spec, agreeing))


def prompt(rng: np.random.Generator, length: int = 20) -> tuple[int, ...]:
    return tuple(rng.integers(3, support.VOCAB, length).tolist())


def texts(count: int, seed: int = 0) -> list[TextRecord]:
    rng = np.random.default_rng(seed)
    return [TextRecord(prompt(rng), prompt(rng, 12), float(i % 2)) for i in range(count)]


def write_records(folder: Path, name: str, records: list[TextRecord]) -> Path:
    claim_folder(folder, RecordedModel.of(load(name)))
    files = RecordFiles(folder, 2**20)
    for each in records:
        files.append(each.line())
    files.close()
    return folder


def test_held_out_records_stay_held_out_as_records_are_added() -> None:
    first, more = texts(200), texts(200, seed=1)
    before, after = split_records(first), split_records(first + more)
    assert 8 <= len(before.held_out) <= 40 and set(before.held_out) <= set(after.held_out)
    assert not {*before.training, *after.training} & set(after.held_out)


def test_conversations_are_not_split_and_system_prompts_are_ignored() -> None:
    rng = np.random.default_rng(3)
    system, records = prompt(rng, 300), []
    for _ in range(100):
        asked, answer, again = prompt(rng, 15), prompt(rng, 9), prompt(rng, 15)
        first = TextRecord((*system, *asked), answer)
        later = TextRecord((*first.prompt_ids, *answer, *again), prompt(rng, 9))
        changed = TextRecord((*system, *asked[:-2], 7, 8), prompt(rng, 9))
        records += [first, later, changed]
    found = split_records(records)
    kept = found.held_out + found.training
    talks = [[each for each in records[3 * i : 3 * i + 3] if each in kept] for i in range(100)]
    assert all(len({each in found.held_out for each in talk}) == 1 for talk in talks), "a conversation is split"
    assert len(found.training) > 150 and found.held_out and found.num_similar > 0


def test_split_of_few_or_equal_prompts() -> None:
    assert not split_records([]).training
    one = texts(1)
    assert len(split_records(one).held_out + split_records(one).training) == 1
    assert len(split_records(texts(40)).held_out) >= 8
    same = [replace(one[0], response_ids=(5, 6, i + 3)) for i in range(30)]
    assert {len(split_records(same).held_out), len(split_records(same).training)} == {0, 30}


@pytest.mark.parametrize(
    "after, better",
    [([9] * 20, True), ([5] * 20, False), ([6, 4] * 10, False), ([4] * 20, False), ([9] * 3, False)],
    ids=["better", "equal", "noise", "worse", "few"],
)
def test_better_head_must_exceed_its_confidence_interval(after: list[int], better: bool) -> None:
    found = HeadComparison([(10, 5)] * len(after), [(10, count) for count in after])
    assert found.is_better == better and f"1.50 -> {1 + np.mean(after) / 10:.2f}" in found.line("x")
    assert json.dumps(found.data())


@pytest.mark.slow
def test_adapted_head_is_used_until_forgotten(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    head = write_head(tmp_path / "head", model, agreeing=True)
    save_head(folder_of(model) / "mtp", head, FACTS)
    assert with_adapted(model, CONFIG).head == str(folder_of(model) / "mtp")
    assert with_adapted(model, replace(CONFIG, draft_vocab=9)).draft_vocab == "auto", "the head has its own vocabulary"
    assert "adapted head: acceptance length 1.50 -> 2.00 on your records" in capfd.readouterr().err
    for named in ({"head": "other"}, {"depth": 0}, {"drafter": "ngram"}, {"drafter": "none"}, {"drafter": "eagle3"}):
        config = replace(CONFIG, **named)
        assert with_adapted(model, config) == config
    assert main(["generate", model, "--prompt", "the", "--max-tokens", "3"]) == 0
    assert "adapted head" in capfd.readouterr().err
    (folder_of(model) / f"mtp{WORK}").mkdir()
    assert main(["adapt", "--forget", "--model", model]) == 0
    assert "forgotten: mtp;" in capfd.readouterr().out and not list(folder_of(model).iterdir())
    assert main(["adapt", "--forget", "--model", model]) == 0 and "nothing was adapted" in capfd.readouterr().out


def test_outdated_or_damaged_adapted_head_is_not_used(
    tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    head = write_head(tmp_path / "head", model, agreeing=True)
    save_head(folder_of(model) / "mtp", head, replace(FACTS, base="of an older version"))
    assert find_adapted_head(model, CONFIG) is None
    save_head(folder_of(model) / "mtp", head, FACTS)
    assert find_adapted_head(model, CONFIG)
    weights = folder_of(model) / "mtp" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with caplog.at_level("WARNING"):
        assert find_adapted_head(model, CONFIG) is None
    assert "the adapted head is not used" in caplog.text and "headstart adapt --forget removes it" in caplog.text
    (folder_of(model) / "mtp" / "adapted.json").write_text("{")
    assert find_adapted_head(model, CONFIG) is None and forget(model, "eagle3") == ([], [])
    assert forget(model, None) == (["mtp"], [])


def adapt(monkeypatch: pytest.MonkeyPatch, trained: Path, *words: str, options: list[Any] | None = None) -> int:
    """Runs the command with a fake training that exports `trained`. `options`: receives the training options."""
    asked = [] if options is None else options
    from headstart.tools.adapt import run
    from headstart.train.head_weights import export_head

    def train(options: Any, progress: Progress) -> None:
        asked.append(options)
        lines = [json.loads(line) for path in options.data for line in path.read_text().splitlines()]
        assert {"prompt_ids", "response_ids", "held_out"} <= set(lines[0]) and options.finetune
        head = read_head(trained)
        export_head(options.out, head, {n: torch.tensor(t.float32()) for n, t in head.tensors.items()})

    monkeypatch.setattr(run, "train", train)
    monkeypatch.setattr(run.self_distillation, "run", lambda options, progress: Report(False, {}, []))
    return main(["adapt", *words, "--threads", "1", "--json", "--minutes", "30"])


@pytest.mark.slow
def test_better_head_is_saved_and_worse_one_is_not(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    good, bad = (write_head(tmp_path / str(side), model, agreeing=side) for side in (True, False))
    folder = write_records(tmp_path / "records", model, texts(80))
    (folder / "records-0.jsonl").write_bytes(b"{broken\n")
    words = (str(folder), "--model", model)
    assert adapt(monkeypatch, good, *words, "--head", str(bad)) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["adapted"], document
    assert document["texts"]["damaged_lines"] == 1
    assert document["held_out"]["after"] > document["held_out"]["before"] + 0.2
    kept = find_adapted_head(model, CONFIG)
    assert (document["path"], oct(kept[0].stat().st_mode)[-3:]) == (str(kept[0]), "700")
    assert [path.name for path in folder_of(model).iterdir()] == ["mtp"], "no text is left behind"

    assert adapt(monkeypatch, bad, *words) == 0  # starts from the adapted head
    document = json.loads(capfd.readouterr().out)
    assert not document["adapted"] and document["held_out"]["difference"][1] < 0
    assert find_adapted_head(model, CONFIG) == kept


@pytest.mark.slow
def test_head_is_adapted_to_a_lora_adapter(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The head is trained on texts of the adapter and used where this adapter is the only one."""
    first, second = random_adapter(Path(model), 1), random_adapter(Path(model), 2)
    weak = json.loads((first / "adapter_config.json").read_text()) | {"lora_alpha": 0.01}  # `good` keeps its acceptance
    (first / "adapter_config.json").write_text(json.dumps(weak))
    good, bad = (write_head(tmp_path / str(side), model, agreeing=side) for side in (True, False))
    own = [replace(each, adapter=digest_of(first)) for each in texts(80, seed=4)]
    folder, asked = write_records(tmp_path / "records", model, texts(30) + own), list[Any]()
    words = (str(folder), "--model", model, "--head", str(bad))
    assert adapt(monkeypatch, good, *words, "--lora", str(first), options=asked) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["texts"]["training"] + document["texts"]["held_out"] + document["texts"]["left_out"] == 80
    assert document["adapted"] and asked[0].lora == first
    named = ((f"a={first}",), (f"b={second}",), (f"a={first}", f"b={second}"), None)
    configs = [replace(CONFIG, lora=each) for each in named]
    for config in configs[1:]:
        assert find_adapted_head(model, config) is None
    assert with_adapted(model, configs[0]).head == str(folder_of(model, digest_of(first)) / "mtp")
    assert adapt(monkeypatch, good, *words, "--lora", str(second)) == 2
    assert "holds no text yet of this adapter" in capfd.readouterr().err
    assert main(["adapt", "--forget", "--model", model, "--lora", str(first)]) == 0
    assert "forgotten: mtp;" in capfd.readouterr().out and find_adapted_head(model, configs[0]) is None


def test_interrupt_keeps_the_head_in_use_and_can_be_continued(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from headstart.tools.adapt import run

    save_head(folder_of(model) / "mtp", write_head(tmp_path / "head", model, agreeing=True), FACTS)
    before = (folder_of(model) / "mtp" / "model.safetensors").read_bytes()

    def train(options: Any, progress: Progress) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "train", train)
    monkeypatch.setattr(run.self_distillation, "run", lambda options, progress: Report(False, {}, []))
    words = ["adapt", str(write_records(tmp_path / "records", model, texts(80))), "--model", model, "--threads", "1"]
    assert main(words) == 130
    printed = capfd.readouterr().err
    assert "error: interrupted\nhint: the head in use is unchanged; the same command continues" in printed
    assert (folder_of(model) / "mtp" / "model.safetensors").read_bytes() == before
    assert (folder_of(model) / f"mtp{WORK}" / "records.jsonl").exists()
    assert main(["adapt", "--forget", "--model", model, "--kind", "mtp"]) == 0
    assert "forgotten: mtp; " in (printed := capfd.readouterr().out)
    assert "removed files of interrupted runs: mtp" in printed and not list(folder_of(model).iterdir())


def test_bad_records_are_refused(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    head = write_head(tmp_path / "head", model, agreeing=True)
    (tmp_path / "empty").mkdir()
    claim_folder(tmp_path / "none", RecordedModel.of(load(model)))
    claim_folder(tmp_path / "other", replace(RecordedModel.of(load(model)), fingerprint="x"))
    claim_folder(tmp_path / "damaged", RecordedModel.of(load(model)))
    (tmp_path / "damaged" / "records-1.jsonl").write_text('{"prompt_ids": [1, 999], "response_ids": [1]}\n\x00\n')
    write_records(tmp_path / "few", model, texts(10))
    same = [replace(texts(1, seed)[0], response_ids=(5, 6, i + 3)) for seed in range(9) for i in range(30)]
    once = next(part for i in range(9) if split_records(part := same[30 * i : 30 * i + 30]).training)
    write_records(tmp_path / "same", model, once)
    (tmp_path / "file").touch()
    cases = {
        "empty": "holds no records: it has no manifest.json", "none": "holds no text yet", "file": "is a file",
        "damaged": "holds 2 damaged lines", "other": "its fingerprint is x, that of", "few": "texts for training",
        "missing": "is not there", "same": "30 texts for training and 0 for evaluation; 16 and 4 are needed",
    }  # fmt: skip
    for name, message in cases.items():
        assert main(["adapt", str(tmp_path / name), "--model", model, "--head", str(head)]) == 2
        assert message in capfd.readouterr().err


def test_missing_or_untrainable_heads_are_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["adapt", str(write_records(tmp_path / "records", model, texts(40))), "--model", model]
    assert main(words) == 2 and "has no head to adapt" in capfd.readouterr().err
    head = str(write_head(tmp_path / "head", model, agreeing=True))
    assert main([*words, "--head", head, "--kind", "eagle3"]) == 2
    assert "has no head of kind eagle3, but one of kind mtp" in capfd.readouterr().err
    monkeypatch.setattr("headstart.tools.adapt.run.head_kind", lambda name: replace(head_kind(name), training=None))
    assert main([*words, "--head", head]) == 2 and "a head of kind mtp cannot be trained" in capfd.readouterr().err


def test_unwritable_folder_and_unknown_model_are_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = write_head(tmp_path / "head", model, agreeing=True)
    with pytest.raises(CapacityError, match="cannot write"):
        save_head(Path("/proc/none/mtp"), head, FACTS)
    with pytest.raises((ModelError, UsageError)):
        folder_of("no such model")


@pytest.mark.parametrize("words", [["x", "--minutes", "0"], ["x", "--minutes", "nan"], [], ["x", "--forget"]])
def test_wrong_arguments_are_refused(words: list[str]) -> None:
    assert main(["adapt", *words]) == 2
