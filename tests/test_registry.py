from pathlib import Path

import pytest

from headstart import registry
from headstart.errors import ModelError, UsageError


def test_plug_ins_are_found_by_file_name_without_helpers() -> None:
    assert {"head", "ngram"} <= set(registry.available("drafters"))
    assert all(not name.startswith("_") for kind in registry.KINDS for name in registry.available(kind))
    assert not {"base", "head"} & set(registry.available("formats"))
    assert registry.available("launchers") == ["llamacpp", "sglang", "trtllm", "vllm", "xllm"]


def test_unknown_name_has_a_hint_with_available_names() -> None:
    with pytest.raises(UsageError, match="unknown drafter 'ngarm'") as caught:
        registry.find("drafters", "ngarm")
    assert caught.value.hint.startswith("did you mean ngram? available: ")
    with pytest.raises(ModelError, match="unknown model family"):
        registry.find("models", "no-such-family")


def test_search_path_adds_plug_ins_temporarily(tmp_path: Path) -> None:
    (tmp_path / "always_seven.py").write_text("DRAFTER = 7\n")
    (tmp_path / "_helper.py").write_text("")
    with registry.search_path("drafters", tmp_path):
        assert "always_seven" in registry.available("drafters")
        assert registry.find("drafters", "always-seven").DRAFTER == 7
        assert registry.find("drafters", "always-seven") is registry.find("drafters", "always_seven")
    assert "always_seven" not in registry.available("drafters")


def test_plug_in_without_its_constant_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    with registry.search_path("models", tmp_path), pytest.raises(ModelError, match="does not define FAMILY"):
        registry.find("models", "empty")
