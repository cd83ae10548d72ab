"""The report of `headstart inspect` as lines of text."""

from collections.abc import Iterator
from typing import Any

from headstart.formats.base import in_int4

Data = dict[str, Any]


def lines(data: Data) -> list[str]:
    return [*_model(data), "", *_parts(data), *_heads(data), *_attached(data), *_deep(data)]


def _model(data: Data) -> Iterator[str]:
    family = f", {data['family']['title']}" if data["family"] else ""
    title = data["architecture"] or (data["drafter"] or {}).get("title", "unknown architecture")
    yield f"{title} ({data['format']}{family}), {data['model']}"
    sizes = ", ".join(f"{key} {value}" for key, value in data["sizes"].items())
    yield f"context length {data['context_length']}; {sizes}" if data["context_length"] else sizes
    if here := data["here"]:
        if not here["runs"]:
            yield f"headstart does not run it: {here['why']}"
        elif here["max_length"] < (data["context_length"] or 0):
            yield f"headstart runs it, to {here['max_length']} positions"
        else:
            yield "headstart runs it"
        if vision := here.get("vision"):
            if why := vision.get("why"):
                yield f"  reads text only: {why}; {vision['fix']}"
            else:
                yield f"  vision tower: {vision['layers']} layers, at most {vision['tokens']} tokens for an image"
        if here["fix"]:
            yield f"  fix: {here['fix']}"
        if wide := here["widened"]:
            size = f"{wide['bytes'] / 1e9:.1f} GB, or {in_int4(wide['bytes']) / 1e9:.1f} with --quantization int4"
            yield f"  {', '.join(wide['types'])} become float32 in memory: {size}"
    if data["quantization"]:
        yield "quantization: " + ", ".join(f"{key} {value}" for key, value in data["quantization"].items())
    if data["speculation"]:
        said = ", ".join(f"{key} {value}" for key, value in data["speculation"].items())
        yield f"generation_config.json asks for speculation: {said}"


def _parts(data: Data) -> Iterator[str]:
    if not data["parts"]:  # a config alone
        return
    yield f"{'part':18}{'parameters':>16}{'MB':>12}  types"
    for name, part in [*data["parts"].items(), ("total", data["total"])]:
        types = ", ".join(f"{kind} {size / max(part['bytes'], 1):.0%}" for kind, size in part["types"].items())
        yield f"{name:18}{part['parameters']:>16,}{part['bytes'] / 1e6:>12.1f}  {types}"
    if data["tied_embeddings"]:
        yield "no lm_head of its own: the embedding is used"
    yield ""


def _heads(data: Data) -> Iterator[str]:
    heads = data["heads"]
    yield f"{data['drafter']['title'] if data['drafter'] else 'MTP'}: {heads['verdict'].upper()}"
    yield f"  {heads['reason']}"
    if heads["fix"]:
        yield f"  fix: {heads['fix']}"
    for module in heads["modules"] if data["parts"] else ():
        if module["missing"] or module["wrong_shape"]:
            wrong = len(module["wrong_shape"])
            yield f"  module {module['index']}: {len(module['missing'])} missing, {wrong} of wrong shape"
    for finding in data["findings"]:
        yield f"  {finding['level']}: {finding['text']}"
    yield from _fit(data["fit"])


def _fit(fit: Data | None) -> Iterator[str]:
    if fit:
        yield f"  {'fits' if fit['fits'] else 'does not fit'} {fit['target']}"
        for check in fit["checks"]:
            bad = "" if check["ok"] else ": does not fit"
            yield f"    {check['what']}: {check['drafter']}, target {check['target']}{bad}"


def _attached(data: Data) -> Iterator[str]:
    if head := data["attached_head"]:
        modules = f"{head['modules']} module{'s' if head['modules'] > 1 else ''}"
        yield (
            f"attached head: {head['kind']}, {modules}, {head['parameters']:,} parameters, "
            f"{head['bytes'] / 1e6:.1f} MB, {head['draft_vocab_size']:,} draft tokens, {head['path']}"
        )
        yield from _fit(head["fit"])


def _deep(data: Data) -> Iterator[str]:
    deep = data["deep"]
    if deep is None:
        return
    if not deep["ran"]:
        yield f"acceptance not measured: {deep['why']}"
        return
    state = "dead" if deep["dead"] else "mismatched" if deep["better"] else "alive"
    yield f"measured over {deep['tokens']} tokens: head is {state}: {deep['acceptance']:.1%} of first drafts accepted"
    for row in deep["depths"]:
        rates = " ".join(f"{rate:.2f}" for rate in row["per_position"])
        yield f"  depth {row['depth']}: acceptance length {row['acceptance_length']:.2f}, by position {rates}"
    for other in deep["readings"]:
        better = deep["better"] is not None and other["what"] == deep["better"]["what"]
        text = f"  with {other['what']}: {other['acceptance_length']:.2f}"
        yield text + (", as the weights were trained" if better else "")
