"""Random small models, saved by transformers and loaded by headstart: logits are equal, or the config is refused by
name.

Configurations of each family are drawn over all keys of transformers' config class (`drawn`), in the spellings of
released files (`spelled`). Any result but equal logits or a HeadstartError is a failure."""

import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.config import EngineConfig
from headstart.core import Request, SamplingParams, Sequence, Span
from headstart.engine.build import build_engine
from headstart.engine.load import load_model
from headstart.errors import HeadstartError
from tests.fuzz.converted import convert, without_unsupported_keys
from tests.fuzz.drawn import LENGTH, Config, config_class, draw
from tests.fuzz.spelled import respelled, wrapped

Logits = NDArray[np.float32]
TOLERANCE = 3e-4
"""Of logits, as a share of the largest one (at least 1)."""
BACKENDS: dict[str, dict[str, Any]] = {"reference": {}, "native": {"kv_cache_dtype": "float32", "portable_bits": True}}
"""Paths that round rows to bfloat16 are left to tests/kernels."""
ENGINE: dict[str, Any] = {"threads": 1, "block_size": 16, "kv_blocks": 40, "max_model_len": 64, "dtype": "float32"}
SPLITS = ((LENGTH,), (7, 1, 1, LENGTH - 9))
"""Rows of each pass."""


@dataclass(frozen=True)
class Outcome:
    """Result of one configuration. `kind`: compared, refused or failed."""

    kind: str
    detail: str = ""


# transformers.


def random_model(config: Any, seed: int) -> Any:
    """A model with logits of order one to ten: matrices ~ N(0, 1 / in), other weights near their initial values."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if value.ndim >= 2:
                scale = 0.5 if "conv" in name else max(value.shape[-1], 1) ** -0.5
                value.copy_(torch.randn_like(value, dtype=torch.float32) * scale)
            elif "inv_freq" not in name and value.is_floating_point():
                value.add_(torch.randn_like(value) * 0.2)
    return model.eval()


def save(model: Any, folder: Path) -> Config:
    """Saves the model by transformers, with the tiny tokenizer; returns the config as written."""
    from tests.tiny_models import tiny_tokenizer

    model.save_pretrained(folder)
    tiny_tokenizer(model.config.vocab_size).save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text("{}")
    written: Config = json.loads((folder / "config.json").read_text())
    return written


def expected_logits(folder: Path, tokens: list[int]) -> Logits:
    """Logits [T, V] of transformers, read from the same files."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config.return_dict, config.output_router_logits = True, False
    plainly = {"attn_implementation": "eager", "experts_implementation": "eager", "config": config}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **plainly).eval()
    with torch.inference_mode():
        logits: Logits = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    return logits


# headstart.


def _sequence(engine: Any, tokens: list[int]) -> Sequence:
    request = Request(
        request_id="r", prompt_ids=tuple(tokens[:1]), params=SamplingParams(), seed=0, stop_ids=frozenset(),
        banned_until_min=frozenset(), depth=None, constraint=None,
    )  # fmt: skip
    sequence = Sequence(request, 0, list(tokens), 0)
    assert engine.memory.reserve(sequence, len(tokens) + 8)
    return sequence


def found_logits(path: Path, tokens: list[int], backend: str, **more: Any) -> Iterator[Logits]:
    """Logits [T, V] for each of SPLITS, the last one batched with another sequence. `more`: engine settings."""
    config = EngineConfig(backend=backend, drafter="none", **{**ENGINE, **BACKENDS[backend], **more})
    engine = build_engine(load_model(str(path), config), config)
    for is_batched, lengths in enumerate(SPLITS):
        sequence, other, start, pieces = _sequence(engine, tokens), _sequence(engine, tokens[::-1]), 0, []
        for length in lengths:
            spans = [Span(sequence, start, length, length)]
            if is_batched:
                spans.insert(0, Span(other, start, length, 1))
            pieces.append(np.array(engine.runner.forward(spans).logits, np.float32)[-length:])
            start += length
        engine.memory.release(sequence)
        engine.memory.release(other)
        yield np.concatenate(pieces)


