"""Triton's interpreter, made to compute as a GPU does: rows of a product that do not depend on their place, and
bfloat16 rounded to nearest. Its products are numpy's, whose bits differ from row to row, and it cuts bfloat16 off.
What it does without need (checks of every integer sum; Triton's language put in order for each launch and each
function that a kernel calls, and back again; a table of types for each value) takes half of its time, and is left out.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.runtime import interpreter


def make_exact() -> None:
    """For all that this process interprets. Known of Triton 3.7, which pyproject.toml asks for."""
    if interpreter.InterpreterBuilder.create_dot is not _dot:
        interpreter.InterpreterBuilder.create_dot = _dot
        interpreter._convert_float = _Rounding(interpreter._convert_float)
        builder = interpreter.interpreter_builder
        builder.options = replace(builder.options, sanitize_overflow=False)
        interpreter.InterpretedFunction.__call__ = _prepared(interpreter.InterpretedFunction.__call__)
        interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
        interpreter._patch_lang = _once(interpreter._patch_lang)


def _dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """a [M, K] times b [K, N] + d in float32, K from the first on."""
    product = np.einsum("mk,kn->mn", a.data, b.data, dtype=d.data.dtype, optimize=False)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


class _Rounding:
    """Of float32 to bfloat16 to nearest even, as the hardware; all else as before."""

    def __init__(self, convert: Any) -> None:
        self._convert = convert

    def __call__(self, values: Any, source: Any, target: Any, mode: Any) -> Any:
        if source.name != "fp32" or target.name != "bf16":
            return self._convert(values, source, target, mode)
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return np.where(is_nan, 0x7FC0, rounded).astype(np.uint16)


def _prepared(call: Any) -> Any:
    """Calls of functions by a kernel: those of this package use what has been prepared for the kernel."""

    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.fn.__module__.startswith("headstart."):
            return function.rewrite()(*args, **kwargs)
        return call(function, *args, **kwargs)

    return called


def _once(prepare: Any) -> Any:
    """The language stays as it was prepared: a process that interprets compiles nothing."""
    known: set[str] = set()
    kept = SimpleNamespace(restore=lambda: None)

    def prepared(function: Any) -> Any:
        if function.__module__ not in known:
            prepare(function)
            known.add(function.__module__)
        return kept

    return prepared


def _remembered(find: Any) -> Any:
    """What it says of Triton's types, which have names."""
    known: dict[str, Any] = {}

    def found(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = find(dtype)
        return known[dtype.name]

    return found
