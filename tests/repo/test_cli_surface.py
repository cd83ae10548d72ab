"""Frozen commands and options: a change here is a change of the public interface."""

import pytest

from headstart.cli.app import application
from headstart.cli.main import main
from headstart.cli.parser import Command, CommandGroup
from headstart.cli.vllm_flags import FLAGS

SAMPLING = {
    "--max-tokens", "--min-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty",
    "--presence-penalty", "--frequency-penalty", "--logit-bias", "--stop", "--stop-token-id", "--ignore-eos",
    "--logprobs", "--n",
}  # fmt: skip
ENGINE = {
    "--backend", "--quantization", "--kv-cache-dtype", "--dtype", "--device", "--threads", "--numa", "--drafter",
    "--head", "--depth", "--depth-by-batch", "--draft-vocab", "--draft-width", "--rule", "--max-model-len",
    "--max-num-seqs", "--max-num-batched-tokens", "--block-size", "--kv-blocks", "--no-enable-prefix-caching",
    "--no-shared-lookup", "--gpu-memory-utilization", "--no-enable-chunked-prefill",
    "--ngram-min", "--ngram-max", "--seed", "--speculative-config", "--no-mtp", "--synthetic-acceptance",
    "--kv-spill", "--kv-spill-gb", "--lookup-corpus", "--lora", "--mmproj", "--portable-bits", "--slice",
}  # fmt: skip
JSON = {"--json"}
OF_ALL = {"-h", "--help", "--config"}
GROUPS = {"bench", "models"}
COMMANDS: dict[str, set[str]] = {
    "demo": ENGINE | JSON | {"--max-tokens"},
    "generate": SAMPLING | ENGINE | JSON | {"--prompt", "-p", "--prompt-file", "--raw", "--image"},
    "chat": SAMPLING | ENGINE | {"--system", "--chat-template"},
    "serve": ENGINE
    | set(FLAGS)
    | {"--host", "--port", "--served-model-name", "--max-queue", "--request-timeout", "--shutdown-timeout"}
    | {"--api-key", "--api-key-file", "--ssl-certfile", "--ssl-keyfile", "--chat-template", "--tool-call-parser"}
    | {
        "--reasoning-parser",
        "--log-format",
        "--access-log",
        "--allowed-origins",
        "--allow-image-urls",
        "--allow-lora-updates",
        "--allowed-media-domains",
        "--parse-special-tokens",
        "--no-web",
    }
    | {"--price-per-hour", "--engine", "--dry-run", "--vllm", "--record", "--record-limit"}
    | {"--models", "--keep-alive", "--memory", "--role", "--prefill"}
    | {"--replicas", "--join", "--replica"},
    "verify": ENGINE
    | JSON
    | {"--prompts", "--raw", "--max-tokens", "--against", "--transcript", "--numerics", "--full"}
    | {"--temperatures", "--depths", "--drafters", "--batch-sizes", "--chunk-sizes", "--prefix-cache", "--seeds"}
    | {"--preemption", "--thread-counts"},
    "inspect": JSON | {"--head", "--target", "--deep"},
    "launch": JSON
    | {"--dry-run", "--docker", "--emit", "--check", "--translate", "--engine-version", "--program"}
    | {"--depth", "--head", "--depth-by-batch", "--host", "--port", "--max-model-len", "--max-num-seqs"}
    | {"--served-model-name", "--api-key"}
    | {"--gpus", "--tp", "--dp", "--nodes", "--head-node", "--role", "--kv-offload", "--disaggregate"},
    "probe": JSON | {"--model", "--api-key", "--no-metrics", "--exact", "--against", "--max-tokens", "--minutes"},
    "gate": JSON
    | {"--model", "--api-key", "--floor", "--allow-text-changes", "--max-tokens", "--trials"}
    | {"--save", "--junit", "--report", "--badge", "--force"},
    "plan": JSON
    | {"--gpu", "--batch", "--context", "--acceptance", "--depth", "--weights", "--kv-dtype", "--tp", "--ep"}
    | {"--price-per-hour", "--api-price", "--price-list", "--recalibrate", "--drafter", "--head"}
    | {"--fleet"},
    "tune": ENGINE
    | JSON
    | {"--workload", "--concurrency", "--minutes", "--retune", "--url", "--api-key", "--start", "--start-off"},
    "data": ENGINE
    | JSON
    | {"--out", "--tokens", "--minutes", "--prompts", "--text", "--licence", "--only-prompts", "--language"}
    | {"--max-tokens"},
    "train": JSON
    | {"--out", "--data", "--prompts", "--minutes", "--tokens", "--depth", "--draft-vocab", "--threads", "--seed"}
    | {"--modules", "--device", "--restart", "--kind", "--finetune", "--head", "--lora"}
    | {"--from-scratch"},
    "adapt": JSON | {"--model", "--head", "--kind", "--lora", "--minutes", "--forget", "--threads", "--seed"},
    "export": JSON | {"--to", "--out", "-o", "--head", "--model-type", "--slice", "--force"},
    "graft": JSON | {"--out", "-o", "--from", "--strip", "--quantize-head", "--no-measure", "--force"},
    "pull": JSON,
    "ps": JSON | {"--url", "--api-key"},
    "stop": JSON | {"--url", "--api-key"},
    "doctor": JSON,
    "completion": set(),
    "bench": set(),
    "bench run": ENGINE
    | JSON
    | {"--workload", "--preset", "--scale", "--concurrency", "--request-rate", "--requests", "--input-tokens"}
    | {"--output-tokens", "--prompts", "--temperature", "--modes", "--pairs", "--chunked-prefill", "--url", "--off-url"}
    | {"--api-key", "--price-per-hour", "--out", "--report", "--force", "--compare"},
    "bench step": ENGINE | JSON | {"--rows", "--context", "--repeats", "--profile"},
    "models": set(),
    "models list": JSON | {"--available", "--prune"},
    "models remove": JSON | {"--yes"},
}
SECTIONS = {
    "Use": "demo generate chat serve pull models ps stop doctor completion",
    "Measure": "bench tune verify plan",
    "Heads": "inspect train data adapt graft export",
    "Other engines": "launch probe gate",
}
"""Commands in the order of --help."""


def found_commands(group: CommandGroup, prefix: str = "") -> dict[str, Command | CommandGroup]:
    """Commands by full name, each group before its commands."""
    found: dict[str, Command | CommandGroup] = {}
    for name, entry in group.commands.items():
        found[prefix + name] = entry
        if isinstance(entry, CommandGroup):
            found |= found_commands(entry, f"{prefix}{name} ")
    return found


def test_commands_are_frozen() -> None:
    root = application()
    assert found_commands(root).keys() == COMMANDS.keys()
    assert {title: " ".join(names) for title, names in root.sections.items()} == SECTIONS
    assert [name for names in SECTIONS.values() for name in names.split()] == list(root.commands)


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_frozen(command: str) -> None:
    found = found_commands(application())[command]
    options = {flag for item in found.options for flag in item.flags}
    assert options - OF_ALL == COMMANDS[command]
    assert ("--config" in options) == (command not in GROUPS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Examples:" in shown
    assert f"headstart {command}" in shown.partition("Examples:")[2]


def test_root_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(command.split()[0] in shown for command in COMMANDS)
