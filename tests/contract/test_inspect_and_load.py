"""`inspect` and loading are one decision: what is alive loads with its head, what is broken is refused in the same
words. Every family with MTP modules that runs, in safetensors and in GGUF: whole, and with each tensor of a module
gone or of another shape. Families that do not run, and config keys that no family knows, are refused in the same words
too."""

import json
import re
import shlex
from collections.abc import Callable, Collection
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import ARCH, write_gguf, written
from support import ALL_FAMILIES, family_of, model_at
from test_converted_families import CONVERTED, SAID, write_converted
from tiny_models import write_model

from headstart.errors import ModelError
from headstart.formats import open_checkpoint
from headstart.formats.base import strip_wrapper
from headstart.formats.gguf_names import canonical_names, gguf_name
from headstart.formats.tensor_parts import MTP, part_of
from headstart.models.described import DESCRIBED
from headstart.models.families import known_family
from headstart.models.native_heads import examine
from headstart.models.small import Arrays
from headstart.tools.inspect import run as inspect
from headstart.tools.inspect.run import InspectOptions

Config = dict[str, Any]
FAMILIES = [name for name in ALL_FAMILIES if family_of(name).head]
WRAPPERS = ("", "model.", "model.language_model.", "language_model.model.")
LATER_EXPERTS = re.compile(r"experts\.[1-9]")  # are like the first


def same_decision(path: Path, *expected: str) -> dict[str, Any]:
    """Asserts that inspect and loading agree on a checkpoint whose config and trunk are sound, and that the verdict is
    one of `expected`. Returns the report of the heads."""
    report = inspect.run(InspectOptions(model=str(path)))
    heads: dict[str, Any] = report.data["heads"]
    verdict = heads["verdict"]
    assert report.data["here"]["runs"], report.data["here"]
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


def same_refusal(path: Path, *parts: str) -> str:
    """Asserts that inspect and loading refuse to run a checkpoint in the same words, among them `parts`. Returns the
    hint."""
    here = inspect.run(InspectOptions(model=str(path))).data["here"]
    with pytest.raises(ModelError) as refused:
        model_at(path)
    assert not here["runs"] and (here["why"], here["fix"]) == (refused.value.message, refused.value.hint)
    assert all(part in here["why"] for part in parts)
    return str(here["fix"])


def wrapped(arrays: Arrays, wrapper: str) -> Arrays:
    """Names under another wrapper."""
    heads = {"language_model.model.": "language_model."}.get(wrapper, "")
    names = {name: strip_wrapper(name) for name in arrays}
    return {(heads if new.startswith("lm_head.") else wrapper) + new: arrays[name] for name, new in names.items()}


def head_tensors(config: Config, arrays: Arrays) -> list[str]:
    """All of the first module, and the last one of the others, which are alike. A scale is 1 where it is missing."""
    layers = int(config["num_hidden_layers"])
    left_out = re.compile(rf"{LATER_EXPERTS.pattern}|\.global_scale$")
    names = [name for name in arrays if part_of(name, layers) == MTP and not left_out.search(name)]
    if (config.get("num_nextn_predict_layers") or 1) > 1:
        first = {re.sub(r"\.\d+\.", ".#.", name): name for name in reversed(names)}
        return [*reversed(first.values()), names[-1]]
    return names


