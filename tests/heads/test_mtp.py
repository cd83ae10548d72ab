"""MTP heads in headstart's own layout."""

from dataclasses import replace
from pathlib import Path

from support import PLAIN_SPEC, mtp_arrays, tiny_model, write_head

from headstart.engine.load import fit_head
from headstart.heads.files import read_head


def test_own_lm_head_is_read_with_the_right_shape(tmp_path: Path) -> None:
    """Regression: rows and columns of an own LM head were swapped."""
    model = tiny_model("llama")
    config = model.config
    spec = replace(PLAIN_SPEC, layer=config.head_layer, own_lm_head=config.vocab_size)
    path = write_head(tmp_path / "head", config, spec, mtp_arrays(model, spec, agreeing=False))
    head = fit_head(model, read_head(path), path)
    assert [tuple(each.weight.shape) for each in head.lm_heads] == [(config.vocab_size, config.hidden_size)]
