"""Templated prompts for self-distillation.

The templates and word lists are in `prompt_lists.json`; this module fills them. In a template

* `{name}` is an entry of the list `name`, the same entry at each occurrence in that template;
* `{name#2}` is another entry of the same list;
* `{3-9}` is a number of that range, `{10-50/5}` one in steps of 5, drawn again at each occurrence;
* `{passage}`, `{passages}`, `{article}`, `{docs}` and `{foreign}` are longer texts, given or composed, and `{language}`
  is the language of `{foreign}`.

An entry may contain placeholders, which are filled separately.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from headstart.formats.json_object import read_packaged

TRANSLATION = "translation"

KIND_WEIGHTS: dict[str, int] = {
    "writing": 7, "roleplay": 6, "reasoning": 6, "math": 6, "coding": 6, "extraction": 7, "stem": 7, "humanities": 7,
    TRANSLATION: 10, "summarization": 9, "qa": 12, "math_reasoning": 9, "rag": 8, "json": 6, "tools": 5,
}  # fmt: skip
"""Relative frequency of each kind of prompt."""

T = TypeVar("T")

_PLACEHOLDER = re.compile(r"\{([a-z_]+(?:#\d+)?|\d+(?:-\d+)?(?:/\d+)?)\}")  # braces of JSON stay
_NUMBER = re.compile(r"(\d+)(?:-(\d+))?(?:/(\d+))?")
_ARTICLE_BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[aeiAEI](?![Uu])|o(?!ne\b)|O(?!ne\b))")
_SENTENCE_END = re.compile(r"(?<=[a-zäöüß0-9)][.!?])\s+(?=[A-ZÄÖÜ\"„»])|(?<=[.!?][\"“])\s+(?=[A-ZÄÖÜ])")
_FOCUS = re.compile(r"(?:[A-Z][\w&-]*)(?: [A-Z][\w&-]*)+")
_RETRIES = 40
_DATA: Mapping[str, Any] = read_packaged("headstart.train", "prompt_lists.json")
"""`lists` and `templates` by name, and `follow_ups`."""


@dataclass(frozen=True)
class TemplatedPrompt:
    """A filled template."""

    kind: str
    prompt: str
    licence: str = "own"  # of the template's words
    passages: tuple[int, ...] = ()  # indices of the given texts in the prompt (for translation: of the foreign texts)


class ForeignText(NamedTuple):
    """A sentence or short paragraph to translate into English."""

    language: str
    text: str


@dataclass
class _ShuffledTexts(Generic[T]):
    """Texts drawn in shuffled order, so that all are used about equally often."""

    texts: list[T]
    rng: random.Random
    deck: list[int] = field(default_factory=list)

    def draw(self, used: list[int]) -> T:
        """The next text; its index is appended to `used`."""
        if not self.deck:
            self.deck = list(range(len(self.texts)))
            self.rng.shuffle(self.deck)
        index = self.deck.pop()
        used.append(index)
        return self.texts[index]


def follow_ups() -> list[str]:
    """Second-turn requests that suit an answer of any kind."""
    return list(_DATA["follow_ups"])


def split_sentences(text: str) -> list[str]:
    """Sentences of running text; joins two sentences rather than splitting one."""
    return [part for part in (piece.strip() for piece in _SENTENCE_END.split(" ".join(text.split()))) if part]


def _number(match: re.Match[str], rng: random.Random) -> str:
    """A random number for `{low-high/step}`; `{n}` is n."""
    low, high, step = match.group(1), match.group(2), match.group(3)
    return low if high is None else str(rng.randrange(int(low), int(high) + 1, int(step or 1)))


class _TemplateFiller:
    """Fills templates from the lists and the given texts."""

    def __init__(self, rng: random.Random, passages: list[str], foreign: list[ForeignText]) -> None:
        self._rng = rng
        self._passages = _ShuffledTexts(passages, rng)
        self._foreign = _ShuffledTexts(foreign, rng)
        self._used: list[int] = []
        self._docs: list[str] = []
        self._foreign_text: ForeignText | None = None
        self._makers: dict[str, Callable[[], str]] = {
            "passage": self._passage, "passages": self._several_passages, "article": self._article,
            "docs": self._several_docs, "foreign": lambda: self._draw_foreign().text,
            "language": lambda: self._draw_foreign().language, "focus": self._focus,
        }  # fmt: skip

    def fill(self, template: str) -> tuple[str, tuple[int, ...]]:
        """The filled template, and the indices of the given texts in it."""
        self._used = []
        self._docs, self._foreign_text = [], None
        return self._expand(template), tuple(self._used)

    def _expand(self, template: str) -> str:
        """Fill one template; its placeholders are bound separately from those of other templates."""
        bound: dict[str, str] = {}
        pieces: list[str] = []
        end = 0
        for match in _PLACEHOLDER.finditer(template):
            pieces.append(template[end : match.start()])
            value = self._value(match.group(1), bound)
            end = match.end()
            if value[:1].lower() in "aeio" and _ARTICLE_BEFORE_VOWEL.search(pieces[-1][-2:] + value[:4]):
                pieces[-1] = pieces[-1][:-1] + "n "
            pieces.append(value)
        pieces.append(template[end:])
        return "".join(pieces)

    def _value(self, key: str, bound: dict[str, str]) -> str:
        """The text for one placeholder."""
        number = _NUMBER.fullmatch(key)
        if number is not None:
            return _number(number, self._rng)
        if key not in bound:
            name = key.partition("#")[0]
            maker = self._makers.get(name)
            bound[key] = maker() if maker is not None else self._entry(name, set(bound.values()))
        return bound[key]

    def _entry(self, name: str, taken: set[str]) -> str:
        """A random entry of a list, filled; not one of `taken` if possible."""
        entries: list[str] = _DATA["lists"][name]
        free = [entry for entry in entries if entry not in taken]
        return self._expand(self._rng.choice(free or entries))

    def _passage(self) -> str:
        return self._passages.draw(self._used)

    def _draw_foreign(self) -> ForeignText:
        """The prompt's foreign text: a given one or, without any, a composed sentence."""
        if self._foreign_text is None:
            if self._foreign.texts:
                self._foreign_text = self._foreign.draw(self._used)
            else:
                self._foreign_text = ForeignText("German", self._entry("german", set()))
        return self._foreign_text

    def _article(self) -> str:
        """A given passage or, half of the time and without any, a composed news story."""
        if self._passages.texts and self._rng.random() < 0.5:
            return self._passage()
        sentences = split_sentences(self._entry("news", set()))
        drop = self._rng.sample(range(2, len(sentences)), self._rng.randint(0, min(3, len(sentences) - 3)))
        return " ".join(sentence for i, sentence in enumerate(sentences) if i not in drop)

    def _several_passages(self) -> str:
        texts = [self._passage() for _ in range(self._rng.randint(1, 2))]
        return "\n\n".join(texts)

    def _several_docs(self) -> str:
        """Three to five composed encyclopedia entries, sometimes numbered."""
        self._docs = [self._entry("doc", set()) for _ in range(self._rng.randint(3, 5))]
        if self._rng.random() < 0.5:
            return "\n\n".join(f"[{i}] {doc}" for i, doc in enumerate(self._docs, 1))
        return self._rng.choice(["\n\n", "\n"]).join(self._docs)

    def _focus(self) -> str:
        """A name at the beginning of one of the encyclopedia entries in the prompt."""
        names = [match.group() for doc in self._docs for match in [_FOCUS.search(doc)] if match is not None]
        return self._rng.choice(names) if names else "the first one"


