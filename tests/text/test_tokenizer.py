"""Tokenizers from tokenizer.json and GGUF metadata: encoding, decoding, special tokens, errors."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import decoders, models, pre_tokenizers
from toy_tokenizers import SCORES, WORDS, byte_level, sentencepiece

from headstart.errors import ModelError
from headstart.formats import open_checkpoint
from headstart.hub import cached_trunk
from headstart.text import _gguf_tokenizer, _sentencepiece
from headstart.text._sentencepiece import merges_by_score
from headstart.text.pre_tokenizers import PRE_TOKENIZERS
from headstart.text.tokenizer import Tokenizer

PRE_KEYS = ("tokenizer.ggml.model", "tokenizer.ggml.pre")
TEXTS = [
    "hello hello  world\n\n\tI'm you'LL 12345.678 x=0x1F", "日本語 привет नमस्ते é ½ Ⅷ ² 🎉👨‍👩‍👧",
    " leading, trailing \r\n ", "\u00a0nbsp\u3000wide \ufeff", "", "def f(x):\n    return x ** 2  # no\n",
]  # fmt: skip


@pytest.mark.parametrize("pre", sorted({rule: name for name, rule in PRE_TOKENIZERS.items()}.values()))
def test_every_pre_tokenizer_keeps_the_text(pre: str) -> None:
    metadata = byte_level(pre)
    if PRE_TOKENIZERS[pre].pieces:
        metadata = sentencepiece(**{"tokenizer.ggml.merges": []}) | {key: metadata[key] for key in PRE_KEYS}
    tokenizer = Tokenizer.from_gguf(metadata)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(("pre", "text", "pieces"), [
    ("gpt-2", "a 1234  b", ["a", "Ġ1234", "Ġ", "Ġb"]), ("smollm", "a 12\n3", ["a", "Ġ", "1", "2", "Ċ", "3"]),
    ("llama-bpe", "a 12345!\n\nX'S", ["a", "Ġ", "123", "45", "!ĊĊ", "X", "'S"]),
    ("qwen2", "(abc) 12", ["(abc", ")", "Ġ", "1", "2"]), ("qwen35", "a\u0301b", ["aÌģb"]),
    ("qwen2", "b\u0301c", ["b", "Ìģc"]),
    ("deepseek-v3", "abc日本1234", ["abc", "æĹ¥æľ¬", "123", "4"]),
    ("deepseek-llm", "a日本 b12", ["a", "æĹ¥æľ¬", "Ġb", "1", "2"]),
    ("tekken", "HelloWorld 12", ["Hello", "World", "Ġ", "1", "2"]),
    ("glm4", "it's 1234", ["it", "'s", "Ġ", "123", "4"]),
])  # fmt: skip
def test_pre_tokenizer_splits(pre: str, text: str, pieces: list[str]) -> None:
    inner = _gguf_tokenizer.build(byte_level(pre), "test")
    assert [piece for piece, _ in inner.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_special_tokens() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    bos, eos, user = (tokenizer.vocabulary()[name] for name in ("<s>", "</s>", "<think> x"))
    assert tokenizer.eos_ids == {eos, tokenizer.vocabulary()["<|eot|>"]} and tokenizer.bos_id == bos
    assert tokenizer.special_ids == {bos, eos, tokenizer.vocabulary()["<|eot|>"]}
    assert tokenizer.vocab_size == 270
    assert tokenizer.encode("<s>hello</s>") == [bos, tokenizer.vocabulary()["hello"], eos]
    plain = tokenizer.encode("<s>hello</s>", parse_special=False)
    assert bos not in plain and tokenizer.decode(plain) == "<s>hello</s>"
    assert tokenizer.encode("<s>") == [bos]  # the default mode is unchanged
    ids = tokenizer.encode("<s>a<think> xb</s>")
    assert user in ids
    assert tokenizer.decode(ids) == "a<think> xb"
    assert tokenizer.decode(ids, skip_special=False) == "<s>a<think> xb</s>"
    assert user in tokenizer.encode("a<think> xb", parse_special=False)


@pytest.mark.parametrize(("metadata", "ends"), [
    (byte_level(), (False, False)), (byte_level("llama-bpe"), (True, False)),
    (byte_level("llama-bpe") | {"tokenizer.ggml.add_bos_token": False}, (False, False)),
    (byte_level() | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, (True, True)),
    (sentencepiece(), (True, False)),
])  # fmt: skip
def test_add_special_adds_bos_and_eos(metadata: dict[str, object], ends: tuple[bool, bool]) -> None:
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode("hello", add_special=True)
    assert (ids[0] == tokenizer.bos_id, ids[-1] in tokenizer.eos_ids) == ends
    assert tokenizer.encode("hello") == ids[ends[0] : len(ids) - ends[1]]


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (["<|end|>", "<|im_end|>"], {"<|end|>", "<|im_end|>"}),
        (["<|end|>", "<|call|>", "<|return|>"], {"<|call|>", "<|return|>"}),  # gpt-oss: <|end|> ends a channel only
        (["<|call|>", "<|endoftext|>", "<|fim_pad|>", "<|fim_middle|>"], {"<|call|>", "<|endoftext|>", "<|fim_pad|>"}),
    ],
)
def test_end_of_text_tokens_are_found_by_name(names: list[str], ends: set[str]) -> None:
    metadata = byte_level()
    del metadata["tokenizer.ggml.eot_token_id"]
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *names, "<turn|>"]
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], [3] * len(names) + [1])
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.eos_ids == {tokenizer.vocabulary()[name] for name in ends | {"</s>"}}


def reference_pieces(text: str) -> list[str]:
    """Reference for sentencepiece: joins the neighbours with the best score until no pair is in the vocabulary."""
    score = dict(zip(WORDS, SCORES, strict=True))
    parts = list("▁" + text.replace(" ", "▁"))
    while found := [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score]:
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


@pytest.mark.slow
@given(st.text(alphabet="helowrd ", min_size=1, max_size=24))
@settings(deadline=None, max_examples=200)
def test_sentencepiece_merges_by_score(text: str) -> None:
    inner = _gguf_tokenizer.build(sentencepiece(), "test")
    assert inner.encode(text, add_special_tokens=False).tokens == reference_pieces(text)


def test_merges_of_equal_and_reserved_tokens() -> None:
    """Of equal tokens the first id and score are used. Control and byte tokens are parts of merges, but no results."""
    rows = [
        ("a", 0, 1), ("b", 0, 1), ("<0xC3>", 0, 6), ("<0xC3>a", -1, 1), ("aa", -2, 1), ("ab", -1, 1), ("aab", 0, 1),
        ("ab", 5, 1), ("ba", 0, 3), ("", 0, 1), ("bb", 0, 1), ("bb", 0, 6),
    ]  # fmt: skip
    tokens, scores, types = (list(each) for each in zip(*rows, strict=True))
    best_first = [("a", "ab"), ("aa", "b"), ("<0xC3>", "a"), ("a", "b"), ("a", "a")]
    assert merges_by_score(tokens, scores, types) == best_first


def test_merges_of_a_large_vocabulary_are_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A damaged cache file is replaced. Another score has another cache file."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    monkeypatch.setattr(_sentencepiece, "_CACHED_SIZE", 1)
    tokens = ["", "a", "b", "ab", "é", "aé", "abaé", "ab"]
    merges = merges_by_score(tokens, [0.0] * 8, [1] * 8)
    (file,) = (tmp_path / "tokenizers").iterdir()
    whole = file.read_bytes()
    for content in (whole[:-4], b"", whole[:-1] + b"x"):
        file.write_bytes(content)
        assert merges_by_score(tokens, [0.0] * 8, [1] * 8) == merges
        assert file.read_bytes() == whole
    with monkeypatch.context() as patch:
        patch.delattr(_sentencepiece, "_find_merges")
        assert merges_by_score(tokens, [0.0] * 8, [1] * 8) == merges
    assert merges_by_score(tokens, [1.0, 1, 1, 1, 1, 2, 1, 1], [1] * 8) == [merges[1], merges[0], *merges[2:]]
    assert len(list((tmp_path / "tokenizers").iterdir())) == 2


def test_sentencepiece_tokens_with_stored_merges() -> None:
    """Gemma 4's GGUF files have sentencepiece tokens with merges instead of scores."""
    plain = sentencepiece(**{"tokenizer.ggml.add_space_prefix": False})
    tokens, kinds = plain["tokenizer.ggml.tokens"], plain["tokenizer.ggml.token_type"].tolist()
    merges = [" ".join(pair) for pair in merges_by_score(tokens, [0.0] * 259 + SCORES, kinds)]
    written = {**plain, "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges}
    del written["tokenizer.ggml.scores"]
    for text in ("hello", "hello world  hello", "né\n\nhell", " x"):
        expected, found = Tokenizer.from_gguf(plain), Tokenizer.from_gguf(written)
        assert found.encode(text) == expected.encode(text, add_special=False)
        assert found.decode(found.encode(text)) == text
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.merges is missing"):
        Tokenizer.from_gguf({**written, "tokenizer.ggml.merges": None})


def test_sentencepiece_falls_back_to_bytes() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    for text in ("hello 🎉 é", " two", "x", "  "):
        assert tokenizer.decode(tokenizer.encode(text, add_special=True)) == text
    assert Tokenizer.from_gguf(sentencepiece() | {"tokenizer.ggml.add_space_prefix": False}).encode("he") == [
        3 + 256 + 8
    ]


@given(st.lists(st.integers(0, 300), max_size=12))
@settings(deadline=None)
def test_byte_level_decode_equals_the_librarys(ids: list[int]) -> None:
    inner = _gguf_tokenizer.build(byte_level(), "test")
    tokenizer = Tokenizer(inner)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == inner.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=12))
