"""`inspect` and loading decide alike: a head reported alive loads, a broken head is refused with the same message.

Covers every running family with MTP modules, in safetensors and GGUF: whole, and with each tensor of a module missing
or of another shape; also families that do not run, and unknown config keys."""

import json
import re
import shlex
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import ARCH, write_gguf, written
from support import ALL_FAMILIES, family_of, model_at
from test_converted_families import CONVERTED, GGUF_CHANGES, write_converted
from tiny_models import write_model

from headstart.errors import ModelError
from headstart.formats import open_checkpoint, open_described
from headstart.formats.base import Checkpoint, File, strip_wrapper
from headstart.formats.gguf_names import canonical_names, gguf_name
from headstart.formats.tensor_parts import MTP, part_of
from headstart.models.described import DESCRIBED
from headstart.models.families import known_family
from headstart.models.native_heads import examine
from headstart.models.small import Arrays
from headstart.tools.inspect import run as inspect
from headstart.tools.inspect.run import InspectOptions, runs_here

Config = dict[str, Any]
FAMILIES = [name for name in ALL_FAMILIES if family_of(name).head]
WRAPPERS = ("", "model.", "model.language_model.", "language_model.model.")
LATER_EXPERTS = re.compile(r"experts\.[1-9]")  # equal to the first expert


def assert_same_decision(path: Path, *expected: str) -> dict[str, Any]:
    """Checks that inspect and loading agree on a checkpoint with a valid config and trunk, with a verdict in
    `expected`. Returns the report of the heads."""
    report = inspect.run(InspectOptions(model=str(path)))
    heads: dict[str, Any] = report.data["heads"]
    verdict = heads["verdict"]
    assert report.data["here"]["runs"], report.data["here"]
    assert of_headers(path)["runs"], of_headers(path)
    if verdict in ("partial", "mismatch"):
        with pytest.raises(ModelError) as refused:
            model_at(path, drafter="mtp")
        assert (refused.value.message, refused.value.hint) == (f"{path}: {heads['reason']}", heads["fix"])
        assert not report.ok
    else:
        head = model_at(path).head
        count = sum(module["found"] > 0 for module in heads["modules"])
        layers = (head.spec.block.num_layers if head.spec.block else head.spec.num_modules) if head else 0
        assert layers == (count if verdict == "alive" else 0), heads["reason"]
    assert verdict in expected, heads["reason"]
    return heads


def assert_same_refusal(path: Path, *parts: str) -> str:
    """Checks that inspect and loading refuse a checkpoint with the same message, which contains `parts`. Returns the
    hint."""
    here = inspect.run(InspectOptions(model=str(path))).data["here"]
    with pytest.raises(ModelError) as refused:
        model_at(path)
    assert not here["runs"] and (here["why"], here["fix"]) == (refused.value.message, refused.value.hint)
    assert all(part in here["why"] for part in parts)
    if "tokenizer" not in here["why"]:
        assert (of_headers(path)["why"], of_headers(path)["fix"]) == (here["why"], here["fix"])
    return str(here["fix"])


def of_headers(path: Path) -> dict[str, Any]:
    """Whether the engine runs a checkpoint on the Hub, of which headers alone are read."""
    found = open_described(str(path))
    remote = {name: replace(each, source=File(Path("m"), here=False)) for name, each in found.tensors.items()}
    reader = found.load_tokenizer if found.format == "gguf" else Checkpoint.load_tokenizer  # the default has none
    return runs_here(replace(found, tensors=remote, load_tokenizer=reader))


def with_prefix(arrays: Arrays, wrapper: str) -> Arrays:
    """Tensors with the name prefix of another wrapper."""
    heads = {"language_model.model.": "language_model."}.get(wrapper, "")
    names = {name: strip_wrapper(name) for name in arrays}
    return {(heads if new.startswith("lm_head.") else wrapper) + new: arrays[name] for name, new in names.items()}


