"""A fake LLM with the interface that commands need and a fixed answer."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from headstart.api import LLM, Completion, TextDelta
from headstart.config import AUTO, FIXED_DEPTH, Depth, EngineConfig
from headstart.core import DraftStats, SamplingParams, TokenLogprob
from headstart.errors import CapacityError
from headstart.hub import DEFAULT_MODEL

WORDS = ("The ", "sky ", "is ", "blue.")


class FakeLLM:
    """Records its requests. Drafting changes the text only with `differs`."""

    differs = False
    has_chat_template = True
    image_processor: Any = None
    images: list[Any] = []  # noqa: RUF012
    turn_end: tuple[str, ...] = ()
    recommended: dict[str, Any] = {}  # noqa: RUF012
    chat_sampling: dict[str, Any] = {}  # noqa: RUF012
    asked: list[Any] = []  # noqa: RUF012  # cleared by the fixture
    configs: list[EngineConfig] = []  # noqa: RUF012

    def __init__(self, model: str | None = None, config: EngineConfig | None = None, progress: Any = None) -> None:
        self.config = config or EngineConfig()
        self.configs.append(self.config)
        self.model = SimpleNamespace(name=model or DEFAULT_MODEL)
        self.engine = SimpleNamespace(drafting=SimpleNamespace(clear=lambda: None))

    def generate(
        self,
        prompts: list[Any],
        params: SamplingParams,
        *,
        raw: bool = False,
        depth: int | None = None,
        images: Any = (),
    ) -> list[Completion]:
        self.asked += [(prompt, params, raw, depth) for prompt in prompts]
        return [self._completion(params, self.config.depth if depth is None else depth) for _ in prompts]

    decode_pair = LLM.decode_pair

    def _check_open(self) -> None:
        """The fake is never closed."""

    def stream(
        self, prompt: Any, params: SamplingParams, *, raw: bool = False, depth: int | None = None, images: Any = ()
    ) -> Iterator[TextDelta]:
        self.asked.append((prompt, params, raw, depth))
        self.images += images
        if "too long" in str(prompt):
            raise CapacityError("the prompt has 9000 tokens, but the context is 2048", "shorten it")
        for index, word in enumerate(WORDS[:-1]):
            yield TextDelta(word, [index])
        done = self._completion(params, self.config.depth)
        yield TextDelta(WORDS[-1], [len(WORDS) - 1], done.finish_reason, done)

    def _completion(self, params: SamplingParams, asked: Depth) -> Completion:
        depth = FIXED_DEPTH if asked == AUTO else asked
        stats = DraftStats(passes=2 if depth else 4, emitted=4)
        if depth:
            stats.record(depth, 1)
        choices = [self._choice(params, depth, stats, index) for index in range(params.n)]
        choices[0].others = choices[1:]
        return choices[0]

    def _choice(self, params: SamplingParams, depth: int, stats: DraftStats, index: int) -> Completion:
        return Completion(
            index=index, text="".join(WORDS), token_ids=[0, 1, 2, 9 if depth and self.differs else 3],
            prompt_token_ids=[5, 6], finish_reason="stop", seed=params.seed if params.seed is not None else 77,
            usage={"prompt_tokens": 2, "completion_tokens": 4, "cached_tokens": 0}, method="mtp" if depth else "none",
            speculation=stats, timing={"load_s": 0.1, "ttft_s": 0.01, "decode_s": 0.1, "decode_tokens_per_s": 30.0},
            logprobs=[TokenLogprob(0, -0.5, ((0, -0.5),))] if params.logprobs else [],
        )  # fmt: skip
