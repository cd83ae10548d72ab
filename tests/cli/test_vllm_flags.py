"""vLLM's flags in `serve`: each is accepted, or refused with a hint."""

import json
from pathlib import Path

import pytest
from tiny_models import write_tiny

from headstart.cli.main import main
from headstart.cli.serve import run as serve
from headstart.cli.vllm_flags import OTHER, VllmFlags, rewrite
from headstart.errors import UsageError
from headstart.tools.launch.arguments import argument_table

KNOWN = argument_table("vllm")
assert KNOWN is not None
SAMPLES = {"int": "1", "size": "1k", "float": "0.5", "json": "{}", "text": "a"}


def problem_of(flag: str) -> str:
    """Problem with a vLLM flag in `serve`, or ""."""
    assert KNOWN is not None
    name = KNOWN.aliases.get(flag, flag)
    value = [SAMPLES[KNOWN.kinds[name]]] if KNOWN.kinds[name] in SAMPLES else []
    try:
        words = rewrite([flag, *value], serve.flags)
    except UsageError as error:
        return "" if error.hint and flag in str(error) else f"{flag}: {error}"
    if flag == "--model":
        return "" if words == [SAMPLES["text"]] else "it is the argument"
    if words[:1] != [OTHER]:
        return "" if not words or words[0] in serve.flags else f"{words[0]} is no option"
    given, equals, value = words[1].partition("=")
    try:
        VllmFlags(given={given: value if equals else True}).check()
    except UsageError as error:
        return "" if error.hint and given in str(error) else f"{given}: {error}"
    return ""


def test_each_vllm_flag_is_accepted_or_refused_with_a_hint() -> None:
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
        (["--enable-lora", "--lora-modules", "a=x", '{"name": "b", "path": "y"}', "--port", "1"],
         ["--enable-lora", "--lora", "a=x", "--lora", "b=y", "--port", "1"]),
        (["--no-enable-lora"], [OTHER, "--no-enable-lora"]),
        (["--engine", "vllm", "--quantization", "awq"], ["--engine", "vllm", OTHER, "--quantization=awq"]),
        (["--engine", "vllm", "--allowed-media-domains", "a.org"],
         ["--engine", "vllm", OTHER, "--allowed-media-domains=a.org"]),
        (["--allowed-media-domains", "a.org"], ["--allowed-media-domains", "a.org"]),
        (["--nonsense", "3"], ["--nonsense", "3"]),
    ],
)  # fmt: skip
def test_vllm_flags_are_rewritten_to_options(words: list[str], ours: list[str]) -> None:
    assert rewrite(words, serve.flags) == ours


@pytest.mark.parametrize(("words", "message"), [
    (["--lora-dtype", "float16"], "--lora-dtype float16 cannot be honoured"),
    (["--lora-modules", '{"name": "a"}'], "without a name and a path"),
    (["-tp", "2"], "--tensor-parallel-size 2 cannot be honoured"),
    (["--num-scheduler-steps", "8"], "--num-scheduler-steps 8 cannot be honoured"),
    (["--num-speculative-tokens", "many"], "is 'many', which is not a number"),
    (["--spec-tokens", "2", "--speculative-config", "{}"], "flags for its keys are both given"),
    (["--nonsense", "3"], "No such option: --nonsense"),
])  # fmt: skip
def test_refused_flags_are_named(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["serve", *words]) == 2
    assert message in capsys.readouterr().err


LINES = """
    deepseek-ai/DeepSeek-V4 --max-model-len 32768 --enable-chunked-prefill --max-num-batched-tokens 4096
    org/m --quantization awq_marlin --kv-cache-dtype auto --gpu-memory-utilization 0.92 --enable-prefix-caching
    org/m --no-enable-chunked-prefill --trust-remote-code --enforce-eager --swap-space 4 --load-format safetensors
    --model org/m --speculative-model [ngram] --num-speculative-tokens 3 --speculative-draft-tensor-parallel-size 1
    org/m --speculative-config {"method":"mtp","num_speculative_tokens":1} --speculative-disable-by-batch-size 64
    org/m --speculative-config {"method":"deepseek_mtp","num_speculative_tokens":3,"disable_by_batch_size":8}
    org/m --speculative-config {"method":"suffix","num_speculative_tokens":32}
    org/m --speculative-config {"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4}
    org/m --speculative-config {"method":"dflash","model":"org/head","num_speculative_tokens":8}
    org/m --speculative-config {"method":"eagle3","model":"org/head","num_speculative_tokens":2}
    org/m --speculative_config {"model":"facebook/opt-125m","num_speculative_tokens":5}
    org/m --speculative-config {"method":"eagle","model":"org/head","draft_tensor_parallel_size":1}
    org/m --served-model-name gpt --reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser hermes
    org/m --quantization modelopt_fp4 --kv-cache-dtype fp8_e4m3
    org/m --tensor-parallel-size 1 --dtype auto --disable-log-requests --host 0.0.0.0 --port 8000
"""


