"""Functions of csrc/simd.h: each instruction set has every function of plain C++, since kernels are written once."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
TEXT = (CSRC / "simd.h").read_text("utf-8")
BEGIN, PLAIN, END = "\nstruct f32 {", "#elif !HEADSTART_NEON\n", "// Loads min(count, 16) floats"
OWN = {"half_to_float(uint16_t)"}
"""What plain C++ alone needs."""
SETS = {
    "avx512": (TEXT[TEXT.index("#if HEADSTART_AVX512" + "\n" + BEGIN) :].partition("#elif HEADSTART_AVX2")[0], OWN),
    "avx2": (TEXT[TEXT.index("#elif HEADSTART_AVX2" + "\n" + BEGIN) :].partition(PLAIN)[0], OWN),
    # group sums are in group_sums_neon.h
    "neon": ((CSRC / "simd_neon.h").read_text("utf-8"), OWN | {"dot(i32, i32, i32)", "look_up(ByteTable, i32)"}),
}


def functions_in(text: str) -> set[str]:
    """Names and argument types of the functions."""
    found = re.findall(r"^(?:template <[^>]*> )?INLINE \w+ (operator\S+?|\w+)\(([^)]*)\)", text, re.MULTILINE)
    return {f"{name}({', '.join(each.rsplit(' ', 1)[0] for each in given.split(', '))})" for name, given in found}


@pytest.mark.parametrize("instructions", SETS)
def test_every_instruction_set_has_all_functions(instructions: str) -> None:
    text, without = SETS[instructions]
    plain = functions_in(TEXT[TEXT.index(PLAIN) : TEXT.index(END)])
    assert "operator|(i32, i32)" in plain and not plain - functions_in(text) - without
