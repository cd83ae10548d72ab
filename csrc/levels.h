// Tables of 4-bit and FP8 codes.
#pragma once

#include <cstdint>

#include "matrix.h"

namespace headstart {

// Levels of integer products, as bytes + 128: twice the values of E2M1; the levels of IQ4.
alignas(16) constexpr uint8_t kE2M1[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};
alignas(16) constexpr uint8_t kIQ4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
// bitsandbytes: NF4, quantiles of a normal distribution; FP4, a sign, two exponent bits and a mantissa bit, maximum 1.
alignas(64) constexpr float kNF4[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f,
    0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
alignas(64) constexpr float kFP4[16] = {
    0.0f, 0.0625f / 12, 8.0f / 12, 1.0f, 4.0f / 12, 0.5f, 2.0f / 12, 0.25f,
    -0.0f, -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -0.5f, -2.0f / 12, -0.25f};

// E4M3 codes without the sign as bfloat16: low and high byte of each. NaN is read as 480 by all kernels.
struct E4M3Halves {
    uint8_t low[128] = {}, high[128] = {};
    constexpr E4M3Halves() {
        for (int code = 0; code < 128; ++code) {
            int exponent = code / 8, digits = code % 8; // of 2^(exponent - 7) * (1 + digits / 8)
            if (exponent == 0 && digits > 0)            // subnormal: normalize
                for (exponent = 1; digits < 8; --exponent) digits *= 2;
            const int half = code == 0 ? 0 : (exponent + 120) * 128 + digits % 8 * 16;
            low[code] = half % 256, high[code] = half / 256;
        }
    }
};
alignas(64) constexpr E4M3Halves kE4M3Halves;

HEADSTART_INLINE const uint8_t* byte_levels(Levels levels) { return levels == Levels::IQ4 ? kIQ4 : kE2M1; }
HEADSTART_INLINE const float* float_levels(Levels levels) { return levels == Levels::FP4 ? kFP4 : kNF4; }

} // namespace headstart
