"""Which trunk a head was trained on."""

from dataclasses import replace
from pathlib import Path

import pytest
import support

from headstart.engine.load import attach_head
from headstart.heads import files
from headstart.heads.kind import HeadCheckpoint
from headstart.layers.weights import trunk_fingerprint


@pytest.mark.slow
def test_a_head_of_other_weights_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A fine-tune's head, or one of a stranger of the same sizes, runs; one line says so. Its own, and one that does
    not tell, are taken in silence."""
    model, spec = support.tiny_model("llama"), support.eagle3_spec(support.tiny_model("llama"))
    sizes = {"hidden_size": model.config.hidden_size, "vocab_size": model.config.vocab_size}
    head = HeadCheckpoint(spec=spec, trunk="a-sister", **sizes)
    own = trunk_fingerprint(model.weights.tensors)
    for i, told in enumerate(("", own, own[::-1])):
        path = tmp_path / str(i)
        files.write_head(path, replace(head, trunk_fingerprint=told), support.eagle3_arrays(model, spec))
        assert attach_head(model, path).source == str(path)
    [line] = caplog.messages
    assert f"{tmp_path / '2'} was trained on other weights (a-sister)" in line
