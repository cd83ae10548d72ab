"""Numbers of tokens, shared by tokens of the same normalized text, for memories of n-grams (DeepSeek-V4.1).

Normalized: NFKC, NFD, without accents, lower case, white space as one space, none at the ends. Source: transformers
`models/deepseek_v41` (0a2080b4), `build_compressed_token_map`.
"""

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, normalizers

KEPT = "\ue000"  # stands for a single space while the ends are cut
NORMALIZER = normalizers.Sequence(
    [
        normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex(r"^ $"), KEPT), normalizers.Strip(),
        normalizers.Replace(KEPT, " "),
    ]
)  # fmt: skip


def normalized_numbers(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """int64 [tokens]: in the order of their first tokens, 0, 1, ... A part of a character has its own number."""
    count, numbers = tokenizer.get_vocab_size(with_added_tokens=True), dict[str, int]()
    texts = tokenizer.decode_batch([[token] for token in range(count)], skip_special_tokens=False)

    def key(token: int, text: str) -> str:
        if "\ufffd" in text:
            return str(tokenizer.id_to_token(token))
        return NORMALIZER.normalize_str(text) or text

    return np.array([numbers.setdefault(key(*pair), len(numbers)) for pair in enumerate(texts)], np.int64)