@settings(deadline=None)
def test_sentencepiece_decode_equals_the_librarys(text: str) -> None:
    inner = _gguf_tokenizer.build(sentencepiece(), "test")
    tokenizer = Tokenizer(inner)
    ids = tokenizer.encode(text, add_special=True)
    assert tokenizer.decode(ids) == inner.decode(ids)


def test_invalid_ids_surrogates_and_partial_characters() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    assert tokenizer.decode([-1, 10_000, 2**40]) == ""
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"
    half = tokenizer.encode("é")[0]
    assert tokenizer.token_text(half) == "\ufffd" and tokenizer.token_bytes(half) == b"\xc3"


@pytest.mark.parametrize(("change", "message"), [
    ({"tokenizer.ggml.pre": "new-thing"}, "pre-tokenizer 'new-thing' is not known"),
    ({"tokenizer.ggml.pre": ["x"]}, "is not known"), ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'"),
    ({"tokenizer.ggml.model": None}, "None"), ({"tokenizer.ggml.tokens": []}, "missing or empty"),
    ({"tokenizer.ggml.merges": None}, "merges is missing"),
    ({"tokenizer.ggml.merges": ["h zz"]}, "the merge 'h' 'zz'"),
    ({"tokenizer.ggml.model": "llama"}, "scores does not fit"),
])  # fmt: skip
def test_broken_gguf_tables(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_gguf(byte_level() | change, "m.gguf")


def write_directory(path: Path) -> tokenizers.Tokenizer:
    inner = _gguf_tokenizer.build(byte_level(), "test")
    inner.save(str(path / "tokenizer.json"))
    return inner


def test_from_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json, .*tekken"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "vocab.json").touch()
    with pytest.raises(ModelError, match="save the tokenizer once"):
        Tokenizer.from_directory(tmp_path)
    inner = write_directory(tmp_path)
    end, turn = inner.token_to_id("</s>"), inner.token_to_id("<|eot|>")
    assert Tokenizer.from_directory(tmp_path).eos_ids == set()
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 7}}))
    assert Tokenizer.from_directory(tmp_path).eos_ids == {7}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    config = {"eos_token": {"content": "<|eot|>"}, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_ids == {end, turn} and tokenizer.bos_id == inner.token_to_id("<s>")
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text("utf-8"), encoding="utf-8-sig")  # as some editors save it
    assert Tokenizer.from_directory(tmp_path).eos_ids == {end, turn}
    file.write_text("{}")
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_metaspace_and_unknown_decoders() -> None:
    inner = tokenizers.Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "▁a": 2}, merges=[("▁", "a")]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(inner)
    assert tokenizer.decode(tokenizer.encode("a a")) == "a a" == inner.decode(inner.encode("a a").ids)
    for decoder in (decoders.WordPiece(), None):
        inner.decoder = decoder
        with pytest.raises(ModelError, match="decoder"):
            Tokenizer(inner)


@pytest.mark.skipif(cached_trunk() is None, reason="the default model is not in the cache")
def test_default_model_has_the_ids_of_its_published_tokenizer() -> None:
    trunk = cached_trunk()
    assert trunk is not None
    tokenizer = open_checkpoint(trunk).load_tokenizer()
    assert tokenizer.eos_ids == {0, 2} and tokenizer.vocab_size == 49152  # <|endoftext|> ends texts as in llama.cpp
    # The published tokenizer.json of the model: single digits, then GPT-2's pattern.
    inner = tokenizer._inner
    inner = tokenizers.Tokenizer.from_str(inner.to_str())
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>\n", Path(__file__).read_text()]:
        assert tokenizer.encode(text) == inner.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