@pytest.mark.parametrize("line", LINES.strip().splitlines())
def test_command_lines_of_vllm_guides_are_accepted(line: str) -> None:
    """Parsing and configuration succeed; no model is opened."""
    command = serve
    arguments = command.read(command.split(rewrite(line.split(), command.flags))[0], None)
    assert arguments["named"].model in (["org/m"], ["deepseek-ai/DeepSeek-V4"])
    arguments["vllm"].apply(arguments["engine"].config)


KV_TRANSFER = """{"kv_connector":"%s","kv_role":"kv_both"%s}"""


@pytest.mark.parametrize(("words", "hint"), [
    (["--tensor-parallel-size", "4"], "add --engine vllm"),
    (["--cpu-offload-gb", "4"], "--quantization int8 or int4"),
    (["--quantization", "torchao"], "must be one of int8, int4, awq"),
    (["--kv-transfer-config", "{}"], "--kv-spill DIR"),
    (["--kv-transfer-config", KV_TRANSFER % ("LMCacheConnectorV1", "")], "--kv-spill DIR"),
    (["--kv-transfer-config", KV_TRANSFER % ("NixlConnector", "")], "--role prefill"),
    (["--gpu-memory-utilization", "92"], "for example 0.9"),
    (["--gpu-memory-utilization", "0.9", "--kv-blocks", "9"], "give one of them"),
    (["--speculative-config", '{"draft_tensor_parallel_size": 2}'], "leave it out"),
    (["--speculative-config", '{"method": "mlp_speculator"}'], "choose from: auto"),
    (["--allowed-media-domains", "https://a.org"], "for example upload.wikimedia.org"),
    (["--limit-mm-per-prompt", '{"image": 1}'], "reads text and images, without settings"),
    (["--mem-fraction-static", "0.88"], "write --gpu-memory-utilization"),
    (["--model-path", "org/m"], "headstart serve MODEL"), (["--speculative-algorithm", "MTP"], "write --drafter"),
    (["-ngl", "99"], "headstart doctor shows the backend"), (["--unheard-of"], "leave --unheard-of out"),
])  # fmt: skip
def test_refusals_have_a_hint(capsys: pytest.CaptureFixture[str], words: list[str], hint: str) -> None:
    assert main(["serve", "no-such-model", *words]) == 2
    shown = capsys.readouterr().err
    assert hint in shown
    assert "see headstart" not in shown


def test_shared_storage_connector_becomes_kv_spill() -> None:
    text = KV_TRANSFER % ("SharedStorageConnector", ',"kv_connector_extra_config":{"shared_storage_path":"kv"}')
    assert rewrite(["m", "--kv-transfer-config", text], serve.flags) == ["m", "--kv-spill", "kv"]


@pytest.mark.parametrize(("words", "shown"), [
    (["--quantization", "awq", "--kv-cache-dtype", "fp8"], "--quantization awq --kv-cache-dtype fp8"),
    (["--max-logprobs", "20", "--no-enable-prefix-caching"], "--max-logprobs 20"),
    (["--max-model-len", "32k"], "--max-model-len 32000"),
    (["--no-enable-chunked-prefill"], "--no-enable-chunked-prefill"),
    (["--gpu-memory-utilization", "0.92"], "--gpu-memory-utilization 0.92"),
    (["--speculative-model", "{head}", "--num-speculative-tokens", "2"], '"method": "eagle3"'),
])  # fmt: skip
def test_values_are_passed_to_the_launched_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], shown: str
) -> None:
    model, head = write_tiny("mimo", tmp_path / "m"), tmp_path / "h"
    head.mkdir()
    (head / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 9}))
    words = [word.format(head=head) if word == "{head}" else word for word in words]
    assert main(["serve", str(model), "--engine", "vllm", "--dry-run", *words]) == 0
    assert shown in capsys.readouterr().out
