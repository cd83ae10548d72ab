"""Random configurations of every family compared with transformers, and the keys that they cover."""

import dataclasses
from random import Random

import pytest
from support import family_of

from tests.fuzz import drawn
from tests.fuzz.configs import run_family
from tests.fuzz.converted import NOT_THERE
from tests.fuzz.drawn import KINDS


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_random_configurations_match_transformers(family: str, fuzz: int) -> None:
    assert run_family(family, 2, range(4 * fuzz)) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(KINDS.keys() - {*NOT_THERE}))
def test_random_gguf_files_match_transformers(family: str, fuzz: int) -> None:
    assert run_family(family, 2, range(fuzz), gguf=True) >= 1


@pytest.mark.parametrize("family", KINDS)
def test_random_configurations_cover_all_keys_of_transformers(family: str) -> None:
    keys = {each.name for each in dataclasses.fields(drawn.config_class(family))}
    assert keys <= {*drawn.SIZES, *drawn.VALUES, "rope_parameters"}
    assert keys <= {*drawn.draw(family, Random(0)), "rope_parameters"}


@pytest.mark.parametrize("family", KINDS)
def test_defaults_match_transformers(family: str) -> None:
    """Values of keys missing in a config."""
    config = drawn.config_class(family)(use_sliding_window=True).to_dict()
    ropes = config["rope_parameters"]
    if "sliding_attention" in ropes:
        ropes = ropes["full_attention"] | {"rope_local_base_freq": ropes["sliding_attention"]["rope_theta"]}
    implied = {"mrope_interleaved"}  # Qwen3-VL's classes interleave without a key
    for key, value in family_of(family).defaults.items():
        assert key in implied or {**config, **ropes}[key] == value, key
