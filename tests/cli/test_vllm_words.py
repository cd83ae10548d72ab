"""`serve` takes vLLM's command lines: each of its flags is honoured, or refused with what to do instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headstart.cli.app import root
from headstart.cli.main import main
from headstart.cli.vllm_flags import VllmFlags
from headstart.cli.vllm_words import OTHER, rewritten
from headstart.errors import UsageError
from headstart.tools.launch.definitions import definitions
from headstart.tools.tiny import write_tiny

SERVE = root().commands["serve"]
OWN = {flag: not getattr(item, "is_flag", False) for item in SERVE.params for flag in item.opts}
KNOWN = definitions("vllm")
assert KNOWN is not None
SAMPLES = {"int": "1", "size": "1k", "float": "0.5", "json": "{}", "text": "a"}


def problem_of(flag: str) -> str:
    """What is wrong with how `serve` takes this flag of vLLM's; empty: nothing."""
    assert KNOWN is not None
    name = KNOWN.aliases.get(flag, flag)
    words = rewritten([flag, *([SAMPLES[KNOWN.kinds[name]]] if KNOWN.kinds[name] in SAMPLES else [])], OWN)
    if flag == "--model":
        return "" if words == [SAMPLES["text"]] else "it is the argument"
    if words[:1] != [OTHER]:
        return "" if not words or words[0] in OWN else f"{words[0]} is no option"
    given, equals, value = words[1].partition("=")
    try:
        VllmFlags(given={given: value if equals else True}).check()
    except UsageError as error:
        return "" if error.hint and given in str(error) else f"{given}: {error}"
    return ""


def test_each_flag_of_vllm_is_honoured_or_refused_with_a_hint() -> None:
    assert KNOWN is not None
    flags = {*KNOWN.kinds, *KNOWN.aliases} - {"-h", "--help"}
    assert not {flag: problem for flag in flags if (problem := problem_of(flag))}


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["--max_model_len", "4096"], ["--max-model-len", "4096"]),
        (["--max-model-len", "32k"], ["--max-model-len", "32000"]),
        (["--max-model-len=32K"], ["--max-model-len", "32768"]),
        (["--max-model-len", "auto", "--kv-cache-dtype", "auto"], []),
        (["--model", "m", "--port", "1"], ["m", "--port", "1"]),
        (["-tp", "1"], ["--tensor-parallel-size", "1"]),
        (["-sc", '{"method": "mtp"}'], ["--speculative-config", '{"method": "mtp"}']),
        (["--num-speculative-tokens", "4"], ["--speculative-config", '{"num_speculative_tokens": 4}']),
        (["--speculative-model", "[ngram]", "--ngram-prompt-lookup-max", "3"],
         ["--speculative-config", '{"method": "ngram", "prompt_lookup_max": 3}']),
        (["--speculative-model", "./head", "--spec-tokens=2"],
         ["--speculative-config", '{"model": "./head", "num_speculative_tokens": 2}']),
        (["--speculative-config.method", "mtp"], ["--speculative-config", '{"method": "mtp"}']),
        (["m", "--max-logprobs", "5"], ["m", OTHER, "--max-logprobs=5"]),
        (["--no-enable-lora"], [OTHER, "--no-enable-lora"]),
        (["--engine", "vllm", "--quantization", "awq"], ["--engine", "vllm", OTHER, "--quantization=awq"]),
        (["--nonsense", "3"], ["--nonsense", "3"]),
    ],
)  # fmt: skip
def test_words_become_options(words: list[str], ours: list[str]) -> None:
    assert rewritten(words, OWN) == ours


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--enable-lora"], "--enable-lora cannot be honoured"),
        (["-tp", "2"], "--tensor-parallel-size 2 cannot be honoured"),
        (["--num-scheduler-steps", "8"], "--num-scheduler-steps 8 cannot be honoured"),
        (["--num-speculative-tokens", "many"], "is 'many', which is not a number"),
        (["--spec-tokens", "2", "--speculative-config", "{}"], "flags for its keys are both given"),
        (["--nonsense", "3"], "No such option: --nonsense"),
    ],
)
def test_refused_by_name(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["serve", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--quantization", "awq", "--kv-cache-dtype", "fp8"], "--quantization awq --kv-cache-dtype fp8"),
        (["--max-logprobs", "20", "--no-enable-prefix-caching"], "--max-logprobs 20"),
        (["--max-model-len", "32k"], "--max-model-len 32000"),
        (["--speculative-model", "{head}", "--num-speculative-tokens", "2"], '"method": "eagle3"'),
    ],
)
def test_another_engine_gets_its_own_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], shown: str
) -> None:
    model, head = write_tiny("mimo", tmp_path / "m"), tmp_path / "h"
    head.mkdir()
    (head / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 9}))
    words = [word.format(head=head) if word == "{head}" else word for word in words]
    assert main(["serve", str(model), "--engine", "vllm", "--dry-run", *words]) == 0
    assert shown in capsys.readouterr().out
