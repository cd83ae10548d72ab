"""`headstart plan`: speed, memory and cost of a model on a machine, predicted."""

from functools import partial
from typing import Any

from headstart.cli.options import OutputOptions
from headstart.cli.parser import command
from headstart.cli.render import print_records, print_table
from headstart.tools.options import PlanFlags


@command(
    "headstart plan deepseek-v4 --gpu h200x4 --batch 1,4,8,32 --price-per-hour 3.31 --api-price 0.9",
    "headstart plan ./my-model --gpu 4090 --weights int4 --acceptance 0.85,0.7,0.6 --context 8000",
    "headstart plan gemma-4 --gpu 4090 --weights int4 --kv-dtype fp8 --drafter all",
    "headstart plan deepseek-v4 --gpu h200x4 --price-per-hour spot --api-price list",
    "headstart plan --gpu here --batch 1,8,32",
    "headstart plan deepseek-v4 --gpu h200x8 --fleet '100 req/s, 1500 in, 300 out, TTFT 1 s, TPOT 40 ms'",
)
def run(flags: PlanFlags, output: OutputOptions) -> int:
    """Predict speed with and without drafting, best depth, memory, time to first token and cost of a model on a
    machine."""
    from headstart.tools.plan import run as plan

    options = plan.PlanOptions(**vars(flags))
    return output.run("planning", partial(plan.run, options), _print_fleet if options.load else _print_plan)


def _print_fleet(data: dict[str, Any]) -> None:
    _print_machine(data)
    if "fleet" not in data:
        return
    fleet = data["fleet"]
    print(f"load     {fleet['load']}")
    rows = []
    for each in fleet["rows"]:
        if each["machines"] is None:
            rows.append([each["drafter"], "none suffices", each["why"], *[""] * 4])
            continue
        ttft, tpot, cost = each["ttft_s"], each["tpot_s"], each["dollars_per_hour"]
        rows.append([
            each["drafter"], f"{each['machines']:,}", f"{ttft['p50']:.2f} / {ttft['at_percentile']:.2f}",
            f"{tpot['p50'] * 1e3:.1f} / {tpot['at_percentile'] * 1e3:.1f}", f"{each['utilisation']:.0%}",
            f"{each['batch']:.0f}",
            "" if cost is None else f"{cost:,.2f} ({each['dollars_per_million']:.3f})",
        ])  # fmt: skip
    percentile = f"p{fleet['percentile']:g}"
    columns = [
        "drafter", f"machines\n({fleet['machine']})", f"TTFT s\np50 / {percentile}", f"TPOT ms\np50 / {percentile}",
        "busy", "sequences\nat a time", "$ an hour\n($/M tokens)",
    ]  # fmt: skip
    print_table(columns, rows)
    if fleet["disaggregation"] is not None:
        print(_disaggregation_text(fleet["disaggregation"], percentile))


def _disaggregation_text(found: dict[str, Any], percentile: str) -> str:
    """Whether separate machines for prefill and decode pay, and why."""
    colocated, disaggregated, step, transfer = (
        found[key] for key in ("colocated", "disaggregated", "step_s", "transfer")
    )
    count = "no number" if colocated["machines"] is None else f"{colocated['machines']:,}"
    combined = f"{count} that do both (steps of {colocated['rows']:,} rows{_latency_text(colocated, percentile)})"
    if disaggregated is None:
        verdict = (
            f"does not pay: even {2 * colocated['machines']:,} machines of each kind do not suffice, but {combined}"
        )
    else:
        split = f"{disaggregated['num_prefill']:,} + {disaggregated['num_decode']:,} machines for prompts and tokens"
        verdict = (
            f"{'pays' if found['pays'] else 'does not pay'}: {split}{_latency_text(disaggregated, percentile)} against "
        )
        verdict += (
            f"{combined}; busy {disaggregated['prefill_utilisation']:.0%} and {disaggregated['decode_utilisation']:.0%}"
        )
    return (
        f"apart    {verdict}\n         a step of {step['sequences']} sequences takes {step['alone'] * 1e3:.1f} ms, "
        f"with a prompt in it {step['with_a_prompt'] * 1e3:.1f} ms; {transfer['bytes'] / 1e6:,.0f} MB of a prompt take "
        f"{transfer['seconds'] * 1e3:,.0f} ms to another machine at {transfer['gbit_per_s']:g} Gbit/s"
    )


def _latency_text(row: dict[str, Any], percentile: str) -> str:
    return f", {percentile} {row['ttft_s']:.2f} s and {row['tpot_s'] * 1e3:.1f} ms" if "ttft_s" in row else ""


def _print_machine(data: dict[str, Any]) -> None:
    memory, model, machine = data["memory"], data["model"], data["machine"]
    active = f" ({model['active_parameters'] / 1e9:.2f} B active)" if model["experts"] else ""
    print(f"model    {model['name']}: {model['parameters'] / 1e9:.2f} B parameters{active}, {model['weights']}")
    print(f"machine  {machine['name']}, tensor parallel {machine['tp']}, expert {machine['ep']}")
    fits = f"room for {memory['max_batch']:,} sequences of {data['context']:,}"
    if not memory["fits"]:
        fits = f"DOES NOT FIT: {memory['devices_needed']} devices hold the weights"
    weights, cache = memory["weight_bytes_per_device"] / 1e9, memory["cache_bytes_per_sequence"] / 1e6
    usable = memory["usable_bytes"] / 1e9
    print(f"memory   {weights:.2f} GB of weights and {cache:.1f} MB a sequence on each device, {usable:.1f} GB: {fits}")


def _print_plan(data: dict[str, Any]) -> None:
    _print_machine(data)
    print(f"prompt   first token of {data['context']:,} positions alone after {data['ttft_s'] * 1e3:.0f} ms")
    has_price = data["batches"][0]["plain"]["dollars_per_million"] is not None
    has_several = len(data["drafters"]) > 1
    columns = {
        "batch": "{batch}", **({"drafter": "{drafter}"} if has_several else {}), "depth": "{depth}",
        "step ms": "{step_ms:.2f}", "draft ms": "{draft_ms:.2f}", "tokens\n/step": "{tokens_per_step:.2f}",
        "tok/s a\nstream": "{tokens_per_s_per_stream:.1f}", "tok/s": "{tokens_per_s:,.0f}",
        "speed-up": "{speedup:.2f}x", **({"$/M tokens": "{dollars_per_million:.3f}"} if has_price else {}),
    }  # fmt: skip
    rows = []
    for each in data["batches"]:
        shown = f"{each['batch']}{'' if each['fits'] else ' (no room)'}"
        rows.append({**each["plain"], "batch": shown, "drafter": "none"})
        rows += [{**speed, "batch": ""} for speed in each["drafting"] if speed["depth"] != 0]
    best = ", ".join(
        f"{each['best_drafter'] + ' ' if has_several else ''}{each['best_depth']} at batch {each['batch']}"
        for each in data["batches"]
    )
    print_records(columns, rows, footer=f"best depth: {best}")
