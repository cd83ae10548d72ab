"""`export` and `launch` choose the same depth for an engine."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import support

from headstart.heads.kind import head_kind
from headstart.models.small import random_arrays
from headstart.tools.doctor import InstalledGPU
from headstart.tools.export import run as export
from headstart.tools.launch import parallelism
from headstart.tools.launch.prepare import LaunchOptions, prepare


def model_and_head(folder: Path, kind: str) -> tuple[str, Path]:
    """Folders of a tiny Llama and of a random head for it."""
    config, arrays = support.family_of("llama").tiny(num_hidden_layers=5)
    model, sizes = support.write_model(folder / "model", config, arrays), support.family_of("llama").parse(config)
    head = head_kind(kind)
    spec = replace(head.training.spec(5, 4), layer=head.training.layer(sizes.head_layer, sizes.hidden_size))
    if spec.block:
        vocabulary = {"vocab_size": sizes.vocab_size, "draft_vocab_size": sizes.vocab_size}
        spec = replace(spec, block=replace(spec.block, **vocabulary))
    arrays = random_arrays(head.shapes(spec, sizes.hidden_size), 5)
    return str(model), support.write_head(folder / "head", sizes, spec, arrays)


@pytest.mark.parametrize(("kind", "target", "on_cpu", "on_gpu"), [
    ("eagle3", "vllm-eagle3", 1, 3), ("mtp", "vllm-mimo", 1, 3), ("block", "vllm-dspark", 4, 4),
])  # fmt: skip
def test_export_prints_the_depth_that_launch_chooses(
    kind: str, target: str, on_cpu: int, on_gpu: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, head = model_and_head(tmp_path, kind)
    for expected, gpus in ((on_cpu, []), (on_gpu, [InstalledGPU("NVIDIA H200", "140000 MiB", "143771 MiB", "570")])):
        for module in (export, parallelism):
            monkeypatch.setattr(module, "installed_gpus", lambda gpus=gpus: gpus)
        out = tmp_path / f"out {expected}"
        options = export.ExportOptions(model=model, head=head, to=target, out=out, force=True)
        named = re.findall(r'"num_speculative_tokens": (\d+)', export.run(options).data["use"])
        options = {"model": str(out)} if target == "vllm-mimo" else {"model": model, "head": str(out)}
        depth = prepare(LaunchOptions(engine="vllm", **options)).spec.depth
        assert (named, depth) == ([str(expected)], expected)