def head_tensors(config: Config, arrays: Arrays) -> list[str]:
    """Tensor names of the first module, and the last name of the other modules, which are alike. Scales are left out,
    since a missing scale is 1."""
    layers = int(config["num_hidden_layers"])
    left_out = re.compile(rf"{LATER_EXPERTS.pattern}|\.global_scale$")
    names = [name for name in arrays if part_of(name, layers) == MTP and not left_out.search(name)]
    if (config.get("num_nextn_predict_layers") or 1) > 1:
        first = {re.sub(r"\.\d+\.", ".#.", name): name for name in reversed(names)}
        return [*reversed(first.values()), names[-1]]
    return names


@pytest.mark.parametrize(("family", "wrapper"), [*zip(FAMILIES, cycle(WRAPPERS))])
def test_whole_head_is_alive_and_loads(family: str, wrapper: str, tmp_path: Path) -> None:
    config, arrays = family_of(family).tiny()
    assert_same_decision(write_model(tmp_path, config, with_prefix(arrays, wrapper)), "alive")


@pytest.mark.parametrize("family", FAMILIES)
def test_broken_head_leaves_the_trunk_served(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, arrays = family_of(family).tiny()
    lost = head_tensors(config, arrays)[0]
    folder = write_model(tmp_path, config, {name: array for name, array in arrays.items() if name != lost})
    heads = assert_same_decision(folder, "partial", "stripped")
    caplog.clear()
    model = model_at(folder)
    assert model.head is None and lost in model.broken_head
    assert model.broken_head == f"{heads['reason']}; {heads['fix']}"
    assert caplog.messages == [f"{folder} is served without its MTP head: {model.broken_head}"]
    caplog.clear()
    assert not any(model_at(folder, drafter=each).head for each in ("none", "ngram")) and not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_missing_head_tensors_are_refused_with_the_same_message(family: str, tmp_path: Path) -> None:
    """Each third of a module's tensors in turn; every missing tensor is named."""
    config, arrays = family_of(family).tiny()
    names = head_tensors(config, arrays)
    for first in range(3):
        lost = set(names[first::3])
        folder = write_model(tmp_path / str(first), config, {name: arrays[name] for name in arrays.keys() - lost})
        assert_same_decision(folder, "partial")
        missing = {each for module in examine(open_checkpoint(folder)).modules for each in module.missing}
        # a module without this norm uses the trunk's final norm
        assert missing == {name for name in lost if family != "cohere2_moe" or "shared_head.norm" not in name}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_head_shapes_are_refused_with_the_same_message(family: str, tmp_path: Path) -> None:
    """Each third of a module's tensors in turn."""
    config, arrays = family_of(family).tiny()
    names = head_tensors(config, arrays)
    for first in range(3):
        wide = {name: np.concatenate((arrays[name], arrays[name][..., :1]), axis=-1) for name in names[first::3]}
        folder = write_model(tmp_path / str(first), config, {**arrays, **wide})
        assert_same_decision(folder, "mismatch")
        wrong = [each for module in examine(open_checkpoint(folder)).modules for each in module.wrong_shape]
        expected = {(name, array.shape, arrays[name].shape) for name, array in wide.items()}
        assert {(each.name, each.shape, each.expected) for each in wrong} == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_verdicts_of_stripped_undeclared_and_moved_heads(family: str, tmp_path: Path) -> None:
    config, arrays = family_of(family).tiny()
    layers = config["num_hidden_layers"]
    trunk = {name: array for name, array in arrays.items() if part_of(name, layers) != MTP}
    assert_same_decision(write_model(tmp_path / "gone", config, trunk), "stripped", "none")
    moved = {re.sub(rf"layers\.{layers}\.", f"layers.{layers + 1}.", name): array for name, array in arrays.items()}
    if not family_of(family).names.of_modules and config.get("num_nextn_predict_layers") == 1:
        assert_same_decision(write_model(tmp_path / "moved", config, moved), "mismatch")
    config |= {key: 0 for key in ("num_nextn_predict_layers", *config) if re.match("mtp_num|num_(nextn|mtp)", key)}
    if nested := config.get("mtp_config"):
        config["mtp_config"] = {**nested, "num_nextn_predict_layers": 0}
    assert_same_decision(write_model(tmp_path / "undeclared", config, arrays), "undeclared")


def test_fused_projections_of_a_module_are_read(tmp_path: Path) -> None:
    """q, k and v in one matrix, gate and up in one, under a module's own names."""
    config, arrays = family_of("mimo").tiny()
    at = "model.mtp_layers.0."
    for fused, parts in {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up")}.items():
        room = fused.rpartition(".")[0]
        for end in ("weight", "bias"):
            names = [f"{at}{room}.{part}_proj.{end}" for part in parts]
            if all(name in arrays for name in names):
                arrays[f"{at}{fused}.{end}"] = np.concatenate([arrays.pop(name) for name in names])
    assert_same_decision(write_model(tmp_path, config, arrays), "alive")


def test_unknown_tensor_of_a_head_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, arrays = family_of("mimo").tiny()
    arrays["model.mtp_layers.0.surprise.weight"] = np.ones(8, np.float32)
    assert_same_decision(write_model(tmp_path, config, arrays), "alive")
    assert "mtp.0.block.surprise.weight" in caplog.text


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_unknown_config_key_is_refused_with_the_same_message(family: str, tmp_path: Path) -> None:
    config, arrays = family_of(family).tiny()
    assert_same_refusal(write_model(tmp_path, {**config, "surprise": 7}, arrays), "surprise is 7")


def test_wrong_trunk_tensors_are_refused_with_the_same_message(tmp_path: Path) -> None:
    config, arrays = family_of("llama").tiny()
    name = "model.layers.1.self_attn.o_proj.weight"
    assert_same_refusal(write_model(tmp_path / "shape", config, {**arrays, name: arrays[name][:-1]}), "has shape")
    assert_same_refusal(
        write_model(tmp_path / "more", config, {**arrays, "surprise": np.ones(8, np.float32)}), "surprise"
    )
    del arrays[name]
    assert_same_refusal(write_model(tmp_path / "less", config, arrays), "has no tensor")


@pytest.mark.parametrize("family", sorted(set(ALL_FAMILIES) - set(FAMILIES)))
def test_trunk_without_a_head_runs(family: str, tmp_path: Path) -> None:
    assert_same_decision(write_model(tmp_path, *family_of(family).tiny()), "none")


def test_broken_tokenizer_is_refused_with_the_same_message(tmp_path: Path) -> None:
    path = write_model(tmp_path, *family_of("llama").tiny())
    (path / "tokenizer.json").write_text("{")
    assert_same_refusal(path, "cannot read", "tokenizer.json")
    (path / "tokenizer.json").unlink()
    assert_same_refusal(path, "has no tokenizer.json")


@pytest.mark.parametrize("name", [name for key, each in DESCRIBED.items() for name in (key, *each.aliases)])
def test_unsupported_family_is_refused_with_the_same_message(name: str, tmp_path: Path) -> None:
    config, arrays = family_of("llama").tiny(model_type=name)
    config_only = tmp_path / "config only"
    config_only.mkdir()
    (config_only / "config.json").write_text(json.dumps(config))
    for engine, path in (
        ("vllm", write_model(tmp_path / "model", config, arrays)),
        ("vllm", config_only),
        ("llamacpp", write_gguf_header(tmp_path / "model.gguf", name)),
    ):
        fix = assert_same_refusal(path, f"{name} models need {known_family(name).unsupported}, which is not supported")
        assert fix == f"another engine has it: headstart launch {engine} {shlex.quote(str(path))}"


def write_gguf_header(path: Path, architecture: str) -> Path:
    """A minimal file that names a model: sizes and an embedding."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {"block_count": 2, "embedding_length": 8, "attention.head_count": 2}.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((16, 8), np.float32))
    return written(writer, path)


ALIASES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
PLAIN = [name for name in FAMILIES if ALIASES.get(name, name) in ARCH]
MODULES = [name for name, how in CONVERTED.items() if how.modules]


def gguf_writer(family: str) -> Callable[[Path], Path]:
    config, arrays = family_of(family).tiny(**GGUF_CHANGES.get(family, {}))
    if family in PLAIN:
        return lambda path: write_gguf(path, config, arrays)
    return partial(write_converted, config=config, arrays=arrays, how=CONVERTED[family])


def rewrite_gguf(
    source: Path, target: Path, *, drop: Collection[str] = (), shape: Collection[str] = (), **metadata: Any
) -> Path:
    """A copy of a GGUF file without the tensors `drop`, with wider tensors `shape`, and with other values of metadata
    keys with these endings (None removes the key)."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        value = metadata.get(key.rpartition(".")[2], field.contents())
        if not key.startswith(("GGUF.", "general.architecture")) and value is not None:
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, value, field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        if tensor.name not in drop:
            data = tensor.data
            wide = np.concatenate((data, data[..., :1]), axis=-1) if tensor.name in shape else data
            writer.add_tensor(tensor.name, np.ascontiguousarray(wide), raw_dtype=tensor.tensor_type)
    return written(writer, target)


def modules_of(path: Path) -> list[list[str]]:
    """Tensor names of each block that is an MTP module."""
    names = [tensor.name for tensor in gguf.GGUFReader(path).tensors]
    blocks = dict.fromkeys(name.split(".")[1] for name in names if ".nextn." in name)
    return [[name for name in names if name.startswith(f"blk.{block}.")] for block in blocks]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*PLAIN, *MODULES])
