"""Commands and flags of other programs have a hint with headstart's own."""

import shlex

import pytest
from first_minute import commands, run

from headstart.cli import foreign_flags


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("run llama3", "No such command 'run'.", "headstart chat MODEL, or headstart generate MODEL --prompt TEXT"),
        ("version", "No such command 'version'.", "headstart --version"),
        ("nonsense", "No such command 'nonsense'.", "headstart --help lists all"),
        ("-p Hello", "No such option: -p", "a command comes first: headstart generate MODEL --prompt TEXT, "
         "headstart serve MODEL"),
        ("-V", "No such option: -V", "headstart --version"),
        ("models rm x", "Got unexpected extra argument(s) (rm x)", "headstart models lists all; headstart models "
         "remove MODEL removes one"),
        ("generate m Hello", "Got unexpected extra argument(s) (Hello)", "for a prompt: headstart generate MODEL "
         "--prompt TEXT"),
        ("verify -m x", "No such option: -m", "the model has no flag: headstart verify MODEL"),
        ("generate --model=x", "No such option: --model", "the model has no flag: headstart generate MODEL"),
        ("generate m -ngl 99", "No such option: -ngl", "leave it out: headstart doctor shows the backend that is used"),
        ("generate m -n 128", "No such option: -n", "write --max-tokens or --n"),
        ("generate m -t 8", "No such option: -t", "write --threads or --temperature"),
        ("generate m --max_tokens 8", "No such option: --max_tokens", "write --max-tokens"),
        ("chat m -p Hello", "No such option: -p", "headstart generate MODEL --prompt TEXT"),
        ("plan m --tensor-parallel-size 2", "No such option: --tensor-parallel-size", "write --tp"),
        ("bench m --enforce-eager", "No such option: --enforce-eager", "leave it out"),
        ("ps --port 8123", "No such option: --port", "write --url http://HOST:PORT"),
        ("generate m --chat-template x", "No such option: --chat-template",
         "--chat-template is an option of headstart chat and serve"),
        ("verify --thread 3", "No such option: --thread", "did you mean --threads?"),
        ("verify --zzz 3", "No such option: --zzz", "leave --zzz out; headstart verify --help-all lists all options"),
        ("serve -m x.gguf -ngl 99 -c 4096 -ctk q8_0 -ctv q8_0 --draft-max 64", "No such option: -m",
         "write headstart serve x.gguf --max-model-len 4096 --kv-cache-dtype int8 --depth 16 (without -ngl, -ctv)"),
        ("generate -m x.gguf -p Hello -n 8 --temp 0 --stop a --stop b", "No such option: -m",
         "write headstart generate x.gguf -p Hello --max-tokens 8 --temperature 0 --stop a --stop b"),
        ("generate m -s 42 --n-predict 8", "No such option: -s",
         "write headstart generate m --seed 42 --max-tokens 8"),
        ("bench m -p 512 -n 128 -r 3", "No such option: -p",
         "write headstart bench run m --input-tokens 512 --output-tokens 128 (without -r)"),
        ("serve --hf-repo org/m --hf-file m.gguf", "No such option: --hf-repo", "write headstart serve org/m/m.gguf"),
        ("serve m --max-modle-len 4 --prot 3", "No such option: --max-modle-len", "did you mean --max-model-len?"),
        ("serve m --port x", "--port is 'x', but must be a whole number", "--port N: Port; 0 chooses a free one."),
        ("serve m --no-web=3", "--no-web takes no value", "write --no-web alone, or leave it out"),
        ("serve m --dtype half", "--dtype half cannot be honoured",
         "the checkpoint's own files decide it: leave it out"),
        ("serve m --disable-radix-cache", "No such option: --disable-radix-cache", "write --no-enable-prefix-caching"),
        ("serve m --enable-metrics", "No such option: --enable-metrics", "leave it out: /metrics is always there"),
        ("serve m --per-request-spec-decode-metrics summary",
         "--per-request-spec-decode-metrics summary cannot be honoured",
         "usage.speculation of each answer has the counts: leave it out"),
        ("serve m --rope-scaling {}", "--rope-scaling {} cannot be honoured",
         "the checkpoint's own files decide it: leave it out"),
        ("plan m x y", "Got unexpected extra argument(s) (x y)", "leave them out"),
        ("inspekt m", "No such command 'inspekt'.", "did you mean inspect?"),
        ("probe", "URL is missing", "for example: headstart probe http://localhost:8000"),
    ],
)  # fmt: skip
def test_foreign_flag_has_a_hint(line: str, message: str, hint: str) -> None:
    outcome = run(tuple(shlex.split(line)))
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines() == [f"headstart: error: {message}", f"hint: {hint}"]


def test_table_of_foreign_flags_names_existing_options() -> None:
    known = {flag for command in commands().values() for flag in command.flags}
    assert foreign_flags.OPTIONS.keys() - known == {foreign_flags.MODEL}
    assert not foreign_flags.COMMANDS.keys() & {name.partition(" ")[0] for name in commands()}
