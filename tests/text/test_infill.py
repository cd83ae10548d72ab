"""Infill prompts with the special tokens of the model."""

import numpy as np
import pytest
from toy_tokenizers import CONTROL, byte_level

from headstart.errors import ParameterError
from headstart.text.infill import MARKERS, infill_prompt
from headstart.text.tokenizer import Tokenizer


@pytest.mark.parametrize("markers", MARKERS)
def test_infill_prompt_uses_the_models_tokens(markers: tuple[str, str, str]) -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *markers]
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], [CONTROL] * 3)
    tokenizer = Tokenizer.from_gguf(metadata)
    before, after, middle = (tokenizer.id_of(each) for each in markers)
    ids = tokenizer.encode(infill_prompt(tokenizer, "hello", "12"))
    assert ids == [before, *tokenizer.encode("hello"), after, *tokenizer.encode("12"), middle]


def test_model_without_infill_tokens_is_refused() -> None:
    with pytest.raises(ParameterError, match="no tokens that mark a gap"):
        infill_prompt(Tokenizer.from_gguf(byte_level()), "hello", "12")
