"""`inspect --deep` tries other readings of a block drafter's weights, to find a config.json that is silently wrong."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import support
from tiny_models import write_tiny

from headstart.core import DraftStats
from headstart.heads.base import BlockSpec, HeadSpec
from headstart.heads.kind import head_kind
from headstart.models.small import random_arrays
from headstart.tools.inspect import run as inspect
from headstart.tools.inspect.deep import LONGER, TOKENS, is_better
from headstart.tools.inspect.readings import HeadReading, block_readings

BLOCK = BlockSpec(block_size=3, num_layers=1, mask_token_id=3, causal=False, anchor_predicts=False)
SPEC = HeadSpec(kind="block", tap=(1, 3), block=BLOCK)


def counts(*per_position: int, drafts: int = 200) -> DraftStats:
    stats = DraftStats(drafts=drafts, drafted=drafts * len(per_position), accepted=sum(per_position))
    stats.per_position, stats.drafted_at = list(per_position), [drafts] * len(per_position)
    return stats


def readings(spec: HeadSpec, layers: int = 5, *, ours: bool = False) -> list[HeadReading]:
    """The readings of a block drafter; `head()` of each gives its spec."""
    read: Any = replace
    return list(block_readings(spec, layers, read, ours=ours))


def test_readings_change_one_setting_and_suggest_a_config_edit() -> None:
    found = {each.description: each for each in readings(SPEC)}
    specs: dict[str, Any] = {description: each.head() for description, each in found.items()}
    blocks = {description: spec.block for description, spec in specs.items()}
    assert blocks == {
        "a RoPE that is interleaved": replace(BLOCK, interleaved=True),
        "rows that see only earlier rows of their block": replace(BLOCK, causal=True, causal_windows=True),
        "layer ids that are one higher": BLOCK,
        "layer ids that are one lower": BLOCK,
        "a first row that drafts too": replace(BLOCK, anchor_predicts=True, block_size=4),
    }
    assert [spec.tap for spec in specs.values() if spec.block == BLOCK] == [(2, 4), (0, 2)]
    assert found["a RoPE that is interleaved"].suggestion == '"is_neox_style": false'
    assert [each.suggestion for each in readings(SPEC, ours=True)] == [
        '"interleaved": true', '"causal": true', "add 1 to each of its layer ids", "add -1 to each of its layer ids",
        '"anchor_predicts": true',
    ]  # fmt: skip
    last = readings(replace(SPEC, tap=(0, 3)), layers=4)[2:]
    assert [each.description for each in last] == ["a first row that drafts too"]
    assert not readings(HeadSpec())


def test_better_reading_must_be_significant() -> None:
    baseline = counts(100, 40, 10)
    assert is_better(counts(140, 90, 50), baseline) and not is_better(counts(108, 45, 14), baseline)
    assert not is_better(counts(3, 2, drafts=4), counts(1, 0, drafts=4))


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [200, 60], ids=["plain", "in doubt"])
@pytest.mark.parametrize("better", [None, "a RoPE that is interleaved"])
def test_deep_names_the_better_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, better: str | None, drafts: int
) -> None:
    """A difference within noise is measured again with longer texts."""
    model = support.tiny_model("llama", num_hidden_layers=5)
    trunk = write_tiny("llama", tmp_path / "trunk", num_hidden_layers=5)
    block = replace(BLOCK, vocab_size=support.VOCAB, draft_vocab_size=support.VOCAB)
    spec = replace(SPEC, layer=support.plain_layer(model.config), block=block)
    arrays = random_arrays(head_kind("block").shapes(spec, model.config.hidden_size))
    head = support.write_head(tmp_path / "head", model.config, spec, arrays)

    max_tokens_seen: list[int] = []

    def accepted(llm: Any, max_tokens: int, finished: Any) -> DraftStats:
        max_tokens_seen.append(max_tokens)
        interleaved = llm.model.head.spec.block.interleaved
        if drafts == 200:
            return counts(150, 100, 50) if interleaved and better else counts(60, 20, 5)
        times = max_tokens // TOKENS
        better_here = interleaved and (better or times == 1)
        return counts(*(times * each for each in ((36, 16, 8) if better_here else (30, 11, 4))), drafts=60 * times)

    monkeypatch.setattr("headstart.tools.inspect.deep.measure_acceptance", accepted)
    report = inspect.run(inspect.InspectOptions(model=str(head), target=str(trunk), deep=True))
    deep, text = report.data["deep"], "\n".join(report.lines)
    assert deep["ran"] and [row["depth"] for row in deep["depths"]] == [3] and len(deep["readings"]) == 5, deep
    assert report.ok == (better is None) and (deep["better"] or {}).get("what") == better
    assert max_tokens_seen == [TOKENS] * 6 + ([LONGER * TOKENS] * 2 if drafts == 60 else [])
    if better and drafts == 200:
        assert report.data["heads"]["verdict"] == "mismatch"
        assert "its weights fit a RoPE that is interleaved: acceptance length 2.50 instead of 1.43" in text
        assert 'in config.json: "interleaved": true' in text
