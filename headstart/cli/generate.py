"""`headstart generate`, and the output of generated text: streamed, wrapped, summarized, as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.cli import options
from headstart.cli.parser import command
from headstart.cli.render import print_json, print_note, progress
from headstart.errors import UsageError
from headstart.options import ModelOptions, OptionGroup, option
from headstart.stats import synthetic_note

if TYPE_CHECKING:
    from headstart.api import Completion, TextDelta
    from headstart.text.images import Image


@dataclass(frozen=True, kw_only=True)
class ImageOptions(OptionGroup):
    """Images of the prompt."""

    image: list[str] | None = option("Image before the prompt; may be repeated.", metavar="FILE")

    def read(self) -> list[Image]:
        """The decoded images. Raises UsageError."""
        if not self.image:
            return []
        from headstart.text.images import read_image

        try:
            return [read_image(path) for path in self.image]
        except UsageError as error:
            raise UsageError(f"--image: {error.message}", error.hint) from None


@command(
    "headstart generate --prompt 'Give me three tips for sleeping better.'",
    "headstart generate ./my-model --prompt-file task.txt --temperature 0.7 --seed 1 --json",
    "headstart generate ./my-vision-model --image cat.jpg --prompt 'What is in this image?'",
    "echo 'def add(a, b):' | headstart generate --raw --depth 5",
)
def run(
    named: ModelOptions, prompts: options.PromptOptions, attached: ImageOptions,
    sampling: options.SamplingOptions, engine: options.LoadTestOptions, output: options.OutputOptions,
) -> int:  # fmt: skip
    """Continue one prompt; prints streamed text or one JSON document."""
    model = named.model
    lacks_prompt = prompts.prompt is None and prompts.prompt_file is None
    if model and lacks_prompt and " " in model.strip() and not Path(model).exists():
        hint = f"for a prompt: headstart generate --prompt {shlex.quote(model)}"
        raise UsageError(f"{model!r} is no model", hint)
    prompt = prompts.text()
    if sampling.params(engine.config.seed).logprobs is not None and not output.as_json:  # before a model is loaded
        raise UsageError("--logprobs is given, but only the JSON document has them", "add --json")
    images = attached.read()

    from headstart.api import LLM

    config = options.with_adapted(model, engine.config)
    with progress("loading") as report_progress:
        llm = LLM(model, config, report_progress)
    params = sampling.params(engine.config.seed, llm.recommended)
    if params.n == 1 and not output.as_json:
        print_stream(llm.stream(prompt, params, raw=prompts.raw, images=images))
        return 0
    (completion,) = llm.generate([prompt], params, raw=prompts.raw, images=[images])
    if output.as_json:
        print_json(completion_document(completion))
    else:
        for index, choice in enumerate(completion.choices):
            print(f"--- {index + 1} of {len(completion.choices)} ---")
            print(choice.text)
            print_note(summary(choice))
    return 0


FENCE = "```"
TAB_WIDTH = 8


def completion_document(completion: Completion) -> dict[str, Any]:
    """The document of `generate --json`; with `logprobs` and `choices` only if they were requested."""
    document: dict[str, Any] = {
        **{name: getattr(completion, name) for name in ("text", "token_ids", "finish_reason", "seed")},
        "usage": {
            "prompt_tokens": completion.usage["prompt_tokens"],
            "completion_tokens": sum(choice.usage["completion_tokens"] for choice in completion.choices),
        },
        "speculation": completion.speculation.document(completion.method),
        "timing": {name: completion.timing[name] for name in ("load_s", "ttft_s", "decode_s", "decode_tokens_per_s")},
    }
    if completion.logprobs:
        document["logprobs"] = [asdict(entry) for entry in completion.logprobs]
    if len(completion.choices) > 1:
        document["choices"] = [
            {name: getattr(choice, name) for name in ("index", "text", "token_ids", "finish_reason")}
            for choice in completion.choices
        ]
    return document


def print_stream(
    deltas: Iterator[TextDelta], stopped: Callable[[], bool] = lambda: False, wrap: WordWrap | None = None
) -> str:
    """Print text on stdout as it is generated, until `stopped`, and a summary on stderr. Returns the text."""
    text = ""
    for delta in deltas:
        print(wrap.push(delta.text) if wrap else delta.text, end="", flush=True)
        text += delta.text
        if delta.completion is not None or stopped():
            print(wrap.flush() if wrap else "", flush=True)
            print_note("stopped" if delta.completion is None else summary(delta.completion))
            break
    if isinstance(deltas, Generator):
        deltas.close()  # takes the request out of the engine
    return text


def summary(completion: Completion) -> str:
    """One line with tokens, speed, acceptance length, and whether a limit ended the text."""
    stats, tokens = completion.speculation, completion.usage["completion_tokens"]
    parts = [f"{tokens} token{'' if tokens == 1 else 's'}"]
    if tokens > 1:  # the first one belongs to the prompt
        parts.append(f"{completion.timing['decode_tokens_per_s']:.1f} tokens/s")
    if stats.drafts:
        parts.append(f"acceptance length {stats.acceptance_length:.2f} ({completion.method})")
    if completion.is_truncated:
        parts.append("cut off by max_tokens or the context length")
    if stats.synthetic:
        parts.append(synthetic_note(stats.synthetic))
    return ", ".join(parts)


class WordWrap:
    """Breaks lines of streamed text at spaces, but neither code between lines of FENCE nor words longer than a line. A
    word is held back until its end is known. `width`: the current columns of the terminal."""

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._spaces = self._word = ""  # held back
        self._line = ""  # the first characters of the line, to see a fence
        self._is_code = self._after_wide = False

    def push(self, text: str) -> str:
        """The text that can be printed now."""
        return "".join(map(self._push_letter, text))

    def _push_letter(self, letter: str) -> str:
        if letter == "\n":
            shown = self.flush() + letter
            self._is_code ^= self._line == FENCE
            self._column, self._spaces, self._line = 0, "", ""
            return shown
        if len(self._line) < len(FENCE):
            self._line = (self._line + letter).lstrip()
        if letter in " \t":
            shown = self.flush()
            self._spaces += letter
            return shown
        if _cells(letter) < 2:
            self._word += letter
            return self.flush() if _cells(self._word) >= self._width() else ""
        shown = self.flush()  # Chinese and Japanese have no spaces: lines end anywhere
        self._word = letter
        return shown + self.flush()

    def flush(self) -> str:
        """The held-back word, after its spaces or on a new line."""
        spaces, word = self._spaces, self._word
        if not word:
            return ""
        self._spaces = self._word = ""
        column, width = self._column, self._width()
        for each in spaces:
            column = column + 1 if each == " " else (column // TAB_WIDTH + 1) * TAB_WIDTH
        column += _cells(word)
        may_end = spaces or self._after_wide or _cells(word[0]) == 2
        if column > width and self._column and may_end and not self._is_code and self._line != FENCE:
            spaces, column = "\n", _cells(word)
        self._column = column and (column - 1) % width + 1  # the terminal breaks longer words
        self._after_wide = _cells(word[-1]) == 2
        return spaces + word


def _cells(text: str) -> int:
    """Terminal columns of a text."""
    from rich.cells import cell_len  # slow to import

    return cell_len(text)
