"""Tokenizers from sentencepiece, tekken and tiktoken files; GGUF tokenizers compared with transformers'."""

import base64
import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hard_texts import HARD
from hypothesis import given, settings, strategies as st
from toy_tokenizers import SCORES, WORDS, byte_level, sentencepiece
from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

from headstart.errors import ModelError
from headstart.text.tokenizer import Tokenizer

RANKED = [bytes([byte]) for byte in range(256)] + [
    word.encode() for word in ("he", "ll", "hell", "hello", " he", " hell", " hello", "12", "llo", "日", "日本", "\n\n")
]


def varint(value: int) -> bytes:
    more = b""
    while value > 0x7F:
        more, value = more + bytes([value & 0x7F | 0x80]), value >> 7
    return more + bytes([value])


def part(number: int, value: Any) -> bytes:
    """A field of a protocol buffer message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def model_file(folder: Path, model: int, *, squeeze: bool = False, **rules: Any) -> Path:
    """`sentencepiece()` of toy_tokenizers.py as a sentencepiece file."""
    toy = sentencepiece()
    kinds = {1: 1, 2: 2, 3: 3, 6: 6}
    rows = zip(
        toy["tokenizer.ggml.tokens"],
        toy["tokenizer.ggml.scores"].tolist(),
        toy["tokenizer.ggml.token_type"].tolist(),
        strict=True,
    )
    pieces = [part(1, part(1, t.encode()) + part(2, s) + part(3, kinds[k])) for t, s, k in rows]
    norm = part(1, b"identity") + part(3, int(rules.get("prefix", True))) + part(4, int(squeeze))
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(b"".join(pieces) + part(2, part(3, model) + part(35, 1)) + part(3, norm))
    return folder


def test_sentencepiece_file_has_the_ids_of_its_gguf_file(tmp_path: Path) -> None:
    ours, gguf = Tokenizer.from_directory(model_file(tmp_path, 2)), Tokenizer.from_gguf(sentencepiece())
    assert (ours.bos_id, ours.eos_ids, ours.special_ids) == (gguf.bos_id, gguf.eos_ids, gguf.special_ids)
    for text in HARD:
        for special, parse in ((True, True), (False, False)):
            assert ours.encode(text, special, parse) == gguf.encode(text, special, parse)


def test_spaces_and_special_tokens_follow_the_config(tmp_path: Path) -> None:
    """`legacy: false` puts a space at the start only, as transformers' LlamaTokenizer does."""
    from transformers import LlamaTokenizer

    folder = model_file(tmp_path, 2)
    config = {"legacy": False, "add_bos_token": False, "add_eos_token": True, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.from_directory(folder)
    merges = json.loads(ours.to_json())["model"]["merges"]
    oracle = LlamaTokenizer(vocab=ours.vocabulary(), merges=[tuple(pair) for pair in merges])
    for text in HARD:
        assert ours.encode(text) == oracle.encode(text, add_special_tokens=False)
    assert ours.encode("hello", add_special=True) == [*ours.encode("hello"), 2]
    plain = Tokenizer.from_directory(model_file(tmp_path / "b", 2, prefix=False))
    assert plain.decode(plain.encode("hello")) == "hello" and len(plain.encode("he")) == 1


def best_score(text: str) -> float:
    """The best sum of scores over all segmentations of `text` into words of the toy vocabulary."""
    score = dict(zip(WORDS, SCORES, strict=True))
    sums = [0.0]
    for end in range(1, len(text) + 1):
        sums.append(max(sums[a] + score[text[a:end]] for a in range(end) if text[a:end] in score))
    return sums[-1]


@pytest.mark.slow
@given(st.text(alphabet="helowrd ", min_size=1, max_size=16))
@settings(deadline=None, max_examples=60)
def test_unigram_segmentation_has_the_best_score(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    tokenizer = Tokenizer.from_directory(model_file(tmp_path_factory.mktemp("unigram"), 1))
    words = [WORDS[token - 259] for token in tokenizer.encode(text)]
    assert "".join(words) == "▁" + text.replace(" ", "▁")
    score = dict(zip(WORDS, SCORES, strict=True))
    assert sum(score[word] for word in words) == pytest.approx(best_score("▁" + text.replace(" ", "▁")))


def test_unigrams_from_sentencepiece_and_gguf_files_agree(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.model": "t5", "tokenizer.ggml.add_space_prefix": True}
    gguf = Tokenizer.from_gguf({**sentencepiece(**changes), "tokenizer.ggml.remove_extra_whitespaces": True})
    ours = Tokenizer.from_directory(model_file(tmp_path, 1, squeeze=True))
    for text in ("  hello   world ", "hello", "<s>hello"):
        assert ours.encode(text) == gguf.encode(text)
    assert ours.decode(ours.encode("  hello   world ")) == "hello world"
    assert gguf.encode("hello", add_special=True)[-1] == 2


def ranked_ids(data: bytes) -> list[int]:
    """Reference for tiktoken: joins the neighbours with the lowest rank until no pair has a rank."""
    rank = {word: number for number, word in enumerate(RANKED)}
    parts = [bytes([byte]) for byte in data]
    if data in rank:
        return [rank[data]]
    while found := [(rank[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in rank]:
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [rank[word] for word in parts]


def tekken_file(folder: Path, **changes: Any) -> Path:
    vocab = [{"rank": i, "token_bytes": base64.b64encode(w).decode(), "token_str": None} for i, w in enumerate(RANKED)]
    more = {"rank": len(vocab), "token_bytes": base64.b64encode(b"beyond").decode(), "token_str": "beyond"}
    config = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "num_vocab_tokens": len(vocab) + 1, "default_vocab_size": len(vocab) + 30, "default_num_special_tokens": 30,
        "version": "v3",
    }  # fmt: skip
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": [*vocab, more]} | changes))
    return folder


def test_tekken_file(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(tekken_file(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, {2}, 30 + len(RANKED))
    assert tokenizer.encode("hello", add_special=True) == [1, 30 + RANKED.index(b"hello")]
    assert tokenizer.encode("[INST]hell") == [3, 30 + RANKED.index(b"hell")]
    for text in HARD:
        ids = tokenizer.encode(text, parse_special=False)
        assert tokenizer.decode(ids) == text
    words = ["hello", " hello", "hellhe", "llohe", "\n\n"]
    for word in words:
        assert tokenizer.encode(word) == [30 + token for token in ranked_ids(word.encode())]
    listed = [{"rank": 0, "token_str": "<unk>"}, {"rank": 1, "token_str": "<s>"}, {"rank": 2, "token_str": "</s>"}]
    newer = Tokenizer.from_directory(tekken_file(tmp_path, special_tokens=[*listed, {"rank": 9, "token_str": "[X]"}]))
    assert newer.encode("[X]") == [9] and newer.encode("[INST]") != [3]


def test_tiktoken_file_of_kimi(tmp_path: Path) -> None:
    lines = [base64.b64encode(word) + b" %d" % number for number, word in enumerate(RANKED)]
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(ModelError, match="its pattern is in code"):
        Tokenizer.from_directory(tmp_path)
    first = len(RANKED)
    config = {
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {str(first): {"content": "[BOS]", "special": True}},
        "bos_token": "[BOS]",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.bos_id == first and tokenizer.vocab_size == first + 256
    assert tokenizer.encode("日本hello日") == [RANKED.index(w.encode()) for w in ("日本", "hello", "日")]
    assert tokenizer.encode("123 HELLO") and tokenizer.decode(tokenizer.encode("a<[BOS]b"), False) == "a<[BOS]b"


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "gpt-2"])
def test_ids_equal_those_of_transformers(pre: str) -> None:
    """transformers builds its tokenizer from the same metadata. Names without a pattern there use GPT-2's class."""
    metadata = byte_level(pre)
    keys = theirs.GGUF_TOKENIZER_MAPPING["tokenizer"]
    named = {name: metadata[f"tokenizer.{key}"] for key, name in keys.items() if f"tokenizer.{key}" in metadata}
    named["token_type"] = named["token_type"].tolist()
    oracle, _ = theirs.convert_gguf_tokenizer("llama", named)
    ours = Tokenizer.from_gguf(metadata)
    for text in (text.replace("<|endoftext|>", "<|eot|>") for text in HARD):  # GPT2Tokenizer adds this token
        assert ours.encode(text) == oracle.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(("pre", "text", "pieces"), [
    ("kimi-k2", "漢字かなAbc1234", ["漢字", "かなAbc", "123", "4"]),
    ("afmoe", "1234567 ไทยabc", ["1", "234", "567", " ", "ไทย", "abc"]),
    ("tiny_aya", "1234567 x", ["1", "234", "567", " x"]), ("superbpe", "a b1234567", ["a b", "1", "234", "567"]),
    ("viking", "abc, d 12", ["abc", ",", " d", " ", "1", "2"]),
    ("falcon", "a+=b12345 x", ["a", "+=", "b", "123", "45", " x"]),
    ("default", "ab 12345", ["ab", " ", "123", "45"]), ("bailingmoe", "it's\n\nx", ["it", "'s", "\n\n", "x"]),
    ("exaone-moe", "a b c!\n\n", ["a b c", "!\n", "\n"]), ("seed-coder", "a!\n\nb", ["a", "!", "\n\n", "b"]),
    ("ufakzeka", "it's", ["it", "'s"]), ("ufakzeka", "I'll", ["I", "'ll"]),
    ("laguna", "a.\n\nb", ["a", ".", "\n\n", "b"]),
    ("jais-2", "a" + " " * 7 + "b", ["a", "    ", "  ", " b"]),
    ("minicpm5", "x12345", ["x", "123", "45"]), ("youtu", "한국 日本、ab", ["한국", " ", "日本", "、", "ab"]),
    ("spark2_5", "a!\nb", ["a", "!", "\n", "b"]), ("chameleon", "a  b1", ["a", "  ", "b", "1"]),
])  # fmt: skip
def test_splits_of_further_pre_tokenizers(pre: str, text: str, pieces: list[str]) -> None:
    steps = json.loads(Tokenizer.from_gguf(byte_level(pre)).to_json())["pre_tokenizer"]["pretokenizers"][:-1]
    from tokenizers import Regex, pre_tokenizers

    cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(s["pattern"]["Regex"]), "isolated") for s in steps])
    assert [piece for piece, _ in cut.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(("name", "content", "message"), [
    ("tokenizer.model", b"", "no pieces"),
    ("tokenizer.model", b"\x0a\xff\x01ab", "not a sentencepiece model"),
    ("tokenizer.model", b"\xff" * 12, "not a sentencepiece model"),
    ("tokenizer.model", part(1, part(1, b"a")) + part(2, part(3, 4)), "of type 4"),
    ("tokenizer.model", part(1, part(1, b"a")) + part(2, part(3, 1) + part(40, 9)), "table of pieces is broken"),
    ("tekken.json", b"[]", "not a tekken file"),
    ("tekken.json", b'{"config": {}, "vocab": []}', "not a tekken file"),
])  # fmt: skip
def test_broken_tokenizer_files_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_directory(tmp_path)


def test_inconsistent_ids_are_refused(tmp_path: Path) -> None:
    folder = model_file(tmp_path, 2)
    config = {"added_tokens_decoder": {"400": {"content": "<x>", "special": True}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="cannot have the id 400"):
        Tokenizer.from_directory(folder)
    broken = byte_level() | {"tokenizer.ggml.model": "t5", "tokenizer.ggml.scores": np.zeros(270, np.float32)}
    del broken["tokenizer.ggml.token_type"]
    with pytest.raises(ModelError, match="token_type does not fit"):
        Tokenizer.from_gguf(broken)
    ranks = tekken_file(tmp_path / "t" if (tmp_path / "t").mkdir() is None else tmp_path)
    document = json.loads((ranks / "tekken.json").read_text())
    document["vocab"][5]["rank"] = 6
    (ranks / "tekken.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match="its ranks are not 0 to"):
        Tokenizer.from_directory(ranks)
