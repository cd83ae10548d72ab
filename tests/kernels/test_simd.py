"""What csrc/simd.h offers: kernels are written once, so each instruction set has every function that plain C++ has."""

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
    # whose sums of a group are its own (group_sums_neon.h)
    "neon": ((CSRC / "simd_neon.h").read_text("utf-8"), OWN | {"dot(i32, i32, i32)", "look_up(ByteTable, i32)"}),
}


def offered(text: str) -> set[str]:
    """Names and types of arguments of the functions."""
    found = re.findall(r"^(?:template <[^>]*> )?INLINE \w+ (operator\S+?|\w+)\(([^)]*)\)", text, re.MULTILINE)
    return {f"{name}({', '.join(each.rsplit(' ', 1)[0] for each in given.split(', '))})" for name, given in found}


@pytest.mark.parametrize("instructions", SETS)
def test_no_instruction_set_lacks_a_function(instructions: str) -> None:
    text, without = SETS[instructions]
    plain = offered(TEXT[TEXT.index(PLAIN) : TEXT.index(END)])
    assert "operator|(i32, i32)" in plain and not plain - offered(text) - without