def test_verdicts_of_gguf_heads_with_missing_tensors_or_wrong_shapes(family: str, tmp_path: Path) -> None:
    """Each tensor of the first module, and the last one of the other modules, which are alike."""
    whole = gguf_writer(family)(tmp_path / "m.gguf")
    first, *others = modules_of(whole)
    names = [*first, *(each[-1] for each in others[-1:])]
    wide = rewrite_gguf(whole, tmp_path / "wide.gguf", shape=names)
    assert_same_decision(wide, "mismatch")
    wrong = {each.name for module in examine(open_checkpoint(wide)).modules for each in module.wrong_shape}
    assert len(wrong) >= len(names)
    for name in names:
        heads = assert_same_decision(rewrite_gguf(whole, tmp_path / f"{name}.gguf", drop=[name]), "partial")
        [ours, *_] = [gguf_name(each) for each in canonical_names([name]).values()]  # of a norm with two names
        assert f" {ours}" in heads["reason"]


@pytest.mark.parametrize("family", [*PLAIN, *MODULES])
def test_verdicts_of_whole_undeclared_and_stripped_gguf_heads(family: str, tmp_path: Path) -> None:
    """The trunk runs if the metadata do not declare the head; the hint names the key and the file."""
    whole = gguf_writer(family)(tmp_path / "whole.gguf")
    assert_same_decision(whole, "alive")
    arch = gguf.GGUFReader(whole).fields["general.architecture"].contents()
    for number in (None, 0):
        path = rewrite_gguf(whole, tmp_path / f"{number}.gguf", nextn_predict_layers=number)
        fix = assert_same_decision(path, "undeclared")["fix"]
        assert f"{arch}.nextn_predict_layers" in fix and f"metadata of {path.name}" in fix and "config.json" not in fix
    drop = [name for names in modules_of(whole) for name in names]
    assert_same_decision(rewrite_gguf(whole, tmp_path / "gone.gguf", drop=drop), "stripped")
