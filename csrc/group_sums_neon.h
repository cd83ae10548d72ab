// Integer sums of a group on ARM (see group_sums.h): one instruction per four products with dotprod (signed bytes) or i8mm
// (unsigned bytes); on ARMv8.0 two steps over 16-bit sums that cannot overflow.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace headstart::HEADSTART_PATH {

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int32_t kByteOffset = 0;
#else
constexpr int32_t kByteOffset = 128; // subtracted from each Q8 byte and table level, to multiply them as signed bytes
#endif

// Q8 bytes or table levels, as the product instruction reads them.
INLINE uint8x16_t lowered(uint8x16_t bytes) { return kByteOffset ? veorq_u8(bytes, vdupq_n_u8(kByteOffset)) : bytes; }
INLINE ByteTable lowered_table(const uint8_t* levels) { return {lowered(vld1q_u8(levels))}; }

// The low or the high nibbles of 16 bytes.
template <bool kHigh> INLINE uint8x16_t codes_of(uint8x16_t bytes) {
    return kHigh ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
}
template <bool kHigh, bool kLevels> INLINE uint8x16_t nibbles(const ByteTable& table, uint8x16_t bytes) {
    const uint8x16_t codes = codes_of<kHigh>(bytes);
    return kLevels ? vqtbl1q_u8(table.v, codes) : codes;
}

// The same with Q5's fifth bit, and with Q6's two high bits; two quads of columns share a byte of these.
template <bool kHigh> INLINE uint8x16_t five_bit_codes(uint8x16_t bytes, uint8x16_t tops, int quad) {
    tops = vshlq_u8(tops, vdupq_n_s8((int8_t)(kHigh ? 4 - quad : -quad)));
    return vorrq_u8(codes_of<kHigh>(bytes), vandq_u8(tops, vdupq_n_u8(0x10)));
}
template <bool kHigh> INLINE uint8x16_t six_bit_codes(uint8x16_t bytes, uint8x16_t tops, int quad) {
    if (quad % 2 == 0) tops = kHigh ? vshlq_n_u8(tops, 2) : vshlq_n_u8(tops, 4);
    if (quad % 2 == 1 && kHigh) tops = vshrq_n_u8(tops, 2);
    return vorrq_u8(codes_of<kHigh>(bytes), vandq_u8(tops, vdupq_n_u8(0x30)));
}

// Codes of a quad of columns: low or high nibbles of the 16 bytes at p.
template <int kBits, bool kHigh, bool kLevels>
INLINE uint8x16_t codes_at(const uint8_t* p, int quad, int i, const ByteTable& table) {
    const uint8x16_t bytes = vld1q_u8(p + quad * 64 + i * 16);
    if (kBits == 5) return five_bit_codes<kHigh>(bytes, vld1q_u8(p + 256 + i * 16), quad);
    if (kBits == 6) return six_bit_codes<kHigh>(bytes, vld1q_u8(p + 256 + quad / 2 * 64 + i * 16), quad);
    return nibbles<kHigh, kLevels>(table, bytes);
}

#if defined(__ARM_FEATURE_DOTPROD)

// sum[l] += dot product of bytes 4 l .. 4 l + 3 of w and bytes 4 kQuad .. 4 kQuad + 3 of a.
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

// Adds columns 4 kQuad .. 4 kQuad + 3 of 16 columns with activations `first`, and of the next 16 with `second`.
template <int kBits, bool kLevels, bool kFirst, bool kSecond, int kQuad, int kRows>
INLINE void add_quad(const uint8_t* p, const int8x16_t (&first)[kRows], const int8x16_t (&second)[kRows],
                     const ByteTable& table, i32 (&sum)[kRows][1]) {
    uint8x16_t part[4];
    if (kBits == 8) {
        for (int i = 0; i < 4; ++i) part[i] = lowered(vld1q_u8(p + kQuad * 64 + i * 16));
        return add_four<kQuad>(part, first, sum);
    }
    if (kFirst) {
        for (int i = 0; i < 4; ++i) part[i] = codes_at<kBits, false, kLevels>(p, kQuad, i, table);
        add_four<kQuad>(part, first, sum);
    }
    if (kSecond) {
        for (int i = 0; i < 4; ++i) part[i] = codes_at<kBits, true, kLevels>(p, kQuad, i, table);
        add_four<kQuad>(part, second, sum);
    }
}

