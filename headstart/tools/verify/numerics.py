"""`headstart verify --numerics`: compares a backend's logits with float32 arithmetic on the file's own weights.

Both score the same texts (each prompt with this backend's greedy answer) by teacher forcing, through the passes that
serve requests. Every row that predicts a token of the text is compared. Shapes: R rows, V vocabulary.
"""

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import Float32, Float64, Progress, Report, Request, SamplingParams, Sequence, Span, no_progress
from headstart.engine.build import build_engine
from headstart.engine.load import Model, load_model
from headstart.kernels.backend import ORACLE, select_backend
from headstart.tools.verify.options import Prompt, VerifyOptions, plain_config

ROWS = 64  # rows per pass, whose logits of both models are in memory at a time
MIN_AGREEMENT, MAX_KL = 0.90, 0.1  # limits of top-1 agreement (share of rows) and mean KL (nats)


@dataclass(frozen=True, eq=False)
class RowScores:
    """Differences of two models' logits; all arrays are [R]."""

    kl: Float64  # KL(reference || backend) in nats
    agrees: NDArray[np.bool_]  # the most likely tokens are the same
    surprise: Float64  # -log p of the text's next token, by the backend
    reference_surprise: Float64  # the same by the reference
    logit_difference: Float64  # largest absolute difference of a logit


def run(options: VerifyOptions, progress: Progress = no_progress) -> Report:
    """Scores and compares one configuration. Raises UsageError if torch, which the reference needs, is missing."""
    asked = options.config
    # the user's other choices, such as a weight format, are what is measured
    reference_config = EngineConfig(backend=ORACLE, threads=asked.threads, block_size=asked.block_size)
    select_backend(reference_config)  # fails before the work begins
    config = replace(asked, drafter="none", depth=0)
    model = load_model(options.model, config)
    prompts = options.texts
    texts = _texts(LLM(model, config), prompts, options, progress)
    longest = max(map(len, texts))
    ours = TeacherForcing(model, config, longest)
    theirs = TeacherForcing(load_model(options.model, reference_config), reference_config, longest)
    parts = []
    for index, text in enumerate(texts):
        scores = zip(theirs.logits(text), ours.logits(text), strict=True)
        for number, (reference, logits) in enumerate(scores):
            parts.append(compare(reference, logits, text[1 + number * ROWS :]))
        progress(len(prompts) + index + 1, 2 * len(prompts), "scoring")
    return summarize(model, asked, _joined(parts), len(texts))


def _texts(llm: LLM, prompts: Seq[Prompt], options: VerifyOptions, progress: Progress) -> list[list[int]]:
    done = count(1)

    def finished(index: int, completion: Any) -> None:
        progress(next(done), 2 * len(prompts), "answering")

    answers = llm.generate(prompts, SamplingParams(max_tokens=options.max_tokens), raw=options.raw, on_finish=finished)
    return [[*each.prompt_token_ids, *each.token_ids] for each in answers]


class TeacherForcing:
    def __init__(self, model: Model, config: EngineConfig, longest: int) -> None:
        blocks = -(-longest // config.block_size)
        alone = replace(plain_config(config), max_model_len=longest, kv_blocks=blocks)
        self._engine = build_engine(model, alone)

    def logits(self, tokens: Seq[int]) -> Iterator[Float32]:
        """Yields the logits [up to ROWS, V] after each token but the last, in order."""
        runner, memory = self._engine.runner, self._engine.memory
        prompt, params = tuple(tokens), SamplingParams()
        request = Request(request_id="forced", prompt_ids=prompt, params=params, seed=0, stop_ids=frozenset())
        sequence = Sequence(request, 0, list(tokens), 0)
        assert memory.reserve(sequence, len(tokens)), "the blocks are made for the longest text"
        for start in range(0, len(tokens) - 1, ROWS):
            num_rows = min(ROWS, len(tokens) - 1 - start)
            yield runner.backend.numpy(runner.forward([Span(sequence, start, num_rows, num_rows)]).logits)
        memory.release(sequence)


def compare(reference: Float32, logits: Float32, following: Seq[int]) -> RowScores:
    """Compares logits [R, V]. `following` begins with the R tokens that the rows predict."""
    rows = np.arange(len(logits))
    tokens = np.asarray(following[: len(rows)], np.int64)
    expected, actual = _log_softmax(reference), _log_softmax(logits)
    return RowScores(
        kl=np.maximum((np.exp(expected) * (expected - actual)).sum(-1), 0),
        agrees=reference.argmax(-1) == logits.argmax(-1),
        surprise=-actual[rows, tokens],
        reference_surprise=-expected[rows, tokens],
        logit_difference=np.abs(reference.astype(np.float64) - logits).max(-1),
    )


def _log_softmax(logits: Float32) -> Float64:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    shifted: Float64 = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return shifted


def _joined(parts: Seq[RowScores]) -> RowScores:
    return RowScores(**{name: np.concatenate([getattr(each, name) for each in parts]) for name in vars(parts[0])})


def summarize(model: Model, config: EngineConfig, rows: RowScores, num_texts: int) -> Report:
    """Returns the report. `ok`: differences are finite and within MIN_AGREEMENT and MAX_KL."""
    median, p99 = np.quantile(rows.kl, (0.5, 0.99)).tolist()
    kl = {"mean": float(rows.kl.mean()), "median": median, "p99": p99, "max": float(rows.kl.max())}
    agreement = float(rows.agrees.mean())
    surprises = {"backend": rows.surprise, "reference": rows.reference_surprise}
    perplexity = {name: float(np.exp(each.mean())) for name, each in surprises.items()}
    difference = float(rows.logit_difference.max())
    ok = agreement >= MIN_AGREEMENT and kl["mean"] <= MAX_KL
    name = model.backend.name
    data = {
        "ok": ok, "model": model.name, "backend": name, "dtype": config.dtype, "texts": num_texts, "rows": len(rows.kl),
        "kl": kl, "top1_agreement": agreement, "perplexity": perplexity, "max_logit_difference": difference,
    }  # fmt: skip
    table = {
        "rows compared": f"{len(rows.kl)} of {num_texts} texts",
        "KL(float32 || this)": ", ".join(f"{key} {value:.3g}" for key, value in kl.items()) + " nats",
        "top-1 agreement": f"{agreement:.2%}",
        "perplexity": f"{perplexity['backend']:.4f}, in float32 {perplexity['reference']:.4f}",
        "largest |dlogit|": f"{difference:.3g}",
    }
    lines = [f"{model.name}: backend {name} against reference in float32, teacher-forced"]
    lines += [f"  {key:<20} {value}" for key, value in table.items()]
    if not ok:
        limits = f"a top-1 agreement below {MIN_AGREEMENT:.0%} or a mean KL above {MAX_KL} nats"
        lines.append(f"BROKEN: no quantization explains {limits}")
    return Report(ok=ok, data=data, lines=lines)
