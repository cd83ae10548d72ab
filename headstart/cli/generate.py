"""`headstart generate`: one prompt in, its continuation out."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.cli.adapt import with_adapted
from headstart.cli.documents import completion_document, print_stream, summary
from headstart.cli.options import LoadTestOptions, Model, OutputOptions, PromptOptions, SamplingOptions
from headstart.cli.render import print_aside, print_json, progress
from headstart.errors import UsageError

if TYPE_CHECKING:
    from headstart.api import LLM
    from headstart.core import SamplingParams

EXAMPLES = (
    "headstart generate --prompt 'Write a haiku about rain.'",
    "headstart generate ./my-model --prompt-file task.txt --temperature 0.7 --seed 1 --json",
    "echo 'def add(a, b):' | headstart generate --raw --depth 5",
)


def run(
    model: Model = None,
    *,
    prompts: PromptOptions,
    sampling: SamplingOptions,
    engine: LoadTestOptions,
    output: OutputOptions,
) -> int:
    """Continue one prompt; streams to the terminal, or prints one JSON document."""
    if model and " " in model.strip() and not Path(model).exists():
        hint = f"headstart generate --prompt {shlex.quote(model)}"
        raise UsageError(f"{model!r} stands where the model does, and is none", f"for a prompt: {hint}")
    prompt = prompts.text()
    sampling.params(engine.config.seed)  # what is wrong is said before a model is loaded

    from headstart.api import LLM

    config = with_adapted(model, engine.config)
    with progress("loading", quiet=output.as_json) as report_progress:
        llm = LLM(model, config, report_progress)
    params = sampling.params(engine.config.seed, llm.recommended)
    if output.as_json:
        print_json(completion_document(llm.generate([prompt], params, raw=prompts.raw)[0]))
    elif params.n > 1:
        _print_choices(llm, prompt, params, prompts.raw)
    else:
        print_stream(llm.stream(prompt, params, raw=prompts.raw))
    return 0


def _print_choices(llm: LLM, prompt: str, params: SamplingParams, raw: bool) -> None:
    completion = llm.generate([prompt], params, raw=raw)[0]
    for index, choice in enumerate(completion.choices):
        print(f"--- {index + 1} of {len(completion.choices)} ---")
        print(choice.text)
    print_aside(summary(completion))