def _usable(kind: str, passages: list[str]) -> list[str]:
    """The kind's templates that need no missing texts."""
    missing = () if passages else ("{passage}", "{passages}")
    return [t for t in _DATA["templates"][kind] if not any(name in t for name in missing)]


def _schedule(rng: random.Random, kinds: list[str], count: int) -> list[str]:
    """`count` kinds in random order, in proportion to their weights."""
    total = sum(KIND_WEIGHTS[kind] for kind in kinds)
    plan = [kind for kind in kinds for _ in range(count * KIND_WEIGHTS[kind] // total)]
    plan += rng.choices(kinds, [KIND_WEIGHTS[kind] for kind in kinds], k=count - len(plan))
    rng.shuffle(plan)
    return plan


def templated_prompts(
    seed: int, count: int, passages: list[str], foreign_passages: list[ForeignText]
) -> Iterator[TemplatedPrompt]:
    """Up to `count` different prompts of all kinds, the same for the same arguments; fewer if the templates are
    exhausted. `passages`: texts of about 150 to 400 words. `foreign_passages`: sentences or short paragraphs to
    translate. Without them, texts are composed, or the templates that need them are left out."""
    rng = random.Random(seed)
    filler = _TemplateFiller(rng, passages, foreign_passages)
    templates = {kind: _usable(kind, passages) for kind in KIND_WEIGHTS}
    kinds = [kind for kind, usable in templates.items() if usable]
    seen: set[str] = set()
    for kind in _schedule(rng, kinds, count):
        for _ in range(_RETRIES):
            prompt, used = filler.fill(rng.choice(templates[kind]))
            if prompt.lower() not in seen:
                seen.add(prompt.lower())
                yield TemplatedPrompt(kind, prompt, passages=used)
                break