def compare(path: Path, oracle: Callable[[], Logits], tokens: list[int], hostile: str = "") -> Outcome:
    """Compares every backend's logits with the expected logits; a config with a `hostile` key must be refused."""
    for backend in BACKENDS:
        try:
            found = list(found_logits(path, tokens, backend))
        except HeadstartError as error:
            return Outcome("refused", error.message)
        if hostile:
            return Outcome("failed", f"{hostile} is ignored in silence")
        expected = oracle()
        allowed = TOLERANCE * max(1.0, float(np.abs(expected).max()))
        for logits in found:
            worst = float(np.abs(logits - expected).max())
            if not worst <= allowed and not _within_noise(path, logits, expected, tokens, allowed):
                return Outcome("failed", f"{backend}: logits differ by {worst:.2g}, allowed {allowed:.2g}")
        if backend == "native" and not np.array_equal(*found):
            return Outcome("failed", "native: the bits depend on company")
    return Outcome("compared")


def _within_noise(path: Path, found: Logits, expected: Logits, tokens: list[int], allowed: float) -> bool:
    """Whether transformers is as far from the float64 result as headstart, as for models that amplify rounding
    errors."""
    exact = next(found_logits(path, tokens, "reference", dtype="float64"))
    headstart_config, theirs = (float(np.abs(each - exact).max()) for each in (found, expected))
    return theirs <= 10 * allowed and headstart_config <= allowed + 4 * theirs


# Single configurations and whole families.


def headstart_config(family: str, config: Config, rng: Random) -> Config:
    """The config.json for headstart, where it differs from that of transformers."""
    if family == "mimo":
        without = {"num_nextn_predict_layers": 0}
        return config | {"model_type": "mimo", "attention_bias": True} | rng.choice(({}, without))
    if family.startswith("qwen3_5") and rng.random() < 0.3:
        return wrapped(family, config)
    return config


def try_checkpoint(family: str, seed: int, number: int, folder: Path) -> Outcome:
    """Tries configuration `number` as safetensors."""
    rng = Random(f"{seed} {family} {number}")
    arguments = draw(family, rng)
    model = random_model(config_class(family)(**arguments), number)
    config, hostile = respelled(family, save(model, folder), rng)
    (folder / "config.json").write_text(json.dumps(config))
    here = folder / "ours"
    here.mkdir()
    for file in folder.glob("*.*"):
        (here / file.name).symlink_to(file)
    (here / "config.json").unlink()
    (here / "config.json").write_text(json.dumps(headstart_config(family, config, rng)))
    tokens = [rng.randrange(model.config.vocab_size) for _ in range(LENGTH)]
    return compare(here, cache(lambda: expected_logits(folder, tokens)), tokens, hostile)


def try_gguf(family: str, seed: int, number: int, folder: Path) -> Outcome:
    """Tries configuration `number` as a GGUF file."""
    rng = Random(f"{seed} {family} {number} gguf")
    arguments = without_unsupported_keys(family, draw(family, rng), rng)
    model = random_model(config_class(family)(**arguments), number)
    save(model, folder)
    path = folder / "model.gguf"
    convert(folder, path)
    tokens = [rng.randrange(model.config.vocab_size) for _ in range(LENGTH)]
    return compare(path, cache(lambda: expected_logits(folder, tokens)), tokens)


def run_family(family: str, seed: int, numbers: range, gguf: bool = False) -> int:
    """Number of compared configurations; the others are refused. Raises with the number of a failed configuration."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    count = 0
    for number in numbers:
        with tempfile.TemporaryDirectory(prefix="headstart-fuzz-") as name, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                outcome = (try_gguf if gguf else try_checkpoint)(family, seed, number, Path(name))
            except Exception as error:
                error.add_note(f"number {number}")
                raise
        assert outcome.kind != "failed", f"number {number}: {outcome.detail}"
        count += outcome.kind == "compared"
    return count