@pytest.mark.parametrize(("family", "wrapper"), [*zip(FAMILIES, cycle(WRAPPERS))])
def test_a_whole_head_is_alive_and_drafts(family: str, wrapper: str, tmp_path: Path) -> None:
    config, arrays = family_of(family).tiny()
    same_decision(write_model(tmp_path, config, wrapped(arrays, wrapper)), "alive")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_broken_head_leaves_the_trunk_served(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, arrays = family_of(family).tiny()
    lost = head_tensors(config, arrays)[0]
    folder = write_model(tmp_path, config, {name: array for name, array in arrays.items() if name != lost})
    heads = same_decision(folder, "partial", "stripped")
    caplog.clear()
    model = model_at(folder)
    assert model.head is None and lost in model.broken_head
    assert model.broken_head == f"{heads['reason']}; {heads['fix']}"
    assert caplog.messages == [f"{folder} is served without its MTP head: {model.broken_head}"]
    caplog.clear()
    assert not any(model_at(folder, drafter=each).head for each in ("none", "ngram")) and not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_lacks_one_tensor_is_refused_in_the_same_words(family: str, tmp_path: Path) -> None:
    """Every third tensor of a module, then every other third: each of those that are missing is named."""
    config, arrays = family_of(family).tiny()
    names = head_tensors(config, arrays)
    for first in range(3):
        lost = set(names[first::3])
        folder = write_model(tmp_path / str(first), config, {name: arrays[name] for name in arrays.keys() - lost})
        same_decision(folder, "partial")
        missing = {each for module in examine(open_checkpoint(folder)).modules for each in module.missing}
        # a module without this norm takes the trunk's last one
        assert missing == {name for name in lost if family != "cohere2_moe" or "shared_head.norm" not in name}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_of_another_shape_is_refused_in_the_same_words(family: str, tmp_path: Path) -> None:
    """Every third tensor of a module, then every other third."""
    config, arrays = family_of(family).tiny()
    names = head_tensors(config, arrays)
    for first in range(3):
        wide = {name: np.concatenate((arrays[name], arrays[name][..., :1]), axis=-1) for name in names[first::3]}
        folder = write_model(tmp_path / str(first), config, {**arrays, **wide})
        same_decision(folder, "mismatch")
        wrong = [each for module in examine(open_checkpoint(folder)).modules for each in module.wrong_shape]
        expected = {(name, array.shape, arrays[name].shape) for name, array in wide.items()}
        assert {(each.name, each.shape, each.expected) for each in wrong} == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_is_gone_not_declared_or_at_another_layer(family: str, tmp_path: Path) -> None:
    config, arrays = family_of(family).tiny()
    layers = config["num_hidden_layers"]
    trunk = {name: array for name, array in arrays.items() if part_of(name, layers) != MTP}
    same_decision(write_model(tmp_path / "gone", config, trunk), "stripped", "none")
    moved = {re.sub(rf"layers\.{layers}\.", f"layers.{layers + 1}.", name): array for name, array in arrays.items()}
    if not family_of(family).names.of_modules and config.get("num_nextn_predict_layers") == 1:
        same_decision(write_model(tmp_path / "moved", config, moved), "mismatch")
    config |= {key: 0 for key in ("num_nextn_predict_layers", *config) if re.match("mtp_num|num_(nextn|mtp)", key)}
    if nested := config.get("mtp_config"):
        config["mtp_config"] = {**nested, "num_nextn_predict_layers": 0}
    same_decision(write_model(tmp_path / "undeclared", config, arrays), "undeclared")


def test_fused_projections_of_a_module_load(tmp_path: Path) -> None:
    """q, k and v in one matrix, gate and up in one, under a module's own names."""
    config, arrays = family_of("mimo").tiny()
    at = "model.mtp_layers.0."
    for fused, parts in {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up")}.items():
        room = fused.rpartition(".")[0]
        for end in ("weight", "bias"):
            names = [f"{at}{room}.{part}_proj.{end}" for part in parts]
            if all(name in arrays for name in names):
                arrays[f"{at}{fused}.{end}"] = np.concatenate([arrays.pop(name) for name in names])
    same_decision(write_model(tmp_path, config, arrays), "alive")


def test_a_tensor_that_the_head_does_not_have_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, arrays = family_of("mimo").tiny()
    arrays["model.mtp_layers.0.surprise.weight"] = np.ones(8, np.float32)
    same_decision(write_model(tmp_path, config, arrays), "alive")
    assert "mtp.0.block.surprise.weight" in caplog.text


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_an_unknown_config_key_is_refused_in_the_same_words(family: str, tmp_path: Path) -> None:
    config, arrays = family_of(family).tiny()
    same_refusal(write_model(tmp_path, {**config, "surprise": 7}, arrays), "surprise is 7")


def test_a_trunk_of_other_tensors_is_refused_in_the_same_words(tmp_path: Path) -> None:
    config, arrays = family_of("llama").tiny()
    name = "model.layers.1.self_attn.o_proj.weight"
    same_refusal(write_model(tmp_path / "shape", config, {**arrays, name: arrays[name][:-1]}), "has shape")
    same_refusal(write_model(tmp_path / "more", config, {**arrays, "surprise": np.ones(8, np.float32)}), "surprise")
    del arrays[name]
    same_refusal(write_model(tmp_path / "less", config, arrays), "has no tensor")


@pytest.mark.parametrize("family", sorted(set(ALL_FAMILIES) - set(FAMILIES)))
def test_a_whole_trunk_without_heads_runs(family: str, tmp_path: Path) -> None:
    same_decision(write_model(tmp_path, *family_of(family).tiny()), "none")


def test_a_missing_or_broken_tokenizer_is_refused_in_the_same_words(tmp_path: Path) -> None:
    path = write_model(tmp_path, *family_of("llama").tiny())
    (path / "tokenizer.json").write_text("{")
    same_refusal(path, "cannot read", "tokenizer.json")
    (path / "tokenizer.json").unlink()
    same_refusal(path, "has no tokenizer.json")


@pytest.mark.parametrize("name", [name for key, each in DESCRIBED.items() for name in (key, *each.aliases)])
def test_a_family_that_does_not_run_is_refused_in_the_same_words(name: str, tmp_path: Path) -> None:
    config, arrays = family_of("llama").tiny(model_type=name)
    config_only = tmp_path / "config only"
    config_only.mkdir()
    (config_only / "config.json").write_text(json.dumps(config))
    for engine, path in (
        ("vllm", write_model(tmp_path / "model", config, arrays)),
        ("vllm", config_only),
        ("llamacpp", write_gguf_header(tmp_path / "model.gguf", name)),
    ):
        fix = same_refusal(path, f"{name} models need {known_family(name).unsupported}, which is not supported")
        assert fix == f"another engine has it: headstart launch {engine} {shlex.quote(str(path))}"


def write_gguf_header(path: Path, architecture: str) -> Path:
    """The least that names a model: sizes and an embedding."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {"block_count": 2, "embedding_length": 8, "attention.head_count": 2}.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((16, 8), np.float32))
    return written(writer, path)


ALIASES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
PLAIN = [name for name in FAMILIES if ALIASES.get(name, name) in ARCH]
MODULES = [name for name, how in CONVERTED.items() if how.modules]


def gguf_writer(family: str) -> Callable[[Path], Path]:
    config, arrays = family_of(family).tiny(**SAID.get(family, {}))
    if family in PLAIN:
        return lambda path: write_gguf(path, config, arrays)
    return partial(write_converted, config=config, arrays=arrays, how=CONVERTED[family])


def rewritten(
    source: Path, target: Path, *, drop: Collection[str] = (), shape: Collection[str] = (), **told: Any
) -> Path:
    """A copy of a GGUF file without tensors, with some of another shape, or with other values of keys that end so
    (None: without the key)."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        value = told.get(key.rpartition(".")[2], field.contents())
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
    """Names of the tensors of each block that is an MTP module."""
    names = [tensor.name for tensor in gguf.GGUFReader(path).tensors]
    blocks = dict.fromkeys(name.split(".")[1] for name in names if ".nextn." in name)
    return [[name for name in names if name.startswith(f"blk.{block}.")] for block in blocks]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*PLAIN, *MODULES])
