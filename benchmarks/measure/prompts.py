"""Prompts as token ids, equal for all engines."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path

from headstart.formats import open_checkpoint
from measure.questions import NUM_CATEGORIES, first_turns, in_turns

Ids = list[int]


class Prompts:
    """Spec-Bench questions (`first_turns`) in the model's chat template."""

    def __init__(self, model: Path, questions: Path) -> None:
        checkpoint = open_checkpoint(model)
        self._tokenizer, self._template = checkpoint.load_tokenizer(), checkpoint.chat_template()
        self._questions = questions

    def chat(self, text: str) -> Ids:
        """Token ids of one user message."""
        if self._template is None:
            return self._tokenizer.encode(text, add_special=True)
        return self._tokenizer.encode(self._template.render([{"role": "user", "content": text}]), add_special=False)

    def per_category(self, number: int) -> list[tuple[str, Ids]]:
        """(category, ids) of the first `number` questions of each category."""
        return [(category, self.chat(text)) for category, text in first_turns(self._questions, number)]

    def of_length(self, length: int, number: int) -> list[Ids]:
        """`number` different prompts of exactly `length` tokens, chat template included.

        Questions of alternating categories, each extended by the following ones and cut before the template's end.
        """
        texts = in_turns(self._questions, -(-number // NUM_CATEGORIES) + 1)
        end = self._template_end()
        found = []
        for start in range(number):
            message: list[str] = []
            for text in islice(cycle(texts), start % len(texts), None):
                message.append(text)
                ids = self.chat("\n\n".join(message))
                if len(ids) >= length:
                    break
            found.append(ids[: length - len(end)] + end)
        return found

    def text_of_length(self, length: int) -> str:
        """A user message whose prompt has `length` tokens or slightly fewer."""
        words = " ".join(in_turns(self._questions, 3)).split()[:length]
        while len(self.chat(" ".join(words))) > length:
            words = words[:-4]
        return " ".join(words)

    def _template_end(self) -> Ids:
        """The tokens at the end of every prompt."""
        one, other = self.chat("Yes?"), self.chat("No, 7 + 5 is 12.")
        same = 0
        while one[-1 - same] == other[-1 - same]:
            same += 1
        return one[len(one) - same :]
