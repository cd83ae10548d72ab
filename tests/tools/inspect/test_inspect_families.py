"""Verdicts of `headstart inspect` for every family with MTP heads: alive, stripped, partial, undeclared, mismatch."""

from pathlib import Path
from typing import Any

import pytest
from zoo import NEXTN, ZOO, Tensors, config_of, family_of, heads, trunk, write

from headstart.models.families import mtp_families
from headstart.tools.inspect import run as inspect
from headstart.tools.inspect.run import InspectOptions


def inspect_model(folder: Path, config: dict[str, Any], tensors: Tensors) -> tuple[bool, dict[str, Any]]:
    report = inspect.run(InspectOptions(model=str(write(folder, config, tensors))))
    assert report.lines
    return report.ok, report.data


def test_zoo_has_every_mtp_family() -> None:
    assert set(ZOO) == set(mtp_families())


@pytest.mark.parametrize("key", ZOO)
def test_handwritten_names_are_expected_tensors(key: str) -> None:
    found = heads(ZOO[key])
    assert {name: found.get(name, ("", ()))[1] for name in ZOO[key].names} == ZOO[key].names


@pytest.mark.slow
@pytest.mark.parametrize("key", ZOO)
def test_complete_head_is_alive(key: str, tmp_path: Path) -> None:
    entry = ZOO[key]
    ok, data = inspect_model(tmp_path, config_of(entry), trunk(entry) | heads(entry))
    assert (ok, data["heads"]["verdict"], data["family"]["key"]) == (True, "alive", key), data["heads"]["reason"]
    assert data["heads"]["extra"] == [] and len(data["heads"]["modules"]) == entry.count
    assert data["parts"]["mtp"]["parameters"] > 0


@pytest.mark.parametrize("key", ZOO)
def test_model_without_its_head_is_stripped(key: str, tmp_path: Path) -> None:
    entry = ZOO[key]
    ok, data = inspect_model(tmp_path, config_of(entry), trunk(entry))
    promised = entry.key is not None or bool(family_of(entry).layout.default)
    assert (ok, data["heads"]["verdict"]) == ((False, "stripped") if promised else (True, "none"))
    assert "graft" in data["heads"]["fix"]


@pytest.mark.slow
@pytest.mark.parametrize("key", ZOO)
def test_head_with_a_missing_tensor_is_partial(key: str, tmp_path: Path) -> None:
    entry = ZOO[key]
    lost = list(entry.names)[-1]
    tensors = {name: value for name, value in (trunk(entry) | heads(entry)).items() if name != lost}
    ok, data = inspect_model(tmp_path, config_of(entry), tensors)
    missing = [name for module in data["heads"]["modules"] for name in module["missing"]]
    assert (ok, data["heads"]["verdict"], len(missing)) == (False, "partial", 1), data["heads"]["reason"]
    assert missing == [lost]


@pytest.mark.slow
@pytest.mark.parametrize("key", ZOO)
def test_head_without_a_module_count_is_undeclared(key: str, tmp_path: Path) -> None:
    entry = ZOO[key]
    ok, data = inspect_model(tmp_path, config_of(entry, count=0), trunk(entry) | heads(entry))
    assert (ok, data["heads"]["verdict"]) == (True, "undeclared"), data["heads"]["reason"]
    assert f"to {entry.count} in config.json" in data["heads"]["fix"]
    assert (entry.key or NEXTN) in data["heads"]["fix"]


@pytest.mark.slow
@pytest.mark.parametrize("key", ZOO)
def test_head_with_a_wrong_shape_is_a_mismatch(key: str, tmp_path: Path) -> None:
    entry = ZOO[key]
    name, shape = next(iter(entry.names.items()))
    tensors = trunk(entry) | heads(entry) | {name: ("BF16", (*shape[:-1], shape[-1] + 1))}
    ok, data = inspect_model(tmp_path, config_of(entry), tensors)
    assert (ok, data["heads"]["verdict"]) == (False, "mismatch"), data["heads"]["reason"]
    wrong = [each for module in data["heads"]["modules"] for each in module["wrong_shape"]]
    assert len(wrong) == 1 and wrong[0]["shape"] == (*shape[:-1], shape[-1] + 1)


def is_trailing(key: str) -> bool:
    found = family_of(ZOO[key])
    return found.layout.trailing if found.layout.tensors else not found.family.names.of_modules


@pytest.mark.parametrize("key", sorted(filter(is_trailing, ZOO)))
def test_trailing_head_at_a_wrong_layer_is_a_mismatch(key: str, tmp_path: Path) -> None:
    entry = ZOO[key]
    config = config_of(entry)
    text = config.get(entry.nested, config)
    text["num_hidden_layers"] += 1  # the head is then one layer too early
    _, data = inspect_model(tmp_path, config, trunk(entry) | heads(entry))
    assert data["heads"]["verdict"] == "mismatch" and "layer 4" in data["heads"]["reason"]
    assert data["parts"]["mtp"]["parameters"] > 0
