import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.config import EngineConfig, config_fields, parse_speculative_config
from headstart.errors import ParameterError, UsageError
from headstart.files import read_text
from headstart.wording import LEAVE_OUT, errors_with_keywords, flag_of, joined, option


def test_every_field_has_a_default_a_flag_and_a_doc() -> None:
    for name, item in config_fields().items():
        assert flag_of(name) == "--" + name.replace("_", "-")
        assert item.metadata["doc"].endswith(".")
    assert EngineConfig() == EngineConfig()


@pytest.mark.parametrize(("values", "message"), [
    ({"depth": 17}, "--depth is 17, but must be between 0 and 16"),
    ({"depth": -1}, "--depth is -1"),
    ({"depth": True}, "--depth is True, but must be a whole number"),
    ({"backend": "tpu"}, "--backend is 'tpu', which is unknown"),
    ({"drafter": "nope"}, "--drafter is 'nope'"),
    ({"ngram_min": 5, "ngram_max": 4}, "--ngram-max is 4, but must be between 5 and 1024"),
    ({"threads": 0}, "--threads is 0"), ({"seed": -1}, "--seed is -1"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype is 'fp8_e5m2', which is unknown.*int8, fp8"),
])  # fmt: skip
def test_error_of_a_value_out_of_range_names_flag_and_value(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EngineConfig(**values)


@pytest.mark.parametrize(("text", "keywords"), [
    (option("depth") + " is 3, but goes to 2", "depth is 3, but goes to 2"),
    (option("depth", 3) + ", or " + option("max_model_len") + " if it fits", "depth=3, or max_model_len if it fits"),
    ("use " + option("backend", "native") + "; or " + option("quantization", "int4"),
     "use backend='native'; or quantization='int4'"),
    (joined(", or ", ("attach " + option("head", "DIR"), option("depth", 0), option("drafter", "ngram"))),
     "attach head=DIR, or depth=0, or drafter='ngram'"),
    ("with " + option("head", "./a-b") + ", " + option("kv_spill_gb", 0.5), "with head='./a-b', kv_spill_gb=0.5"),
    (option("lora", "NAME=PATH") + " (" + option("enable_prefix_caching", False) + ")",
     "lora='NAME=PATH' (enable_prefix_caching=False)"),
    (option("kv_spill") + ": cannot write a--depth", "kv_spill: cannot write a--depth"),
    ("headstart train --kind mtp --out HEAD", "headstart train --kind mtp --out HEAD"),
    (LEAVE_OUT + ", or " + option("threads", 4), "leave it out, or threads=4"),
])  # fmt: skip
def test_errors_name_options_as_python_keywords(text: str, keywords: str) -> None:
    with pytest.raises(ParameterError) as refused, errors_with_keywords():
        raise ParameterError(option("seed"), text, text)
    error = pickle.loads(pickle.dumps(refused.value))
    assert (error.param, error.message, error.hint) == ("seed", f"seed {keywords}", keywords)
    with pytest.raises(UsageError, match=re.escape(f"{text} (hint: {text})")), errors_with_keywords(wanted=False):
        raise UsageError(text, text)


def test_adapter_names_from_paths_and_options(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("sql-v1.5", "chat.gguf")]
    for path in paths:
        path.mkdir()
    given = (*map(str, paths), f"own={paths[0]}")
    assert [name for name, _ in EngineConfig(lora=given).adapters] == ["sql-v1.5", "chat", "own"]
    for wrong, message in (
        ((f"{paths[0]}=",), "has no name or no path"), ((f"={paths[0]}",), "has no name or no path"),
        ((given[2], given[2]), "two adapters are named own"), (("own=/no/such",), "/no/such does not exist"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            EngineConfig(lora=wrong)


def test_paths_and_numpy_integers_are_accepted(tmp_path: Path) -> None:
    given: Any = {"depth": np.int64(3), "threads": np.int8(1), "head": tmp_path, "lora": [tmp_path]}
    made = EngineConfig(**given)
    assert made == EngineConfig(depth=3, threads=1, head=str(tmp_path), lora=(str(tmp_path),))
    assert (type(made.depth), type(made.threads)) == (int, int)


def test_cache_types_of_other_engines_are_accepted() -> None:
    spellings: list[Any] = ["fp8", "fp8_e4m3", "bf16"]
    assert [EngineConfig(kv_cache_dtype=each).kv_cache_dtype for each in spellings] == ["fp8", "fp8", "bfloat16"]


def test_speculative_config_sets_fields() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 2}'
    assert parse_speculative_config(text) == {"drafter": "ngram", "depth": 4, "ngram_max": 5, "ngram_min": 2}
    assert parse_speculative_config('{"method": "some_mtp", "model": "h"}') == {"drafter": "mtp", "head": "h"}


@pytest.mark.parametrize(("text", "message"), [
    ("{", "not valid JSON"), ("[]", "must be a JSON object, not list"), ('{"methd": "mtp"}', "unknown key 'methd'"),
    ('{"num_speculative_tokens": "3"}', 'num_speculative_tokens is "3", but must be a whole number'),
    ('{"num_speculative_tokens": true}', "num_speculative_tokens is true"),
])  # fmt: skip
def test_invalid_speculative_config_names_the_problem(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_speculative_config(text)
    assert caught.value.hint


ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, 3.5, float("nan"), "", "x", "[[1,2,3]]", "[1]", "[[1,null,3]]", "0.8,,", "1e999", "{}",
    "\0", "1" * 5000, "[" * 3000, b"x", [], [1], {},
)  # fmt: skip


@pytest.mark.parametrize("name", config_fields())
def test_any_value_is_accepted_or_a_usage_error(name: str) -> None:
    for value in ODD_VALUES:
        try:
            made = EngineConfig(**{name: value})
        except UsageError as error:
            assert str(error).startswith("--"), value
        else:
            assert made.depth_limit(3) >= 0
            assert hash(made) == hash(EngineConfig(**{name: value}))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 5000, "1" * 10_000, "null", "NaN", '"\\ud800"', ""])
def test_any_invalid_speculative_config_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--speculative-config"):
        parse_speculative_config(text)


def test_home_folder_is_expanded_in_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "text.txt").write_text("a text")
    EngineConfig(mmproj="~/text.txt", lookup_corpus="~/text.txt")
    assert read_text("~/text.txt", "") == "a text"
