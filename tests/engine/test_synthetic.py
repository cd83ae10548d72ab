"""Synthetic acceptance: rates, determinism by seed, marks in every output, refusal where the text matters."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import EOS, OracleDrafter, agreeing_model, headed_model, make, request, run

from headstart.cli.generate import summary
from headstart.cli.main import main
from headstart.config import EngineConfig, parse_speculative_config
from headstart.core import FORCED, VerifyResult
from headstart.engine.verify import SyntheticVerifier
from headstart.errors import UsageError
from headstart.server.accounts import Accounts
from headstart.server.admission import Admission
from headstart.server.metrics import ServerMetrics
from headstart.tools.verify import run as verify
from headstart.tools.verify.options import VerifyOptions

RATES = "0.8,0.5,0.2"


def test_acceptance_rates_are_met() -> None:
    """rates[i] is the share of drafts whose first i + 1 tokens are accepted; tokens after the last rate are
    rejected."""
    verifier = SyntheticVerifier((0.8, 0.5, 0.2))
    accepted = np.array([verifier.verify([1] * 5, [0] * 6, 7, 0, 5 * i).num_accepted for i in range(4000)])
    np.testing.assert_allclose([(accepted > i).mean() for i in range(5)], (0.8, 0.5, 0.2, 0, 0), atol=0.025)
    # Accepted draft tokens are emitted even if the model chose others; the next token is the model's.
    for rates, tokens in (((1.0, 1.0), (7, 8, 3)), ((1.0, 0.0), (7, 2)), ((0.0,), (1,))):
        assert SyntheticVerifier(rates).verify([7, 8], [1, 2, 3], 0, 0, 9) == VerifyResult(tokens, 2, len(tokens) - 1)


def test_acceptance_is_drawn_per_position_choice_and_seed() -> None:
    verifier = SyntheticVerifier((0.5,))

    def num_accepted_by_position(seed: int, choice: int) -> list[int]:
        return [verifier.verify([1], [0, 0], seed, choice, place).num_accepted for place in range(200, 600)]

    assert num_accepted_by_position(1, 0) == num_accepted_by_position(1, 0)
    assert len({tuple(num_accepted_by_position(*each)) for each in ((1, 0), (1, 1), (2, 0), (1 + 2**40, 0))}) == 4


def outputs(prompts: int, **settings: Any) -> Any:
    engine = make(headed_model("llama"), drafter="mtp", depth=3, synthetic_acceptance=RATES, **settings)
    requests = [request([5, 6, 7 + i], name=f"r{i}", seed=i, max_tokens=60, stops=()) for i in range(prompts)]
    return engine, run(engine, requests)


def test_engine_accepts_drafts_at_the_set_rates() -> None:
    """Drafts of this random head are almost never right."""
    engine, _ = outputs(4)
    at = np.array(engine.stats.per_position) / engine.stats.drafts
    np.testing.assert_allclose(at, (0.8, 0.5, 0.2), atol=0.12)
    assert engine.stats.document("mtp")["synthetic_acceptance"] == [0.8, 0.5, 0.2]


@pytest.mark.slow
def test_batch_and_preemption_keep_tokens_and_logprobs_are_of_emitted_tokens() -> None:
    alone, together = outputs(3, max_num_seqs=1)[1], outputs(3, kv_blocks=20)[1]
    assert {key: each.tokens for key, each in alone.items()} == {key: each.tokens for key, each in together.items()}
    engine = make(headed_model("llama"), drafter="mtp", depth=3, synthetic_acceptance="1,1,1")
    (output,) = run(engine, [request([5, 6], max_tokens=20, stops=(), logprobs=0)]).values()
    assert [each.token for each in output.logprobs if each] == output.tokens


def test_forced_grammar_tokens_are_verified_by_the_model() -> None:
    engine = make(headed_model("llama"), drafter="mtp", depth=3, synthetic_acceptance="0")
    submitted = request([5, 6], max_tokens=12, stops=())
    plain = run(make(headed_model("llama"), drafter="none"), [submitted])

    class ForcedDrafter(OracleDrafter):
        def propose(self, requests: Any) -> None:
            super().propose(requests)
            for each in requests:
                each.sequence.draft.method = FORCED

    engine.drafting.drafter = ForcedDrafter(plain, 0, 0.0)
    assert run(engine, [submitted])["r", 0].tokens == plain["r", 0].tokens
    assert engine.drafting.drafter.proposed > 3 and engine.stats.passes < 12


def test_metrics_and_summary_report_synthetic_acceptance_only_if_enabled() -> None:
    engine, _ = outputs(1)
    metrics = ServerMetrics(engine, "m", Admission(Accounts(), 1)).registry.collect()
    samples = [sample for metric in metrics for sample in metric.samples]
    assert [sample.value for sample in samples if sample.name == "headstart:synthetic_acceptance"] == [0.8, 0.5, 0.2]
    completion = SimpleNamespace(speculation=engine.stats, method="mtp", usage={"completion_tokens": 3},
                                 timing={"decode_tokens_per_s": 1.0}, is_truncated=False)  # fmt: skip
    assert "SYNTHETIC ACCEPTANCE at 0.8, 0.5, 0.2" in summary(completion)
    engine = make(agreeing_model("llama"), drafter="mtp", depth=3)
    run(engine, [request([5, 6, EOS + 1], max_tokens=10)])
    assert engine.synthetic is None and "synthetic_acceptance" not in engine.stats.document("mtp")


@pytest.mark.parametrize("text", ["", "a", "0.5,0.6", "1.1", "-0.1", "nan", "0.5;0.4", ",".join(["0.5"] * 17)])
def test_invalid_rates_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--synthetic-acceptance is"):
        EngineConfig(synthetic_acceptance=text)
    with pytest.raises(UsageError, match="--rule rejection"):
        EngineConfig(synthetic_acceptance="0.5", rule="rejection")


def test_vllm_speculative_config_is_parsed() -> None:
    rates = {"method": "mtp", "synthetic_acceptance_rates": [0.8, 0.5]}
    found = parse_speculative_config(json.dumps({**rates, "rejection_sample_method": "synthetic"}))
    assert EngineConfig(**found).synthetic_rates == (0.8, 0.5)
    assert parse_speculative_config('{"rejection_sample_method": "standard"}') == {}
    for wrong in (rates, {**rates, "rejection_sample_method": "block"}, {"rejection_sample_method": "synthetic"}):
        with pytest.raises(UsageError, match="rejection_sample_method is"):
            parse_speculative_config(json.dumps(wrong))


@pytest.mark.parametrize("command", ["verify", "demo", "chat", "tune", "data --out x", "bench step"])
def test_commands_that_need_true_text_refuse_synthetic_acceptance(command: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["headstart", *command.split(), "--synthetic-acceptance", "0.5"])
    assert main() == 2 and "load tests" in capsys.readouterr().err
    with pytest.raises(UsageError, match="changes the model's text"):
        verify.run(VerifyOptions(config=EngineConfig(synthetic_acceptance="0.5")))
