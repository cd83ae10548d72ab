// The integer sums of a group on ARM (see group_sums.h). Four bytes of weights meet four of activations in one
// instruction where the processor has dotprod (signed bytes) or i8mm (unsigned ones); on ARMv8.0 in two steps, over sums
// of 16 bits that cannot overflow.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace headstart::HEADSTART_PATH {

constexpr int kBlocksAtOnce = 1; // a block's 16 lanes are four registers of 32

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int32_t kLowered = 0;
#else
constexpr int32_t kLowered = 128; // taken off each byte of Q8: they are multiplied as signed ones
#endif

// 16 bytes of weights, ready to be multiplied.
template <int kBits> INLINE uint8x16_t weights_at(const uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    return kBits == 8 && kLowered ? veorq_u8(bytes, vdupq_n_u8(128)) : bytes;
}

#if defined(__ARM_FEATURE_DOTPROD)

// Lane l of sum += bytes 4 l .. 4 l + 3 of w times bytes 4 kQuad .. 4 kQuad + 3 of a.
template <int kQuad> INLINE int32x4_t dot_four(int32x4_t sum, uint8x16_t w, int8x16_t a) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_laneq_s32(sum, w, a, kQuad);
#else
    return vdotq_laneq_s32(sum, vreinterpretq_s8_u8(w), a, kQuad);
#endif
}

template <int kQuad, int kRows>
INLINE void add_four(const uint8x16_t (&w)[4], const int8x16_t (&a)[kRows], i32 (&sum)[kRows][1]) {
    for (int r = 0; r < kRows; ++r) {
        i32& s = sum[r][0];
        s = {dot_four<kQuad>(s.a, w[0], a[r]), dot_four<kQuad>(s.b, w[1], a[r]), dot_four<kQuad>(s.c, w[2], a[r]),
             dot_four<kQuad>(s.d, w[3], a[r])};
    }
}

// Columns 4 kQuad .. 4 kQuad + 3 of 16 whose activations are `first`; of Q4 also of the next 16, `second`.
template <int kBits, bool kFirst, bool kSecond, int kQuad, int kRows>
INLINE void add_quad(const uint8_t* p, const int8x16_t (&first)[kRows], const int8x16_t (&second)[kRows],
                     i32 (&sum)[kRows][1]) {
    uint8x16_t w[4], part[4];
    for (int i = 0; i < 4; ++i) w[i] = weights_at<kBits>(p + kQuad * 64 + i * 16);
    if (kBits == 8) return add_four<kQuad>(w, first, sum);
    if (kFirst) {
        for (int i = 0; i < 4; ++i) part[i] = vandq_u8(w[i], vdupq_n_u8(15));
        add_four<kQuad>(part, first, sum);
    }
    if (kSecond) {
        for (int i = 0; i < 4; ++i) part[i] = vshrq_n_u8(w[i], 4);
        add_four<kQuad>(part, second, sum);
    }
}

template <int kBits, bool kFirst, bool kSecond, int kRows>
INLINE void add_sixteen(const uint8_t* p, const int8x16_t (&first)[kRows], const int8x16_t (&second)[kRows],
                        i32 (&sum)[kRows][1]) {
    add_quad<kBits, kFirst, kSecond, 0>(p, first, second, sum);
    add_quad<kBits, kFirst, kSecond, 1>(p, first, second, sum);
    add_quad<kBits, kFirst, kSecond, 2>(p, first, second, sum);
    add_quad<kBits, kFirst, kSecond, 3>(p, first, second, sum);
}

template <int kBits, int kGroup, int64_t kHead, int kRows>
INLINE void add_group(const uint8_t* const (&p)[1], int g, const int8_t* const (&q)[kRows], int64_t column,
                      i32 (&sum)[kRows][1]) {
    const uint8_t* quants = p[0] + kHead + (kBits == 8 ? g * kGroup * 16 : g * kGroup / 32 * 256);
    int8x16_t first[kRows], second[kRows];
    for (int r = 0; r < kRows; ++r) {
        first[r] = vld1q_s8(q[r] + column);
        second[r] = kGroup == 32 ? vld1q_s8(q[r] + column + 16) : first[r];
    }
    if (kBits == 8) {
        add_sixteen<8, true, false>(quants, first, first, sum);
        if (kGroup == 32) add_sixteen<8, true, false>(quants + 256, second, second, sum);
    } else if (kGroup == 32) {
        add_sixteen<4, true, true>(quants, first, second, sum);
    } else if (g % 2 == 0) {
        add_sixteen<4, true, false>(quants, first, second, sum);
    } else {
        add_sixteen<4, false, true>(quants, first, second, sum);
    }
}

#else

