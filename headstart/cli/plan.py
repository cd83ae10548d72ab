"""`headstart plan`: speed, memory and cost of a model on a machine, predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from headstart.cli.options import OptionGroup, OutputOptions, comma_list
from headstart.cli.render import finish, print_table, progress

EXAMPLES = (
    "headstart plan deepseek-v4 --gpu h200x4 --batch 1,4,8,32 --price-per-hour 3.31 --api-price 0.9",
    "headstart plan ./my-model --gpu 4090 --weights int4 --acceptance 0.85,0.7,0.6 --context 8000",
    "headstart plan --gpu here --batch 1,8,32",
    "headstart plan --published",
)

Model = Annotated[
    str | None,
    typer.Argument(help="A card such as deepseek-v4, a directory, a .gguf file or a repo id; none: the default model."),
]


@dataclass(frozen=True, kw_only=True)
class PlanFlags(OptionGroup):
    """What plan predicts for; defaults are PlanOptions'."""

    gpu: Annotated[
        str, typer.Option("--gpu", help="Device and count, such as h200x4; here: this machine, measured.")
    ] = "here"
    batch: Annotated[str, typer.Option("--batch", help="Sequences decoded together, comma-separated.")] = "1,4,8"
    context: Annotated[
        int, typer.Option("--context", help="Positions of each sequence; also the prompt of the first token's time.")
    ] = 2048
    acceptance: Annotated[
        str | None,
        typer.Option("--acceptance", help="Shares by position (each given that those before stood), or a length."),
    ] = None
    depth: Annotated[
        str | None, typer.Option("--depth", help="Tokens drafted, comma-separated. Default: the best of 0 to 8.")
    ] = None
    weights: Annotated[
        str | None, typer.Option("--weights", help="bf16, fp8, int8, int4, nvfp4, ... Default: what it comes in.")
    ] = None
    kv_dtype: Annotated[str | None, typer.Option("--kv-dtype", help="Cache: bf16 (default), fp8, int8, ...")] = None
    tp: Annotated[int | None, typer.Option("--tp", help="Tensor parallelism. Default: all devices.")] = None
    ep: Annotated[int | None, typer.Option("--ep", help="Expert parallelism: all devices, or 1 (default).")] = None
    price_per_hour: Annotated[
        float | None, typer.Option("--price-per-hour", help="Dollars for one device; gives the cost of tokens.")
    ] = None
    api_price: Annotated[
        float | None, typer.Option("--api-price", help="Dollars an API asks for a million tokens: when is it beaten?")
    ] = None
    recalibrate: Annotated[bool, typer.Option("--recalibrate", help="Measure this machine again.")] = False
    published: Annotated[
        bool, typer.Option("--published", help="Instead: what others have published beside what is predicted for it.")
    ] = False


def run(model: Model = None, *, flags: PlanFlags, output: OutputOptions) -> int:
    """Predict speed with and without drafting, best depth, memory, first token and cost of a model on a machine."""
    from headstart.tools.plan import run as plan

    if flags.published:
        report = plan.compare_published()
        if not output.as_json:
            _print_published(report.data)
        return finish(report, output.as_json)
    options = plan.PlanOptions(
        model=model,
        gpu=flags.gpu,
        batches=comma_list("--batch", flags.batch, int),
        context=flags.context,
        acceptance=flags.acceptance,
        depths=comma_list("--depth", flags.depth, int),
        weights=flags.weights,
        kv_dtype=flags.kv_dtype,
        tp=flags.tp,
        ep=flags.ep,
        price_per_hour=flags.price_per_hour,
        api_price=flags.api_price,
        recalibrate=flags.recalibrate,
    )
    with progress("planning", quiet=output.as_json) as report_progress:
        report = plan.run(options, report_progress)
    if not output.as_json:
        _print_plan(report.data)
    return finish(report, output.as_json)


def _print_plan(data: dict[str, Any]) -> None:
    room, model = data["memory"], data["model"]
    print(f"model    {model['name']}: {model['parameters'] / 1e9:.2f} B parameters, {model['weights']}")
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
    print(f"prompt   first token of {data['context']:,} positions alone after {data['ttft_s'] * 1e3:.0f} ms")
    priced = data["batches"][0]["plain"]["dollars_per_million"] is not None
    columns = ["batch", "depth", "step ms", "draft ms", "tokens\n/step", "tok/s a\nstream", "tok/s", "speed-up"]
    rows = []
    for each in data["batches"]:
        for index, speed in enumerate((each["plain"], *each["with_mtp"])):
            if index and speed["depth"] == 0:
                continue
            shown = f"{each['batch']}{'' if each['fits'] else ' (no room)'}" if not index else ""
            rows.append(_plan_row(shown, speed, priced))
    print_table([*columns, "$/M tokens"] if priced else columns, rows, footer=_verdict(data["batches"]))


def _plan_row(batch: str, speed: dict[str, Any], priced: bool) -> list[str]:
    cells = [
        batch,
        str(speed["depth"]),
        f"{speed['step_ms']:.2f}",
        f"{speed['draft_ms']:.2f}",
        f"{speed['tokens_per_step']:.2f}",
        f"{speed['tokens_per_s_per_stream']:.1f}",
        f"{speed['tokens_per_s']:,.0f}",
        f"{speed['speedup']:.2f}x",
    ]
    return [*cells, f"{speed['dollars_per_million']:.3f}"] if priced else cells


def _verdict(batches: list[dict[str, Any]]) -> str:
    return "best depth: " + ", ".join(f"{each['best_depth']} at batch {each['batch']}" for each in batches)


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
