"""Drafter and model family of docs/extend as plug-in files; an example for every kind."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from seams import TUTORIALS, example, plugged_in
from support import SMALL, family_of, tiny_model
from tiny_models import write_model, write_tiny

from headstart import registry
from headstart.api import LLM
from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.engine.load import Model, load_model
from headstart.errors import HeadstartError, UsageError
from headstart.models.small import Arrays

PROMPTS = ["the thing", "an inner ring, then another", "x x x x"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with plugged_in(tmp_path_factory.mktemp("plug_ins"), "drafters", "models"):
        yield


@pytest.fixture(scope="module")
def acme(folders: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("acme", tmp_path_factory.mktemp("acme"))


def texts(model: Model, temperature: float, **settings: Any) -> tuple[list[list[int]], LLM]:
    llm = LLM(model, EngineConfig(**{**SMALL, "dtype": "float64", **settings}))
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=30, repetition_penalty=0.7)
    return [done.token_ids for done in llm.generate(PROMPTS, params)], llm


def test_every_kind_has_an_example() -> None:
    assert TUTORIALS.keys() == registry.KINDS.keys()


@pytest.mark.parametrize("kind", TUTORIALS)
def test_plug_ins_are_found_by_their_file_names(kind: registry.KindName, tmp_path: Path) -> None:
    """A plug-in is available only while its folder is on the search path."""
    name = Path(example(kind)[0]).stem
    with plugged_in(tmp_path, kind):
        assert name in registry.available(kind)
        assert registry.find(kind, name)
    assert name not in registry.available(kind)
    with pytest.raises(HeadstartError, match=f"unknown {registry.KINDS[kind].word} '{name}'"):
        registry.find(kind, name)


def test_drafter_flag_accepts_the_plug_in(tmp_path: Path) -> None:
    with plugged_in(tmp_path, "drafters"):
        assert EngineConfig(drafter="repeat_last").drafter == "repeat_last"
    with pytest.raises(UsageError, match="--drafter is 'repeat_last', which is unknown"):
        EngineConfig(drafter="repeat_last")


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", ["repeat_last", "mtp", "ngram", "auto"])
def test_new_family_is_exact_with_every_drafter(acme: Path, drafter: str, temperature: float) -> None:
    model = load_model(str(acme), EngineConfig(dtype="float64", threads=1))
    expected, _ = texts(model, temperature, drafter="none", max_num_seqs=1)
    found, llm = texts(model, temperature, drafter=drafter, depth=4)
    assert found == expected
    assert llm.method == {"auto": "mtp"}.get(drafter, drafter)
    if drafter != "ngram":
        assert llm.engine.stats.drafted > 20


@pytest.mark.slow
def test_new_drafter_is_exact_with_other_families(folders: None) -> None:
    """The families differ in their caches: keys and values, latents, recurrent states, compressed blocks."""
    for family in ("llama", "deepseek_v3", "qwen3_next", "deepseek_v4"):
        model = tiny_model(family)
        assert texts(model, 0.9, drafter="repeat_last")[0] == texts(model, 0.9, drafter="none")[0]


def test_new_drafter_is_accepted_in_repetitive_text(acme: Path) -> None:
    model = load_model(str(acme), EngineConfig(dtype="float64", threads=1))
    llm = LLM(model, EngineConfig(**{**SMALL, "dtype": "float64", "drafter": "repeat_last", "depth": 3}))
    done = llm.generate(["x"], SamplingParams(max_tokens=40, logit_bias={88: 100.0}))[0]
    assert done.token_ids == [88] * 40
    assert done.speculation.acceptance_rate == 1
    assert done.speculation.passes == 11  # one for the prompt, then four tokens each except for the last


def test_new_family_equals_qwen3_with_renamed_weights(acme: Path) -> None:
    """The new trunk is Llama with q and k norms, as Qwen3: renamed weights give the same text."""
    config, arrays = family_of("acme").tiny()
    renamed: Arrays = {
        name.replace("transformer.", "model."): array for name, array in arrays.items() if not name.startswith("draft.")
    }
    twin = write_model(acme.parent / "twin", {**config, "model_type": "qwen3", "num_draft_layers": None}, renamed)
    models = [load_model(str(path), EngineConfig(dtype="float64", threads=1)) for path in (acme, twin)]
    assert models[0].head and not models[1].head
    assert texts(models[0], 0.0, drafter="none")[0] == texts(models[1], 0.0, drafter="none")[0]


@pytest.mark.slow
def test_verify_accepts_plug_ins(acme: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    engine = ["--dtype", "float64", "--threads", "1", "--kv-blocks", "40"]
    levels = ["--drafters", "repeat_last,mtp", "--depths", "2,4", "--temperatures", "0,1", "--max-tokens", "12"]
    assert main(["verify", str(acme), "--prompts", str(prompts), *engine, *levels]) == 0
    assert "differences 0" in capsys.readouterr().out


def test_drafting_more_than_requested_is_an_assertion_error(folders: None, acme: Path, tmp_path: Path) -> None:
    (tmp_path / "eager.py").write_text(example("drafters")[1].replace("] * request.depth", "] * (request.depth + 1)"))
    with registry.search_path("drafters", tmp_path):
        llm = LLM(str(acme), EngineConfig(**SMALL, drafter="eager", depth=3))
        with pytest.raises(AssertionError, match="drafts 4 tokens, but was asked for 3"):
            llm.generate(["x"], SamplingParams(max_tokens=9, ignore_eos=True))