template <int kBits, bool kLevels, bool kFirst, bool kSecond, int kRows>
INLINE void add_sixteen(const uint8_t* p, const int8x16_t (&first)[kRows], const int8x16_t (&second)[kRows],
                        const ByteTable& table, i32 (&sum)[kRows][1]) {
    add_quad<kBits, kLevels, kFirst, kSecond, 0>(p, first, second, table, sum);
    add_quad<kBits, kLevels, kFirst, kSecond, 1>(p, first, second, table, sum);
    add_quad<kBits, kLevels, kFirst, kSecond, 2>(p, first, second, table, sum);
    add_quad<kBits, kLevels, kFirst, kSecond, 3>(p, first, second, table, sum);
}

template <int kBits, int kPart, bool kLevels, int kRows>
INLINE void add_group(const uint8_t* const (&p)[1], int64_t head, int g, const int8_t* const (&q)[kRows],
                      int64_t column, const ByteTable& table, i32 (&sum)[kRows][1]) {
    const uint8_t* quants = p[0] + head + (kBits == 8 ? g * kPart * 16 : g * kPart / 32 * half_bytes(kBits));
    int8x16_t first[kRows], second[kRows];
    for (int r = 0; r < kRows; ++r) {
        first[r] = vld1q_s8(q[r] + column);
        second[r] = kPart == 32 ? vld1q_s8(q[r] + column + 16) : first[r];
    }
    if (kBits == 8) {
        add_sixteen<8, false, true, false>(quants, first, first, table, sum);
        if (kPart == 32) add_sixteen<8, false, true, false>(quants + 256, second, second, table, sum);
    } else if (kPart == 32) {
        add_sixteen<kBits, kLevels, true, true>(quants, first, second, table, sum);
    } else if (g % 2 == 0) {
        add_sixteen<kBits, kLevels, true, false>(quants, first, second, table, sum);
    } else {
        add_sixteen<kBits, kLevels, false, true>(quants, first, second, table, sum);
    }
}

#else

// 16-bit products of the bytes of four lanes: lanes 0 and 1 in `low`, 2 and 3 in `high`.
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

// 32-bit sums of four lanes, bytes 0 and 1 apart from bytes 2 and 3. Two products of signed bytes fit in 16 bits
// (2 x 128 x 127) before they are added here.
template <int kRows> struct Halves {
    int32x4_t low[kRows], high[kRows];
};
template <int kRows> INLINE void clear(Halves<kRows>& sum) {
    for (int r = 0; r < kRows; ++r) sum.low[r] = sum.high[r] = vdupq_n_s32(0);
}
template <int kRows>
INLINE void add_two(Halves<kRows>& sum, uint8x16_t w0, int64_t at0, uint8x16_t w1, int64_t at1,
                    const int8_t* const (&q)[kRows]) {
    for (int r = 0; r < kRows; ++r) {
        const Products both = times_add(times(w0, splat_bytes(q[r] + at0)), w1, splat_bytes(q[r] + at1));
        sum.low[r] = vpadalq_s16(sum.low[r], both.low);
        sum.high[r] = vpadalq_s16(sum.high[r], both.high);
    }
}

