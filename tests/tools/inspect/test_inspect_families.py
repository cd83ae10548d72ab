"""`headstart inspect` over a zoo: every family with MTP heads; whole, stripped, in part, undeclared, of wrong shape."""

from pathlib import Path
from typing import Any

import pytest
from zoo import NEXTN, ZOO, Tensors, config_of, family_of, heads, trunk, write

from headstart.models.families import mtp_families
from headstart.tools.inspect import run as inspect
from headstart.tools.inspect.run import InspectOptions


def look(folder: Path, config: dict[str, Any], tensors: Tensors) -> tuple[bool, dict[str, Any]]:
    report = inspect.run(InspectOptions(model=str(write(folder, config, tensors))))
    assert report.lines
    return report.ok, report.data


def test_the_zoo_has_every_family() -> None:
    assert set(ZOO) == set(mtp_families())


@pytest.mark.parametrize("key", ZOO)
def test_names_written_down_by_hand_are_looked_for(key: str) -> None:
    found = heads(ZOO[key])
    assert {name: found.get(name, ("", ()))[1] for name in ZOO[key].names} == ZOO[key].names


@pytest.mark.slow
@pytest.mark.parametrize("key", ZOO)
def test_alive(key: str, tmp_path: Path) -> None:
    animal = ZOO[key]
    ok, data = look(tmp_path, config_of(animal), trunk(animal) | heads(animal))
    assert (ok, data["heads"]["verdict"], data["family"]["key"]) == (True, "alive", key), data["heads"]["reason"]
    assert data["heads"]["extra"] == [] and len(data["heads"]["modules"]) == animal.count
    assert data["parts"]["mtp"]["parameters"] > 0


@pytest.mark.parametrize("key", ZOO)
def test_stripped(key: str, tmp_path: Path) -> None:
    animal = ZOO[key]
    ok, data = look(tmp_path, config_of(animal), trunk(animal))
    promised = animal.key is not None or bool(family_of(animal).layout.default)
    assert (ok, data["heads"]["verdict"]) == ((False, "stripped") if promised else (True, "none"))
    assert "graft" in data["heads"]["fix"]


@pytest.mark.slow
@pytest.mark.parametrize("key", ZOO)
def test_partial(key: str, tmp_path: Path) -> None:
    animal = ZOO[key]
    lost = list(animal.names)[-1]
    tensors = {name: value for name, value in (trunk(animal) | heads(animal)).items() if name != lost}
    ok, data = look(tmp_path, config_of(animal), tensors)
    missing = [name for module in data["heads"]["modules"] for name in module["missing"]]
    assert (ok, data["heads"]["verdict"], len(missing)) == (False, "partial", 1), data["heads"]["reason"]
    assert missing == [lost]


@pytest.mark.slow
@pytest.mark.parametrize("key", ZOO)
def test_undeclared(key: str, tmp_path: Path) -> None:
    animal = ZOO[key]
    ok, data = look(tmp_path, config_of(animal, count=0), trunk(animal) | heads(animal))
    assert (ok, data["heads"]["verdict"]) == (True, "undeclared"), data["heads"]["reason"]
    assert f"to {animal.count} in config.json" in data["heads"]["fix"]
    assert (animal.key or NEXTN) in data["heads"]["fix"]


@pytest.mark.slow
@pytest.mark.parametrize("key", ZOO)
def test_mismatch(key: str, tmp_path: Path) -> None:
    animal = ZOO[key]
    name, shape = next(iter(animal.names.items()))
    tensors = trunk(animal) | heads(animal) | {name: ("BF16", (*shape[:-1], shape[-1] + 1))}
    ok, data = look(tmp_path, config_of(animal), tensors)
    assert (ok, data["heads"]["verdict"]) == (False, "mismatch"), data["heads"]["reason"]
    wrong = [each for module in data["heads"]["modules"] for each in module["wrong_shape"]]
    assert len(wrong) == 1 and wrong[0]["shape"] == (*shape[:-1], shape[-1] + 1)


def is_trailing(key: str) -> bool:
    found = family_of(ZOO[key])
    return found.layout.trailing if found.layout.tensors else not found.family.names.of_modules


@pytest.mark.parametrize("key", sorted(filter(is_trailing, ZOO)))
def test_heads_at_another_layer(key: str, tmp_path: Path) -> None:
    animal = ZOO[key]
    config = config_of(animal)
    text = config.get(animal.nested, config)
    text["num_hidden_layers"] += 1  # as after a wrong edit: engines look one layer too far
    _, data = look(tmp_path, config, trunk(animal) | heads(animal))
    assert data["heads"]["verdict"] == "mismatch" and "layer 4" in data["heads"]["reason"]
    assert data["parts"]["mtp"]["parameters"] > 0