def test_a_gguf_head_that_lacks_one_tensor_or_has_another_shape(family: str, tmp_path: Path) -> None:
    """Each tensor of the first module, and the last one of the others, which are alike."""
    whole = gguf_writer(family)(tmp_path / "m.gguf")
    first, *others = modules_of(whole)
    names = [*first, *(each[-1] for each in others[-1:])]
    wide = rewritten(whole, tmp_path / "wide.gguf", shape=names)
    same_decision(wide, "mismatch")
    wrong = {each.name for module in examine(open_checkpoint(wide)).modules for each in module.wrong_shape}
    assert len(wrong) >= len(names)
    for name in names:
        heads = same_decision(rewritten(whole, tmp_path / f"{name}.gguf", drop=[name]), "partial")
        [ours, *_] = [gguf_name(each) for each in canonical_names([name]).values()]  # of a norm with two names
        assert f" {ours}" in heads["reason"]


@pytest.mark.parametrize("family", [*PLAIN, *MODULES])
def test_a_gguf_head_that_is_whole_not_declared_or_gone(family: str, tmp_path: Path) -> None:
    """Where the metadata do not declare it the trunk runs; advice names the key, and the file."""
    whole = gguf_writer(family)(tmp_path / "whole.gguf")
    same_decision(whole, "alive")
    arch = gguf.GGUFReader(whole).fields["general.architecture"].contents()
    for number in (None, 0):
        path = rewritten(whole, tmp_path / f"{number}.gguf", nextn_predict_layers=number)
        fix = same_decision(path, "undeclared")["fix"]
        assert f"{arch}.nextn_predict_layers" in fix and f"metadata of {path.name}" in fix and "config.json" not in fix
    drop = [name for names in modules_of(whole) for name in names]
    same_decision(rewritten(whole, tmp_path / "gone.gguf", drop=drop), "stripped")
