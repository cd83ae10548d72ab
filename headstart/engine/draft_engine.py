"""Texts of a draft model that has another tokenizer than the trunk: an engine beside the trunk's."""

from collections.abc import Sequence as Seq
from itertools import count

from headstart.core import Delta, Request, SamplingParams
from headstart.engine.engine import Engine


class DraftEngine:
    """Continues prompts greedily, all in one batch (drafters.base.TextCompleter)."""

    def __init__(self, engine: Engine, stop_ids: frozenset[int]) -> None:
        self._engine, self._stop_ids, self._ids = engine, stop_ids, count()

    def __call__(self, prompts: Seq[Seq[int]], counts: Seq[int]) -> list[list[int]]:
        found: dict[str, list[int]] = {}
        for prompt, number in zip(prompts, counts, strict=True):
            name = str(next(self._ids))
            found[name] = []
            params = SamplingParams(temperature=0.0, max_tokens=number)
            self._engine.submit(
                Request(request_id=name, prompt_ids=tuple(prompt), params=params, seed=0, stop_ids=self._stop_ids)
            )

        def deliver(deltas: list[Delta]) -> None:
            for delta in deltas:
                found[delta.request_id].extend(delta.tokens)

        while self._engine.has_work:
            self._engine.step(deliver)
        return [*found.values()]
