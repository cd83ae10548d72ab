"""`headstart plan`: speed, memory and cost of a model on a machine, predicted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from headstart.cli.options import OptionGroup, OutputOptions, option
from headstart.cli.render import print_table

EXAMPLES = (
    "headstart plan deepseek-v4 --gpu h200x4 --batch 1,4,8,32 --price-per-hour 3.31 --api-price 0.9",
    "headstart plan ./my-model --gpu 4090 --weights int4 --acceptance 0.85,0.7,0.6 --context 8000",
    "headstart plan gemma-4 --gpu 4090 --weights int4 --kv-dtype fp8 --drafter all",
    "headstart plan deepseek-v4 --gpu h200x4 --price-per-hour spot --api-price list",
    "headstart plan --gpu here --batch 1,8,32",
    "headstart plan deepseek-v4 --gpu h200x8 --fleet '100 req/s, 1500 in, 300 out, TTFT 1 s, TPOT 40 ms'",
    "headstart plan --published",
)

Model = Annotated[
    str | None,
    typer.Argument(help="A card such as deepseek-v4, a directory, a .gguf file or a repo id; none: the default model."),
]


@dataclass(frozen=True, kw_only=True)
class PlanFlags(OptionGroup):
    """What plan predicts for; defaults are PlanOptions'."""

    gpu: str = option("Device and count, such as h200x4; here: this machine, measured.", default="here")
    batches: str = option("Sequences decoded together, comma-separated.", "--batch", default="1,4,8")
    context: int | None = option("Positions of each sequence, prompt included. Default: 2048, or the model's own.")
    drafter: str | None = option(
        "mtp, eagle3, medusa, dflash, ngram, draft_model, none, all; comma-separated. Default: the model's own."
    )
    head: str | None = option("A drafter with files of its own, or the model that drafts.")
    acceptance: str | None = option("Shares by position (each given that those before stood), or a length.")
    depths: str | None = option("Tokens drafted, comma-separated. Default: the best of 0 to 8.", "--depth")
    weights: str | None = option("bf16, fp8, int8, int4, nvfp4, ... Default: what it comes in.")
    kv_dtype: str | None = option("Cache: bf16 (default), fp8, int8, ...")
    tp: int | None = option("Tensor parallelism. Default: all devices.")
    ep: int | None = option("Expert parallelism: all devices, or 1 (default).")
    price_per_hour: str | None = option("Dollars for one device, or on-demand, or spot; gives the cost of tokens.")
    api_price: str | None = option("Dollars an API asks for a million tokens, or list: when is it beaten?")
    price_list: str | None = option("Your own prices, as a TOML file like the built-in one.")
    fleet: str | None = option(
        "A load, such as '100 req/s, 1500 in, 300 out, TTFT 1 s, TPOT 40 ms' (for p95, or say p99): how many machines, "
        "and does it pay to compute prompts on others than tokens (at 100 Gbit/s, or say 25 Gbit/s)?"
    )
    recalibrate: bool = option("Measure this machine again.", default=False)
    published: bool = option("Instead: what others have published beside what is predicted for it.", default=False)


def run(model: Model = None, *, flags: PlanFlags, output: OutputOptions) -> int:
    """Predict speed with and without drafting, best depth, memory, first token and cost of a model on a machine."""
    from headstart.tools.plan import run as plan

    if flags.published:
        return output.run("planning", lambda progress: plan.compare_published(), _print_published)
    values = flags.parsed(batches=int, depths=int)
    del values["published"]
    options = plan.PlanOptions(model=model, **values)
    return output.run("planning", partial(plan.run, options), _print_fleet if options.load else _print_plan)


def _print_fleet(data: dict[str, Any]) -> None:
    _print_machine(data)
    if "fleet" not in data:
        return
    found = data["fleet"]
    print(f"load     {found['load']}")
    rows = []
    for each in found["rows"]:
        if each["machines"] is None:
            rows.append([each["drafter"], "none suffices", each["why"], *[""] * 4])
            continue
        first, token, cost = each["ttft_s"], each["tpot_s"], each["dollars_per_hour"]
        rows.append([
            each["drafter"], f"{each['machines']:,}", f"{first['p50']:.2f} / {first['asked']:.2f}",
            f"{token['p50'] * 1e3:.1f} / {token['asked'] * 1e3:.1f}", f"{each['busy']:.0%}", f"{each['batch']:.0f}",
            "" if cost is None else f"{cost:,.2f} ({each['dollars_per_million']:.3f})",
        ])  # fmt: skip
    asked = f"p{found['share']:g}"
    columns = [
        "drafter", f"machines\n({found['machine']})", f"TTFT s\np50 / {asked}", f"TPOT ms\np50 / {asked}", "busy",
        "sequences\nat a time", "$ an hour\n($/M tokens)",
    ]  # fmt: skip
    print_table(columns, rows)
    if found["apart"] is not None:
        print(_of_apart(found["apart"], asked))


