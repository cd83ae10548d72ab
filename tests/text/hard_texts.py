"""Texts on which tokenizers differ: classes of characters, digits, spaces, newlines, contractions, emoji, names of
special tokens. All characters are composed, as tokenizers differ in Unicode normalization."""

HARD = (
    "", " ", "  ", "\t", "\n", "\n\n\n", " \n \r\n\t x", "a\u00a0b\u2003c\u3000d\u200be\ufeff", "Hello world",
    " Hello  World   twice",
    "Hello, y'all! I'M you'LL we'Ve it's 'tis d'Art \u2019s 's'S",
    "0 12 123 1234 12345.678 1,234,567 0x1F 1e-9 ١٢٣ ½ Ⅷ ² \uff11\uff12",
    "camelCase HTTPServer ÉCOLE İstanbul ǅungla straße ẞ Àéî",
    "def f(x):\n    return x ** 2  # no\n\n\nclass A:\n\tpass",
    "if (a<b && c!=d) {return a?b:c;} // ~`@#$%^&*()_+-=[]{}|;':\",./<>?\\",
    "https://example.com/a?b=c&d=%20#frag me@example.org", "日本語の文。カタカナｶﾅ 中文\uff0c混合abc123。한국어 텍스트",
    "नमस्ते สวัสดี កាន់តែ مرحبا שׁלום", "нещо на Български Ελληνικά Cửa Việt",
    "🎉👨\u200d👩\u200d👧 😶\u200d🌫\ufe0f ✅ 🇳🇴 👍🏽",
    "\U00010348 \U0001d504 \U000e0041 \ufffd \ufdfa \u2028\u2029\u0085\u000b\u000c",
    "<s> </s> <|im_start|>user\n<|endoftext|> [INST] x [/INST] <unk> <0x0A> \u2581 \u2581\u2581a",
    "!!!!!!??...---___===***~~~ ''''' \"\"\" ``` \u2026\u2014\u201cq\u201d",
    "x" * 70 + " " * 20 + "9" * 20 + "\n" * 9,
)  # fmt: skip
