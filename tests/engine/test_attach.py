"""Fingerprint of the trunk that a head was trained on, and heads shipped in the package."""

from dataclasses import replace
from pathlib import Path

import pytest
import support

from headstart import hub
from headstart.config import EngineConfig
from headstart.engine.load import attach_head, load_model
from headstart.formats import open_checkpoint
from headstart.heads import files
from headstart.heads.kind import HeadCheckpoint
from headstart.layers.weights import trunk_fingerprint
from headstart.models.shipped_heads import choose_head, heads_in_package, shipped_heads
from headstart.tools.adapt.run import AdaptOptions, _start
from headstart.tools.export.source import ExportRequest
from headstart.tools.inspect.run import InspectOptions, run as inspect_model
from headstart.tools.saved import digest_of
from headstart.tools.verify.options import default_drafters
from headstart.train.options import saved_head


@pytest.mark.slow
def test_head_trained_on_other_weights_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A head trained on other weights of the same sizes loads with one warning; a head of this trunk or without a
    fingerprint loads without one."""
    model, spec = support.tiny_model("llama"), support.eagle3_spec(support.tiny_model("llama"))
    sizes = {"hidden_size": model.config.hidden_size, "vocab_size": model.config.vocab_size}
    head = HeadCheckpoint(spec=spec, trunk="a-sister", **sizes)
    own = trunk_fingerprint(model.weights.tensors)
    for i, fingerprint in enumerate(("", own, own[::-1])):
        path = tmp_path / str(i)
        files.write_head(path, replace(head, trunk_fingerprint=fingerprint), support.eagle3_arrays(model, spec))
        assert attach_head(model, path).source == str(path)
    [line] = caplog.messages
    assert f"{tmp_path / '2'} was trained on other weights (a-sister)" in line


@pytest.mark.slow
def test_packaged_head_attaches_to_every_quantization_of_its_trunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = support.tiny_model("llama")
    spec = support.eagle3_spec(model)
    sizes = {"hidden_size": model.config.hidden_size, "vocab_size": model.config.vocab_size}
    arrays = support.eagle3_arrays(model, spec)
    for folder, fingerprint in (("ours", trunk_fingerprint(model.weights.tensors)), ("others", "f" * 32)):
        head = HeadCheckpoint(spec=spec, trunk=folder, trunk_fingerprint=fingerprint, **sizes)
        files.write_head(tmp_path / "heads" / folder, head, arrays)
    ours = tmp_path / "heads" / "ours"
    monkeypatch.setattr(hub, "HEADS", tmp_path / "heads")
    heads_in_package.cache_clear()
    try:
        for rounding in (None, "int8"):
            loaded = load_model(model.name, EngineConfig(quantization=rounding, threads=1))
            assert loaded.head is not None and loaded.head.source == str(ours)
        report = inspect_model(InspectOptions(model=model.name))
        assert report.data["attached_head"]["path"] == str(ours)
        assert default_drafters(loaded, EngineConfig()) == ("eagle3", "ngram", "mixed")
        assert saved_head(loaded.checkpoint, "eagle3", None).trunk == "ours"
        assert ExportRequest(model.name).find_head() == ours
        assert _start(AdaptOptions(records=tmp_path, model=model.name, threads=1)).base == digest_of(ours)
        assert "a head of its own is attached" in report.data["heads"]["reason"]
    finally:
        heads_in_package.cache_clear()


@pytest.mark.skipif(hub.cached_trunk() is None, reason="the default model is not in the cache: headstart pull")
def test_shipped_heads_of_the_default_model() -> None:
    heads = shipped_heads(open_checkpoint(hub.resolve()))
    assert list(heads) == ["eagle3", "mtp"], "the first is the default"
    assert choose_head(heads) == choose_head(heads, "mixed") == choose_head(heads, "eagle3") == heads["eagle3"]
    assert choose_head(heads, "mtp") == heads["mtp"] and choose_head({}, "eagle3") is None
    assert all(files.read_head(each.folder).spec.kind == each.kind for each in heads_in_package())


def test_copied_tied_lm_head_keeps_the_trunk_fingerprint() -> None:
    tensors = support.tiny_model("llama").weights.tensors
    tied = {name: each for name, each in tensors.items() if name != "lm_head.weight"}
    copied = {**tied, "lm_head.weight": tied["embed_tokens.weight"]}
    assert trunk_fingerprint(tied) == trunk_fingerprint(copied)
    assert trunk_fingerprint(tied) != trunk_fingerprint({**tied, "extra.weight": tied["embed_tokens.weight"]})
