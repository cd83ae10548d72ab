// Cosine and sine of rotary angles in steps of our own: those of C libraries differ in their last bits from machine to
// machine. A difference of 1e-15 remains.
#pragma once

#include <cmath>
#include <cstdint>

namespace headstart {

struct Angle {
    double cosine, sine;
};

inline Angle turned(double angle) {
    // angle = quarter * pi / 2 + r. Parts of pi / 2 have 27 bits, so that their products up to 2^26 quarters are exact.
    const double quarter = std::floor(angle * 0x1.45f306dc9c883p-1 + 0.5);
    const double r = ((angle - quarter * 0x1.921fb54p+0) - quarter * 0x1.10b461p-30) -
                     (quarter * 0x1.a62633p-58 + quarter * 0x1.45c06e0e68948p-86);
    const double square = r * r; // Taylor series; |r| <= pi / 4
    double cosine = 1.0, sine = 1.0;
    for (int n = 18; n > 0; n -= 2) {
        cosine = 1.0 - cosine * square / (n * (n - 1));
        sine = 1.0 - sine * square / (n * (n + 1));
    }
    sine *= r;
    switch (static_cast<int64_t>(quarter) & 3) {
    case 0: return {cosine, sine};
    case 1: return {-sine, cosine};
    case 2: return {-cosine, -sine};
    default: return {sine, -cosine};
    }
}

} // namespace headstart