// Products of the bytes of four lanes, in 16 bits: of lanes 0 and 1 in `low`, of lanes 2 and 3 in `high`.
struct Products {
    int16x8_t low, high;
};
INLINE Products times(uint8x16_t w, int8x16_t a) {
    const int8x16_t s = vreinterpretq_s8_u8(w);
    return {vmull_s8(vget_low_s8(s), vget_low_s8(a)), vmull_high_s8(s, a)};
}
INLINE Products times_add(Products sum, uint8x16_t w, int8x16_t a) {
    const int8x16_t s = vreinterpretq_s8_u8(w);
    return {vmlal_s8(sum.low, vget_low_s8(s), vget_low_s8(a)), vmlal_high_s8(sum.high, s, a)};
}

INLINE int8x16_t splat_bytes(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

// Two products of Q8 fit 16 bits (2 x 128 x 127), so every second quad goes to sums of 32: of bytes 0 and 1 of a lane, and
// of bytes 2 and 3.
template <int kQuads, int kRows>
INLINE void add_bytes(const uint8_t* p, const int8_t* const (&q)[kRows], int32x4_t (&sum)[kRows][4]) {
    for (int i = 0; i < 4; ++i) { // four lanes each
        int32x4_t low[kRows], high[kRows];
        for (int r = 0; r < kRows; ++r) low[r] = high[r] = vdupq_n_s32(0);
        for (int quad = 0; quad < kQuads; quad += 2) {
            const uint8x16_t w0 = weights_at<8>(p + quad * 64 + i * 16), w1 = weights_at<8>(p + quad * 64 + 64 + i * 16);
            for (int r = 0; r < kRows; ++r) {
                const Products both =
                    times_add(times(w0, splat_bytes(q[r] + quad * 4)), w1, splat_bytes(q[r] + quad * 4 + 4));
                low[r] = vpadalq_s16(low[r], both.low);
                high[r] = vpadalq_s16(high[r], both.high);
            }
        }
        for (int r = 0; r < kRows; ++r) sum[r][i] = vaddq_s32(sum[r][i], vpaddq_s32(low[r], high[r]));
    }
}

// Sixteen products of Q4 fit 16 bits (16 x 15 x 127): a group of 32 columns has eight for each byte of a lane.
template <bool kFirst, bool kSecond, int kRows>
INLINE void add_nibbles(const uint8_t* p, const int8_t* const (&q)[kRows], int32x4_t (&sum)[kRows][4]) {
    constexpr int kNext = kFirst ? 16 : 0; // where the columns of high nibbles begin
    for (int i = 0; i < 4; ++i) {
        Products all[kRows];
        for (auto& each : all) each = {vdupq_n_s16(0), vdupq_n_s16(0)};
        for (int quad = 0; quad < 4; ++quad) {
            const uint8x16_t w = vld1q_u8(p + quad * 64 + i * 16);
            const uint8x16_t low = vandq_u8(w, vdupq_n_u8(15)), high = vshrq_n_u8(w, 4);
            for (int r = 0; r < kRows; ++r) {
                if (kFirst) all[r] = times_add(all[r], low, splat_bytes(q[r] + quad * 4));
                if (kSecond) all[r] = times_add(all[r], high, splat_bytes(q[r] + kNext + quad * 4));
            }
        }
        for (int r = 0; r < kRows; ++r) // pairs of neighbours still fit
            sum[r][i] = vpadalq_s16(sum[r][i], vpaddq_s16(all[r].low, all[r].high));
    }
}

template <int kBits, int kGroup, int64_t kHead, int kRows>
INLINE void add_group(const uint8_t* const (&p)[1], int g, const int8_t* const (&q)[kRows], int64_t column,
                      i32 (&sum)[kRows][1]) {
    const uint8_t* quants = p[0] + kHead + (kBits == 8 ? g * kGroup * 16 : g * kGroup / 32 * 256);
    const int8_t* from[kRows];
    int32x4_t s[kRows][4];
    for (int r = 0; r < kRows; ++r) {
        from[r] = q[r] + column;
        s[r][0] = sum[r][0].a, s[r][1] = sum[r][0].b, s[r][2] = sum[r][0].c, s[r][3] = sum[r][0].d;
    }
    if (kBits == 8)
        add_bytes<kGroup / 4>(quants, from, s);
    else if (kGroup == 32)
        add_nibbles<true, true>(quants, from, s);
    else if (g % 2 == 0)
        add_nibbles<true, false>(quants, from, s);
    else
        add_nibbles<false, true>(quants, from, s);
    for (int r = 0; r < kRows; ++r) sum[r][0] = {s[r][0], s[r][1], s[r][2], s[r][3]};
}

#endif

} // namespace headstart::HEADSTART_PATH
