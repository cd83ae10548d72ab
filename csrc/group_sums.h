// Integer sums of one group of columns: int8 activation rows times blocks of 16 outputs (matrix.h). Integer sums are exact,
// so their order does not matter.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace headstart::HEADSTART_PATH {

// Q5 and Q6: the bits above the nibbles of four columns per lane, shifted into place, for the columns in low or in high
// nibbles. Q5: of `tops` shifted right by one for each quad before.
template <int kBits, bool kHigh> INLINE i32 top_bits(i32 tops, int quad) {
    if (kBits == 5) return (kHigh ? shift_left<4>(tops) : tops) & splat_int(0x10101010);
    const i32 mask = splat_int(0x30303030);
    if (quad % 2 == 0) return (kHigh ? shift_left<2>(tops) : shift_left<4>(tops)) & mask;
    return (kHigh ? shift_right<2>(tops) : tops) & mask;
}

constexpr int64_t half_bytes(int bits) { return bits * 64; } // quants of a half of 32 columns, 4 to 6 bits
} // namespace headstart::HEADSTART_PATH

#if HEADSTART_NEON
#include "group_sums_neon.h"
#elif HEADSTART_AVX2 && !defined(__AVXVNNI__)
#include "group_sums_avx2.h"
#else

namespace headstart::HEADSTART_PATH {

constexpr int32_t kByteOffset = 0; // subtracted from each Q8 byte and each table level

INLINE i32 splat_bytes(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return splat_int(four);
}

INLINE ByteTable lowered_table(const uint8_t* levels) { return byte_table(levels); }

// The codes of four columns per lane, from the low or high nibbles of `both` and from the bits above them.
template <int kBits, bool kHigh> INLINE i32 codes_of(i32 both, i32 tops, int quad) {
    const i32 low = splat_int(0x0f0f0f0f), nibbles = kHigh ? shift_right<4>(both) : both;
#if HEADSTART_AVX512
    if (kBits == 6) { // masked before the shift, so that two instructions merge them instead of three
        const i32 own = tops & splat_int((int32_t)(kHigh ? 0xcccccccc : 0x33333333));
        if (quad % 2 == 0) return select_bits(low, nibbles, kHigh ? shift_left<2>(own) : shift_left<4>(own));
        return select_bits(low, nibbles, kHigh ? shift_right<2>(own) : own);
    }
#endif
    return kBits > 4 ? (nibbles & low) | top_bits<kBits, kHigh>(tops, quad) : nibbles & low;
}

// Adds the products of part g (16 or 32 columns) of a panel to the sums of kRows rows and kBlocks blocks. column: the part's
// first column in the rows. p: the panel's address in each block; its quants start after `head` bytes.
template <int kBits, int kPart, bool kLevels, int kRows, int kBlocks>
INLINE void add_group(const uint8_t* const (&p)[kBlocks], int64_t head, int g, const int8_t* const (&q)[kRows],
                      int64_t column, const ByteTable& table, i32 (&sum)[kRows][kBlocks]) {
    const auto add = [&](const i32 (&w)[kBlocks], int64_t at) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const i32 a = splat_bytes(q[r] + column + at);
            for (int b = 0; b < kBlocks; ++b) sum[r][b] = dot(sum[r][b], w[b], a);
        }
    };
    if (kBits == 8) {
#pragma GCC unroll 8
        for (int quad = 0; quad < kPart / 4; ++quad) {
            i32 w[kBlocks];
            for (int b = 0; b < kBlocks; ++b)
                w[b] = load(reinterpret_cast<const int32_t*>(p[b] + head + g * kPart * 16 + quad * 64));
            add(w, quad * 4);
        }
        return;
    }
    // in a half of 32 columns, low nibbles are the first 16 columns and high nibbles the last 16
    const bool lows = kPart == 32 || g % 2 == 0, highs = kPart == 32 || g % 2 == 1;
    const int64_t half = head + (kPart == 32 ? g : g / 2) * half_bytes(kBits);
    i32 tops[kBlocks];
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; ++quad) {
        i32 both[kBlocks], w[kBlocks];
        for (int b = 0; b < kBlocks; ++b) {
            both[b] = load(reinterpret_cast<const int32_t*>(p[b] + half + quad * 64));
            const uint8_t* above = p[b] + half + 256;
            if (kBits == 6) tops[b] = load(reinterpret_cast<const int32_t*>(above + quad / 2 * 64));
            if (kBits == 5) tops[b] = quad ? shift_right<1>(tops[b]) : load(reinterpret_cast<const int32_t*>(above));
        }
        if (lows) {
            for (int b = 0; b < kBlocks; ++b) {
                w[b] = codes_of<kBits, false>(both[b], tops[b], quad);
                if (kLevels) w[b] = look_up(table, w[b]);
            }
            add(w, quad * 4);
        }
        if (highs) {
            for (int b = 0; b < kBlocks; ++b) {
                w[b] = codes_of<kBits, true>(both[b], tops[b], quad);
                if (kLevels) w[b] = look_up(table, w[b]);
            }
            add(w, (kPart == 32 ? 16 : 0) + quad * 4);
        }
    }
}

} // namespace headstart::HEADSTART_PATH

#endif
