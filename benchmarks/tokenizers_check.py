"""Tokenizers beside the programs whose files they read: the same ids for hard texts?

    python benchmarks/tokenizers_check.py --llama-source LLAMA
    python benchmarks/tokenizers_check.py --gguf model.gguf --llama-source LLAMA
    python benchmarks/tokenizers_check.py --mistral

--llama-source  llama.cpp's source and `build/bin`. Its `models/ggml-vocab-*.gguf` are vocabularies of published models,
                most with the ids that the models' own tokenizers give (`.inp`, `.out`); each is also compared with
                `llama-tokenize`, on texts of tests/text/hard_texts.py, as are the files of --gguf.
--mistral       the tekken.json and tokenizer.model files inside the package mistral-common, beside mistral-common and
                sentencepiece (which must be installed).

Exit code 1 on a difference that is not one of those in `KNOWN`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from headstart.errors import ModelError
from headstart.formats.gguf_file import read
from headstart.text import _ranked, _sentencepiece_file
from headstart.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/text"))
from hard_texts import HARD

DIVIDER = "\n__ggml_vocab_test__\n"
KNOWN = {
    "qwen35": "its tokenizer composes characters (NFC), llama.cpp does not",
    "qwen2": "llama.cpp takes the plain token </s> for a control token, and does not compose characters (NFC)",
    "aquila": "llama.cpp takes the plain token <|endoftext|> for a control token",
    "phi-3": "llama.cpp drops spaces behind its control tokens",
    "tekken": "llama.cpp's pattern knows capitals in ASCII only",
    "gpt-4o": "llama.cpp's pattern knows capitals in ASCII only",
}
"""Vocabularies, by a part of their file's name or their pre-tokenizer's, in which headstart follows the model's own
tokenizer where llama.cpp does not."""


def compared(name: str, pairs: Iterable[tuple[str, list[int], list[int]]]) -> int:
    """Prints a row, and the first differences; the number of them."""
    total, different = 0, []
    for text, ours, theirs in pairs:
        total += 1
        if ours != theirs:
            different.append((text, ours, theirs))
    print(f"| {name} | {total} | {len(different)} |", flush=True)
    for text, ours, theirs in different[:3]:
        at = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        print(f"    {text[:60]!a}: token {at}: {ours[at : at + 6]} here, {theirs[at : at + 6]} there")
    return len(different)


def llama_ids(program: Path, model: Path) -> Callable[[str], list[int]]:
    def ids(text: str) -> list[int]:
        command = [program, "-m", model, "--stdin", "--ids", "--no-bos", "--no-escape", "--log-disable"]
        out = subprocess.run(command, input=text.encode(), capture_output=True, check=True).stdout.decode()
        return [int(word) for word in out.strip().strip("[]").split(",") if word.strip()]

    return ids


def check_gguf(file: Path, program: Path) -> int:
    metadata = read(file).metadata
    pre = str(metadata.get("tokenizer.ggml.pre", metadata.get("tokenizer.ggml.model")))
    try:
        tokenizer = Tokenizer.from_gguf(metadata, str(file))
    except ModelError as error:
        print(f"| {file.name} | refused: {error.message} | |")
        return 0
    wrong = 0
    known = pre in KNOWN or any(word in file.name for word in KNOWN)
    inputs, outputs = file.with_name(file.name + ".inp"), file.with_name(file.name + ".out")
    if inputs.exists():
        texts = inputs.read_bytes().decode().split(DIVIDER)
        lines = outputs.read_text().split("\n")
        found = compared(
            f"{file.name}, expected ids",
            (
                (text, tokenizer.encode(text), list(map(int, line.split())))
                for text, line in zip(texts, lines, strict=False)
            ),
        )
        wrong += 0 if known else found
    theirs = llama_ids(program, file)
    found = compared(f"{file.name}, llama-tokenize", ((t, tokenizer.encode(t), theirs(t)) for t in HARD if t))
    return wrong + (0 if known else found)


def check_mistral() -> int:
    import mistral_common
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    from sentencepiece import SentencePieceProcessor

    wrong = 0
    data = Path(mistral_common.__file__).parent / "data"
    for file in sorted(data.glob("tekken*.json")):
        ours, theirs = _ranked.from_tekken(file)[0], Tekkenizer.from_file(file)
        ours.encode_special_tokens = True
        pairs = (
            (t, ours.encode(t, add_special_tokens=False).ids, theirs.encode(t, bos=False, eos=False)) for t in HARD
        )
        wrong += compared(file.name, pairs)
    for file in sorted(data.glob("*.model*")):
        inner, _, _ = _sentencepiece_file.build(file, {})
        inner.encode_special_tokens = True
        library = SentencePieceProcessor(model_file=str(file))
        pairs = ((t, inner.encode(t, add_special_tokens=False).ids, library.encode(t)) for t in HARD)
        wrong += compared(file.name, pairs)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-source", type=Path)
    parser.add_argument("--gguf", type=Path, nargs="*", help="instead of llama.cpp's vocabularies")
    parser.add_argument("--mistral", action="store_true")
    args = parser.parse_args()
    if not (args.llama_source or args.mistral):
        parser.error("say --llama-source or --mistral")
    print("| vocabulary | texts | different |\n|---|---|---|")
    wrong = check_mistral() if args.mistral else 0
    if args.llama_source:
        for file in args.gguf or sorted((args.llama_source / "models").glob("ggml-vocab-*.gguf")):
            wrong += check_gguf(file, args.llama_source / "build/bin/llama-tokenize")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
