"""How far two candidate tokens of one row are apart, in float64: the referee of verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import GREEDY_BELOW, SamplingParams
from headstart.kernels import philox
from headstart.kernels.backend import ORACLE

TIE = 1e-3
"""Scores closer than this are a tie: float32 rounding may order them either way."""


class Judge:
    """Recomputes single rows on a float64 reference engine that is loaded when the first difference shows up.

    `tie`: scores closer than this are a tie; 0 where rounding excuses nothing."""

    def __init__(self, model: str | None, config: EngineConfig, tie: float = TIE) -> None:
        self._model, self._tie = model, tie
        plain = replace(config, drafter="none", depth=0, max_num_seqs=1, enable_prefix_caching=False)
        self._config = replace(plain, backend=ORACLE, dtype="float64", kv_blocks=None)
        self._llm: LLM | None = None

    def margin(self, context: Sequence[int], a: int, b: int, params: SamplingParams) -> tuple[float, bool]:
        """|score(a) - score(b)| of the token after `context` at these parameters (temperature and seed), and
        whether that is a tie. score = logit / T + Gumbel noise, or the logit when greedy."""
        if self._llm is None:
            self._llm = LLM(self._model, self._config)
        # the raw log-softmax differs from the logits by a constant of the row only
        logprobs = [self._logprob(self._llm, context, token) for token in (a, b)]
        if params.temperature < GREEDY_BELOW:
            scores = logprobs
        else:
            noise = philox.numpy_gumbel(np.array([a, b]), params.seed or 0, len(context), 0, philox.TOKEN)
            scores = [value / params.temperature + g for value, g in zip(logprobs, noise.tolist(), strict=True)]
        gap = abs(scores[0] - scores[1])
        return gap, gap < self._tie

    @staticmethod
    def _logprob(llm: LLM, context: Sequence[int], token: int) -> float:
        """The raw logprob of `token` after `context`: the token is forced, which its raw logprob does not show."""
        params = SamplingParams(max_tokens=1, logprobs=0, logit_bias={token: 100.0}, ignore_eos=True)
        entry = llm.generate([list(context)], params)[0].logprobs[0]
        assert entry.token == token, "a bias of 100 is more than any trunk says"
        return entry.logprob