template <int kQuads, int kRows>
INLINE void add_bytes(const uint8_t* p, const int8_t* const (&q)[kRows], int32x4_t (&sum)[kRows][4]) {
    for (int i = 0; i < 4; ++i) { // register i has four lanes
        Halves<kRows> all;
        clear(all);
        for (int quad = 0; quad < kQuads; quad += 2) {
            const uint8_t* at = p + quad * 64 + i * 16;
            add_two(all, lowered(vld1q_u8(at)), quad * 4, lowered(vld1q_u8(at + 64)), quad * 4 + 4, q);
        }
        for (int r = 0; r < kRows; ++r) sum[r][i] = vaddq_s32(sum[r][i], vpaddq_s32(all.low[r], all.high[r]));
    }
}

template <int kBits, bool kFirst, bool kSecond, int kRows>
INLINE void add_levels(const uint8_t* p, const int8_t* const (&q)[kRows], const ByteTable& table,
                       int32x4_t (&sum)[kRows][4]) {
    for (int i = 0; i < 4; ++i) {
        Halves<kRows> all;
        clear(all);
        for (int quad = 0; quad < 4; quad += kFirst && kSecond ? 1 : 2) {
            if (kFirst && kSecond)
                add_two(all, codes_at<kBits, false, true>(p, quad, i, table), quad * 4,
                        codes_at<kBits, true, true>(p, quad, i, table), quad * 4 + 16, q);
            else
                add_two(all, codes_at<kBits, kSecond, true>(p, quad, i, table), quad * 4,
                        codes_at<kBits, kSecond, true>(p, quad + 1, i, table), quad * 4 + 4, q);
        }
        for (int r = 0; r < kRows; ++r) sum[r][i] = vaddq_s32(sum[r][i], vpaddq_s32(all.low[r], all.high[r]));
    }
}

// Sixteen products with nibbles fit in 16 bits (16 x 15 x 127); 32 columns have eight for each byte of a lane.
template <bool kFirst, bool kSecond, int kRows>
INLINE void add_nibbles(const uint8_t* p, const int8_t* const (&q)[kRows], int32x4_t (&sum)[kRows][4]) {
    constexpr int kNext = kFirst ? 16 : 0; // first column of the high nibbles
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
        for (int r = 0; r < kRows; ++r) // sums of adjacent pairs still fit in 16 bits
            sum[r][i] = vpadalq_s16(sum[r][i], vpaddq_s16(all[r].low, all[r].high));
    }
}

template <int kBits, bool kLevels, bool kFirst, bool kSecond, int kRows>
INLINE void add_codes(const uint8_t* p, const int8_t* const (&q)[kRows], const ByteTable& table,
                      int32x4_t (&sum)[kRows][4]) {
    if (kLevels || kBits > 4)
        add_levels<kBits, kFirst, kSecond>(p, q, table, sum);
    else
        add_nibbles<kFirst, kSecond>(p, q, sum);
}

template <int kBits, int kPart, bool kLevels, int kRows>
INLINE void add_group(const uint8_t* const (&p)[1], int64_t head, int g, const int8_t* const (&q)[kRows],
                      int64_t column, const ByteTable& table, i32 (&sum)[kRows][1]) {
    const uint8_t* quants = p[0] + head + (kBits == 8 ? g * kPart * 16 : g * kPart / 32 * half_bytes(kBits));
    const int8_t* from[kRows];
    int32x4_t s[kRows][4];
    for (int r = 0; r < kRows; ++r) {
        from[r] = q[r] + column;
        s[r][0] = sum[r][0].a, s[r][1] = sum[r][0].b, s[r][2] = sum[r][0].c, s[r][3] = sum[r][0].d;
    }
    if (kBits == 8)
        add_bytes<kPart / 4>(quants, from, s);
    else if (kPart == 32)
        add_codes<kBits, kLevels, true, true>(quants, from, table, s);
    else if (g % 2 == 0)
        add_codes<kBits, kLevels, true, false>(quants, from, table, s);
    else
        add_codes<kBits, kLevels, false, true>(quants, from, table, s);
    for (int r = 0; r < kRows; ++r) sum[r][0] = {s[r][0], s[r][1], s[r][2], s[r][3]};
}

#endif

} // namespace headstart::HEADSTART_PATH
