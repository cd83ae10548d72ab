"""Patches Triton's interpreter to compute like a GPU, and to run in half the time.

Unpatched, products are numpy's, whose bits depend on the row's position, and bfloat16 is truncated instead of rounded
to nearest. The patches also skip overflow checks, repeated patching of Triton's language, and repeated dtype look-ups.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.runtime import interpreter


def make_exact() -> None:
    """Patch the interpreter of this process. Written for Triton 3.7 (see pyproject.toml)."""
    if interpreter.InterpreterBuilder.create_dot is not _dot:
        interpreter.InterpreterBuilder.create_dot = _dot
        interpreter._convert_float = _RoundingConverter(interpreter._convert_float)
        builder = interpreter.interpreter_builder
        builder.options = replace(builder.options, sanitize_overflow=False)
        interpreter.InterpretedFunction.__call__ = _call_patched(interpreter.InterpretedFunction.__call__)
        interpreter._get_np_dtype = _cached_by_name(interpreter._get_np_dtype)
        interpreter._patch_lang = _patch_once(interpreter._patch_lang)


def _dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """a [M, K] @ b [K, N] + d [M, N], in float32 and in order of K."""
    product = np.einsum("mk,kn->mn", a.data, b.data, dtype=d.data.dtype, optimize=False)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


class _RoundingConverter:
    """Conversion that rounds float32 to bfloat16 to nearest even; other conversions are unchanged."""

    def __init__(self, convert: Any) -> None:
        self._convert = convert

    def __call__(self, values: Any, source: Any, target: Any, mode: Any) -> Any:
        if source.name != "fp32" or target.name != "bf16":
            return self._convert(values, source, target, mode)
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return np.where(is_nan, 0x7FC0, rounded).astype(np.uint16)


def _call_patched(call: Any) -> Any:
    """Functions of this package, called by a kernel, use the language as patched for the kernel."""

    def patched_call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.fn.__module__.startswith("headstart."):
            return function.rewrite()(*args, **kwargs)
        return call(function, *args, **kwargs)

    return patched_call


def _patch_once(prepare: Any) -> Any:
    """Patch the language once per module: a process that interprets never compiles."""
    known: set[str] = set()
    unpatch = SimpleNamespace(restore=lambda: None)

    def patch(function: Any) -> Any:
        if function.__module__ not in known:
            prepare(function)
            known.add(function.__module__)
        return unpatch

    return patch


def _cached_by_name(find: Any) -> Any:
    """Cache of a function of Triton's dtypes, by name."""
    known: dict[str, Any] = {}

    def find_cached(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = find(dtype)
        return known[dtype.name]

    return find_cached
