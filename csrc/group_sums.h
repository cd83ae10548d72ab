// The integer sums of one group of columns: rows of 8-bit activations times blocks of 16 outputs (matrix.h). Exact, so
// the order within a group is free.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace headstart::HEADSTART_PATH {

// Bits 4 and 5 of four columns of each lane of Q6, in place: of those in low or in high nibbles.
template <bool kHigh> INLINE i32 top_bits(i32 tops, int quad) {
    const i32 mask = splat_int(0x30303030);
    if (quad % 2 == 0) return (kHigh ? shift_left<2>(tops) : shift_left<4>(tops)) & mask;
    return (kHigh ? shift_right<2>(tops) : tops) & mask;
}

} // namespace headstart::HEADSTART_PATH

#if HEADSTART_NEON
#include "group_sums_neon.h"
#elif HEADSTART_AVX2 && !defined(__AVXVNNI__)
#include "group_sums_avx2.h"
#else

namespace headstart::HEADSTART_PATH {

constexpr int32_t kLowered = 0; // what is taken off each byte of Q8, and each level

INLINE i32 splat_bytes(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return splat_int(four);
}

INLINE ByteTable lowered_table(const uint8_t* levels) { return byte_table(levels); }

// Adds to the sums of kRows rows and kBlocks blocks the products of part `g` (16 or 32 columns) of a panel, whose first
// column is `column` of the rows. `p` are the panel's beginnings in each block, `head` bytes before its quants.
template <int kBits, int kPart, bool kLevels, int kRows, int kBlocks>
INLINE void add_group(const uint8_t* const (&p)[kBlocks], int64_t head, int g, const int8_t* const (&q)[kRows],
                      int64_t column, const ByteTable& table, i32 (&sum)[kRows][kBlocks]) {
    const auto add = [&](const i32 (&w)[kBlocks], int64_t at) __attribute__((always_inline)) {
        for (int r = 0; r < kRows; ++r) {
            const i32 a = splat_bytes(q[r] + column + at);
            for (int b = 0; b < kBlocks; ++b) sum[r][b] = dot(sum[r][b], w[b], a);
        }
    };
    if (kBits == 8) {
        for (int quad = 0; quad < kPart / 4; ++quad) {
            i32 w[kBlocks];
            for (int b = 0; b < kBlocks; ++b)
                w[b] = load(reinterpret_cast<const int32_t*>(p[b] + head + g * kPart * 16 + quad * 64));
            add(w, quad * 4);
        }
        return;
    }
    // a half of 32 columns: low nibbles are its first 16 columns, high ones the last 16
    const i32 low = splat_int(0x0f0f0f0f);
    const int64_t half = (kPart == 32 ? g : g / 2) * (kBits == 6 ? 384 : 256);
    for (int quad = 0; quad < 4; ++quad) {
        i32 both[kBlocks], tops[kBlocks], w[kBlocks];
        for (int b = 0; b < kBlocks; ++b) {
            both[b] = load(reinterpret_cast<const int32_t*>(p[b] + head + half + quad * 64));
            if (kBits == 6) tops[b] = load(reinterpret_cast<const int32_t*>(p[b] + head + half + 256 + quad / 2 * 64));
        }
        if (kPart == 32 || g % 2 == 0) {
            for (int b = 0; b < kBlocks; ++b) {
                w[b] = both[b] & low;
                if (kBits == 6) w[b] = w[b] | top_bits<false>(tops[b], quad);
                if (kLevels) w[b] = look_up(table, w[b]);
            }
            add(w, quad * 4);
        }
        if (kPart == 32 || g % 2 == 1) {
            for (int b = 0; b < kBlocks; ++b) {
                w[b] = shift_right<4>(both[b]) & low;
                if (kBits == 6) w[b] = w[b] | top_bits<true>(tops[b], quad);
                if (kLevels) w[b] = look_up(table, w[b]);
            }
            add(w, (kPart == 32 ? 16 : 0) + quad * 4);
        }
    }
}

} // namespace headstart::HEADSTART_PATH

#endif
