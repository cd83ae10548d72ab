"""Pre-tokenizers (patterns that split text before BPE) by their names in GGUF files (`tokenizer.ggml.pre`).

The patterns are copied from the models' own tokenizer.json files. llama.cpp approximates some of them, since its
regular expressions have no character classes beyond ASCII.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str, *, contractions: str = _CONTRACTIONS + "|", lines: str = _LINES) -> str:
    return rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{lines}"


def _cased(digits: str, *, contractions: str = "", ends: str = r"[\r\n/]*", excluded: str = "") -> str:
    """A pattern whose words end before an upper-case letter that follows a lower-case one. `excluded`: a class of
    characters that words do not contain."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{excluded}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{excluded}]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{contractions}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{contractions}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+{ends}|{_LINES}"
    )


_ASCII_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_KANA_AND_HAN = r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+",
    r"\s+$",
)
_CJK = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
)
_THREES = r"\d{1,3}(?=(?:\d{3})*\b)"
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uFF0C\u3001\u0964\u06D4\u060C)]+"
_PUNCTUATION = r"[\p{P}$+<=>^~|]+"
_WIDE_SPACES = "".join(rf"|\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))
_JAIS2 = _words(r"\p{N}{1,3}", lines=rf"\s*[\r\n]+{_WIDE_SPACES}|\s{{1,2}}(?!\S)|\s{{1}}")
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_YOUTU = (
    r"[\uAC00-\uD7A3\u3131-\u318E]+|[\uFF01\u2026\u201C\u201D\u2018\u2019\u2014\uFF1A\uFF1B\uFF0C\u3001-\u303F\uFE30-"
    r"\uFE4F]+|[\u3105-\u312F]+|[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"
)
_AFMOE_SCRIPTS = (
    r"[\u4E00-\u9FFF\u3400-\u4DBF\uF900-\uFAFF\u3040-\u309F\u30A0-\u30FF\uFF65-\uFF9F\u2F00-\u2FDF\u0E00-\u0E7F"
    r"\u0E80-\u0EFF\u1780-\u17FF\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF\uAC00-\uD7AF\u1100-\u11FF]+"
)
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
)


@dataclass(frozen=True)
class PreTokenizer:
    """How a text is split before BPE."""

    # in order; a pattern splits each part of the text into its matches and the text between them
    patterns: tuple[str, ...]
    nfc: bool = False  # normalize the text to NFC first
    ignore_merges: bool = False  # a part that is a token stays whole
    add_bos: bool = False  # default of tokenizer.ggml.add_bos_token
    pieces: bool = False  # the vocabulary has sentencepiece's spaces (U+2581) instead of GPT-2's bytes


_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_words(r"\p{N}"),), nfc=True)
_DEEPSEEK = PreTokenizer((r"\p{N}{1,3}", _KANA_AND_HAN, rf"{_ASCII_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"))
_GPT4O = _cased(r"\p{N}{1,3}", contractions=_CONTRACTIONS + "?")
_AYA = PreTokenizer((_THREES, _GPT4O))
_LINES_APART = r"[^\n]+|\n+"
_KIMI = r"\p{Han}+|" + _cased(
    r"\p{N}{1,3}", contractions=_CONTRACTIONS + "?", ends=r"[\r\n]*", excluded=r"&&[^\p{Han}]"
)

_GPT2_NAMES = (
    "gpt-2", "gpt2", "phi-2", "exaone4", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0", "mellum",
    "modern-bert", "roberta-bpe", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de",
    "jina-v2-code",
)  # fmt: skip

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((_PUNCTUATION, _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(_GPT2_NAMES, PreTokenizer((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_GPT2),
    **dict.fromkeys(("mpt", "olmo"), PreTokenizer((_GPT2,), nfc=True)),
    "command-r": PreTokenizer((r"\p{N}", _GPT2), nfc=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0", "jina-v5-nano"),
        _LLAMA3,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_words(r"\p{N}{1,3}"),))),
    **dict.fromkeys(("glm4", "chatglm-bpe", "glm5"), PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan", "kormo", "f2llmv2"), _QWEN2),
    **dict.fromkeys(("stablelm2", "solar-open", "grok-2"), PreTokenizer((_words(r"\p{N}"),))),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK),
    "deepseek-llm": PreTokenizer((*_DEEPSEEK_LLM, _CJK, r"\p{N}")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "spark2_5": PreTokenizer(
        (r"\p{N}{1,3}", _KANA_AND_HAN, rf"{_ASCII_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")
    ),
    "youtu": PreTokenizer((_YOUTU, _cased(r"\p{N}", contractions=_CONTRACTIONS + "?")), ignore_merges=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), PreTokenizer((_GPT4O,))),
    "granite-embed-multi-97m": PreTokenizer((_GPT4O,), ignore_merges=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _AYA),
    "kimi-k2": PreTokenizer((_KIMI,), ignore_merges=True),
    "tekken": PreTokenizer((_cased(r"\p{N}"),), ignore_merges=True, add_bos=True),
    "jais-2": PreTokenizer((_JAIS2,)),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), PreTokenizer((_BLOOM,))),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "chameleon": PreTokenizer((*_CHAMELEON, _GPT2), add_bos=True),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer((_BAILING,))),
    "seed-coder": PreTokenizer(
        (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}",)
    ),
    "ufakzeka": PreTokenizer((_words(r"\p{N}", contractions=""),)),
    "afmoe": PreTokenizer(
        (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _AFMOE_SCRIPTS, rf"{_ASCII_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}")
    ),
    "laguna": PreTokenizer((_LINES_APART, _words(r"\p{N}"))),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True),
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), PreTokenizer((_LINES_APART,), add_bos=True, pieces=True)),
    "sarvam-moe": PreTokenizer((_LINES_APART,), pieces=True),
}
"""`tokenizer.ggml.pre` -> pre-tokenizer: all of llama.cpp b11434 except `whitespace` and `mmbert` (embeddings)."""
