"""Model card of a head trained by gpu.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from device.heads import Plan

CARD = """# {title} head for {model}

Trained by headstart's `benchmarks/gpu.py` for the frozen trunk `{model}`. Licence of the weights: Apache-2.0, like the
trunk and this project.

- **Training**: self-distillation with the recipe of `headstart train --kind {kind}`; batches of {batch:,} tokens in
  {dtype}, matrices rounded to int4 in the last part; begun from: {start}.
- **Amount**: {tokens:,} tokens in {steps:,} steps, {minutes} minutes ({written:,} distinct tokens of answers).
- **Held out**, greedy, teacher-forced, in int4 as drafts run: {cumulative} (1, 2, ... drafts right), acceptance length
  {length}; at T = 1 at best {sampled}.
- **Data**: answers of the trunk itself, half greedy, else T 0.7 to 1.0. Prompts: what the trunk writes after the bare
  user turn, this project's templates (some around passages of docs/ and of Python's documentation, PSF licence){files}.

| kind of text | acceptance length |
|---|---|
{kinds}
"""


def write_card(folder: Path, kind: str, facts: dict[str, Any], plan: Plan) -> None:
    held = dict(facts["held_out"])
    scores = held.pop("all")
    files = "".join(f", prompts of {Path(each).name}" for each in plan.files)
    text = CARD.format(
        title=kind.upper() if kind == "mtp" else kind, model=plan.model, kind=kind, batch=plan.batch_tokens,
        dtype=plan.dtype, start=Path(plan.start).name, tokens=facts["tokens"], steps=facts["steps"],
        minutes=facts["minutes"], written=facts["distinct_answer_tokens"], length=scores["length"],
        cumulative=" / ".join(f"{x:.3f}" for x in scores["cumulative"]), sampled=scores["sampled_length"], files=files,
        kinds="\n".join(f"| {name} | {each['length']} |" for name, each in sorted(held.items())),
    )  # fmt: skip
    (folder / "README.md").write_text(text, "utf-8")
