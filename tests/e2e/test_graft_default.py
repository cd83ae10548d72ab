"""The default model exported with its head, stripped and grafted: equal text, drafts and tensors."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headstart import hub
from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.formats.safetensors import open_checkpoint
from headstart.tools.export import run as export
from headstart.tools.graft import run as graft
from headstart.tools.prompts import builtin_prompts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(hub.cached_trunk() is None, reason="the default model is not in the cache: headstart pull"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Whole, stripped and grafted model. MiMo's head reads hidden states before the final norm, so the head is declared
    pre_norm: acceptance is lower, but equal before and after."""
    folder = tmp_path_factory.mktemp("graft")
    shutil.copytree(hub.HEADS / hub.DEFAULT_MODEL, folder / "head")
    config = json.loads((folder / "head" / "config.json").read_text())
    (folder / "head" / "config.json").write_text(json.dumps({**config, "tap": "pre_norm"}))
    whole, bare, again = (folder / name for name in ("whole", "bare", "again"))
    export.run(export.ExportOptions(head=folder / "head", to="vllm-mimo", out=whole))
    graft.run(graft.GraftOptions(model=str(whole), strip=True, out=bare))
    graft.run(graft.GraftOptions(model=str(bare), base=str(whole), out=again))
    return whole, bare, again


def answers(model: Path, **settings: Any) -> list[tuple[list[int], Any]]:
    llm = LLM(str(model), EngineConfig(**{"depth": 3, **settings}))
    prompts = [prompt for _, prompt in builtin_prompts()][:2]
    return [(each.token_ids, each.speculation) for each in llm.generate(prompts, SamplingParams(max_tokens=24))]


def test_grafted_model_has_equal_text_and_drafts(folders: tuple[Path, Path, Path]) -> None:
    whole, bare, again = folders
    expected = answers(whole, drafter="mtp")
    assert sum(speculation.drafts for _, speculation in expected) > 0
    assert answers(again, drafter="mtp") == expected
    assert [text for text, _ in answers(bare, drafter="none")] == [text for text, _ in expected]


def test_grafted_model_has_equal_tensors(folders: tuple[Path, Path, Path]) -> None:
    whole, _, again = folders
    expected, found = (open_checkpoint(folder).tensors for folder in (whole, again))
    assert found.keys() == expected.keys()
    assert all((found[name].data == tensor.data).all() for name, tensor in expected.items())
    assert json.loads((again / "config.json").read_text()) == json.loads((whole / "config.json").read_text())