def _of_apart(found: dict[str, Any], asked: str) -> str:
    """Whether machines for prompts and others for tokens are better, and why."""
    whole, apart, step, sent = found["whole"], found["apart"], found["step_s"], found["handed_over"]
    count = "no number" if whole["machines"] is None else f"{whole['machines']:,}"
    does = f"{count} that do both (steps of {whole['rows']:,} rows{_times(whole, asked)})"
    if apart is None:
        said = f"does not pay: even {2 * whole['machines']:,} machines of each kind do not suffice, but {does}"
    else:
        split = f"{apart['prompts']:,} + {apart['tokens']:,} machines for prompts and tokens"
        said = f"{'pays' if found['pays'] else 'does not pay'}: {split}{_times(apart, asked)} against {does}"
        said += f"; busy {apart['prompts_busy']:.0%} and {apart['tokens_busy']:.0%}"
    return (
        f"apart    {said}\n         a step of {step['sequences']} sequences takes {step['alone'] * 1e3:.1f} ms, with a "
        f"prompt in it {step['with_a_prompt'] * 1e3:.1f} ms; {sent['bytes'] / 1e6:,.0f} MB of a prompt take "
        f"{sent['seconds'] * 1e3:,.0f} ms to another machine at {sent['gbit_per_s']:g} Gbit/s"
    )


def _times(of: dict[str, Any], asked: str) -> str:
    """At the share that is asked for."""
    return f", {asked} {of['ttft_s']:.2f} s and {of['tpot_s'] * 1e3:.1f} ms" if "ttft_s" in of else ""


def _print_machine(data: dict[str, Any]) -> None:
    room, model = data["memory"], data["model"]
    active = f" ({model['active_parameters'] / 1e9:.2f} B active)" if model["experts"] else ""
    print(f"model    {model['name']}: {model['parameters'] / 1e9:.2f} B parameters{active}, {model['weights']}")
    print(
        f"machine  {data['machine']['name']}, tensor parallel {data['machine']['tp']}, expert {data['machine']['ep']}"
    )
    fits = (
        f"room for {room['max_batch']:,} sequences of {data['context']:,}"
        if room["fits"]
        else f"DOES NOT FIT: {room['devices_needed']} devices hold the weights"
    )
    weights, cache = room["weight_bytes_per_device"] / 1e9, room["cache_bytes_per_sequence"] / 1e6
    usable = room["usable_bytes"] / 1e9
    print(f"memory   {weights:.2f} GB of weights and {cache:.1f} MB a sequence on each device, {usable:.1f} GB: {fits}")


def _print_plan(data: dict[str, Any]) -> None:
    _print_machine(data)
    print(f"prompt   first token of {data['context']:,} positions alone after {data['ttft_s'] * 1e3:.0f} ms")
    priced = data["batches"][0]["plain"]["dollars_per_million"] is not None
    several = len(data["drafters"]) > 1
    columns = [
        "batch",
        *(["drafter"] if several else []),
        "depth",
        "step ms",
        "draft ms",
        "tokens\n/step",
        "tok/s a\nstream",
        "tok/s",
        "speed-up",
    ]
    rows = []
    for each in data["batches"]:
        for index, speed in enumerate((each["plain"], *each["drafting"])):
            if index and speed["depth"] == 0:
                continue
            shown = f"{each['batch']}{'' if each['fits'] else ' (no room)'}" if not index else ""
            rows.append(_plan_row([shown, speed["drafter"] if index else "none"][: 1 + several], speed, priced))
    best = ", ".join(
        f"{each['best_drafter'] + ' ' if several else ''}{each['best_depth']} at batch {each['batch']}"
        for each in data["batches"]
    )
    print_table([*columns, "$/M tokens"] if priced else columns, rows, footer=f"best depth: {best}")


def _plan_row(first: list[str], speed: dict[str, Any], priced: bool) -> list[str]:
    cells = [
        *first,
        str(speed["depth"]),
        f"{speed['step_ms']:.2f}",
        f"{speed['draft_ms']:.2f}",
        f"{speed['tokens_per_step']:.2f}",
        f"{speed['tokens_per_s_per_stream']:.1f}",
        f"{speed['tokens_per_s']:,.0f}",
        f"{speed['speedup']:.2f}x",
    ]
    return [*cells, f"{speed['dollars_per_million']:.3f}"] if priced else cells


def _print_published(data: dict[str, Any]) -> None:
    rows, before = [], ""
    for row in data["figures"]:
        low, high = row["published"]
        shown = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        who = "" if row["who"] == before else row["who"]
        before = row["who"]
        rows.append((who, row["what"], shown, f"{row['predicted']:.4g}", f"{row['error']:+.0%}"))
    print_table(("published", "figure", "is", "predicted", "error"), rows)
    before = ""
    for row in data["figures"]:
        if not row["verdict"].startswith("within"):
            if (assumed := data["assumed"][row["who"]]) != before:
                print(f"assumed: {assumed}")
            before = assumed
            print(f"  - {row['who']}, {row['what']}: {row['verdict']}")
