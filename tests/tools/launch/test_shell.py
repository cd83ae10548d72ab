"""Shell text is parsed, and only stale flags in it change."""

import subprocess

import pytest
from hypothesis import given, settings, strategies as st

from headstart.errors import UsageError
from headstart.tools.launch.command_line import commands, plain_typography, quoted
from headstart.tools.launch.translate import translate_text

CURRENT = (
    "vllm serve m --max-model-len 4096",
    """vllm serve "$MODEL" --speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'""",
    'vllm serve ~/models/m \\\n  --port ${PORT:-8000} \\\n  --api-key "$(cat key)"',
    "python3 -m sglang.launch_server --model-path $M --tp 8 --mem-fraction-static=0.8",
    "./llama-server -m m.gguf --spec-type draft-mtp -ngl all",
    "docker run --rm -v ~/.cache:/root/.cache -e A=b vllm/vllm-openai:latest --model m --port 80",
)
AROUND = (
    "{}",
    "{} > log 2>&1 &",
    "cd x && {} || exit 1",
    "for i in 1 2; do\n  A=$i {} | tee log-$i\ndone",
    "# a note\n{}  # end",
    "export A=1; nohup {} &>> log &\nsleep 5",
    "if true; then {}; fi",
    "(cd y; {})",
    "cat <<EOF > f\nvllm serve x --draft 1\nEOF\n{}",
    "X=$(date +%s)\nwhile ! curl -s localhost/health; do sleep 1; done & {}",
    "time numactl -N 0 {}",
    "bash -c 'echo hi' ; {} 2> >(tee err)",
)


@given(st.sampled_from(CURRENT), st.sampled_from(AROUND), st.sampled_from(AROUND))
@settings(max_examples=60, deadline=None)
def test_current_command_lines_are_unchanged(line: str, around: str, outside: str) -> None:
    text = outside.replace("{}", around.replace("{}", line))
    done = translate_text(text, None, None)
    assert (done.text, done.warnings) == (text, [])


@given(st.sampled_from(AROUND), st.sampled_from(AROUND))
@settings(max_examples=40, deadline=None)
def test_text_around_a_stale_flag_is_unchanged(around: str, outside: str) -> None:
    old = "vllm serve m --num-speculative-tokens 2 --speculative-model '[ngram]' --port 80"
    shell = outside.replace("{}", around)
    done = translate_text(shell.replace("{}", old), None, None)
    before, _, after = shell.partition("{}")
    assert done.text.startswith(before) and done.text.endswith(f" --port 80{after}")
    assert '"method": "ngram"' in done.text and "--num-speculative-tokens" not in done.text


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_random_text_is_parsed_or_refused(text: str) -> None:
    try:
        for tokens in commands(plain_typography(text)):
            for token in tokens:
                assert 0 <= token.begin < token.end
    except UsageError as error:
        assert error.hint


@pytest.mark.parametrize(("value", "word"), [
    ("a b", "'a b'"), ("$HOME/m", "$HOME/m"), ("$A b", '"$A b"'), ("~/m", "~/m"),
    ('{"a": "$B"}', '"{\\"a\\": \\"$B\\"}"'),
    ("{}", "'{}'"), ("it's", "'it'\"'\"'s'"), ("${A}", "${A}"), ("$(date +%s)", '"$(date +%s)"'),
])  # fmt: skip
def test_words_are_quoted_for_the_shell(value: str, word: str) -> None:
    assert quoted(value) == word
    shown = subprocess.run(["bash", "-c", f"HOME=/h A=1 B=2; printf %s {word}"], capture_output=True, text=True)
    assert shown.returncode == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("bash -c 'vllm serve $M --num-lookahead-slots 3'", "bash -c 'vllm serve $M'"),
        ('bash -c "vllm serve $M --num-lookahead-slots 3"', 'bash -c "vllm serve $M"'),
        ("""vllm serve m -sc '{"method": "deepseek_mtp", "model": "$X"}'""",
         """vllm serve m --speculative-config '{"method": "mtp", "model": "$X"}'"""),
        ("vllm serve m --speculative-model $H --num-speculative-tokens $K",
         'vllm serve m --speculative-config "{\\"model\\": \\"$H\\", \\"num_speculative_tokens\\": $K}"'),
        ("ExecStart=/usr/bin/vllm serve m --use-v2-block-manager", "ExecStart=/usr/bin/vllm serve m"),
        ("kubectl exec p -- vllm serve m --enable-chunked-prefill False",
         "kubectl exec p -- vllm serve m --no-enable-chunked-prefill")],
)  # fmt: skip
def test_quoting_of_expansions_is_kept(old: str, new: str) -> None:
    done = translate_text(old, "0.32.0", None)
    assert (done.text, done.warnings) == (new, [])


def test_flags_beside_a_variable_are_left_with_a_warning() -> None:
    done = translate_text("vllm serve m --speculative-config $CFG --num-speculative-tokens 2", "0.32.0", None)
    assert "$CFG" in done.text and "belongs into $CFG" in done.warnings[0]
