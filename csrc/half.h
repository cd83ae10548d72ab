// Portable conversion of float16 and bfloat16 bits, for loading weights; kernels use simd.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace headstart {

inline float float_from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float float_from_half(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, body = half & 0x7fffu;
    if (body >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | (body & 0x3ffu) << 13); // infinity or NaN
    // The same digits with float's exponent bias; exact for subnormal numbers too.
    return float_from_bits(sign | bits_of_float(float_from_bits(body << 13) * 0x1p112f));
}

// Rounds to nearest, ties to even.
inline uint16_t half_from_float(float value) {
    const uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000u;
    uint32_t body = bits & 0x7fffffffu;
    if (body > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (body >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u); // 65520 and more
    if (body < 0x38800000u) { // subnormal: the last digit of a float in [0.5, 1) is that of a subnormal half
        body = bits_of_float(float_from_bits(body) + 0.5f) - bits_of_float(0.5f);
        return static_cast<uint16_t>(sign | body);
    }
    body += 0xfffu + (body >> 13 & 1u);
    return static_cast<uint16_t>(sign | (body - 0x38000000u) >> 13);
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline uint16_t bfloat_from_float(float value) {
    const uint32_t bits = bits_of_float(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 64);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float float_from_bfloat(uint16_t bits) { return float_from_bits(static_cast<uint32_t>(bits) << 16); }

} // namespace headstart
