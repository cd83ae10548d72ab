"""Tests of the templated prompts."""

import re
from collections import Counter

import pytest

from headstart.train.prompts import KIND_WEIGHTS, ForeignText, follow_ups, split_sentences, templated_prompts

PASSAGES = [f"Passage number {i} is about the history of a town. It has several sentences." for i in range(40)]
FOREIGN = [ForeignText("German", f"Dies ist der Satz Nummer {i}.") for i in range(90)]
RECORDS = list(templated_prompts(7, 1000, PASSAGES, FOREIGN))


def test_prompts_are_distinct_and_deterministic() -> None:
    assert list(templated_prompts(7, 1000, PASSAGES, FOREIGN)) == RECORDS
    assert list(templated_prompts(8, 1000, PASSAGES, FOREIGN)) != RECORDS
    assert len({record.prompt.lower() for record in RECORDS}) == len(RECORDS)


def test_kinds_of_prompts_follow_their_weights() -> None:
    kinds = Counter(record.kind for record in RECORDS)
    total = sum(KIND_WEIGHTS.values())
    assert len(RECORDS) == 1000
    for kind, weight in KIND_WEIGHTS.items():
        assert kinds[kind] == pytest.approx(1000 * weight / total, abs=20)


def test_every_placeholder_is_filled() -> None:
    assert not [record.prompt for record in RECORDS if re.search(r"\{[\w#/-]+\}", record.prompt)]
    assert not [record.prompt for record in RECORDS if re.search(r"\ba [aei][a-z]", record.prompt.split("\n")[0])]


def test_prompts_contain_their_passages() -> None:
    assert any(record.passages for record in RECORDS)
    for record in RECORDS:
        texts = [each.text for each in FOREIGN] if record.kind == "translation" else PASSAGES
        assert all(texts[index] in record.prompt for index in record.passages)


def test_all_kinds_work_without_texts() -> None:
    made = list(templated_prompts(1, 400, [], []))
    assert {record.kind for record in made} == set(KIND_WEIGHTS) and not any(record.passages for record in made)


def test_translation_prompt_asks_for_another_language() -> None:
    foreign = [ForeignText("German", f"Das ist Satz {i}.") for i in range(9)]
    foreign += [ForeignText("French", f"Voici la phrase {i}.") for i in range(9)]
    for each in templated_prompts(3, 300, [], foreign):
        if each.kind == "translation":
            given = foreign[each.passages[0]]
            assert given.text in each.prompt
            assert {"German": "French", "French": "German"}[given.language] not in each.prompt


def test_exhausted_kind_ends_without_repetition() -> None:
    made = templated_prompts(1, 3000, PASSAGES, [ForeignText("German", "Guten Tag.")])
    assert 0 < sum(each.kind == "translation" for each in made) <= 8


def test_sentences_are_split_and_follow_ups_are_distinct() -> None:
    assert split_sentences("It rained. We stayed in!  Why not?") == ["It rained.", "We stayed in!", "Why not?"]
    assert len(follow_ups()) == len(set(follow_ups())) > 10
