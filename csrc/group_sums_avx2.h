// The integer sums of a group where bytes are multiplied in pairs, with sums of 16 bits (AVX2; see group_sums.h).
#pragma once

#include "kernels.h"
#include "simd.h"

namespace headstart::HEADSTART_PATH {

constexpr int32_t kLowered = 128; // taken off each byte of Q8, and each level: they are multiplied as signed ones

INLINE ByteTable lowered_table(const uint8_t* levels) {
    return {_mm256_broadcastsi128_si256(_mm_xor_si128(_mm_load_si128((const __m128i*)levels), _mm_set1_epi8(-128)))};
}

INLINE __m256i four_bytes(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}

INLINE __m256i in_pairs(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }

enum class Bytes { NIBBLES, SIXES, SIGNED };

// Adds 4 columns of a block to the sums of each row.
template <Bytes kBytes, int kRows>
INLINE void add_four(i32 w, const int8_t* const (&q)[kRows], int64_t at, i32 (&acc)[kRows]) {
    if constexpr (kBytes == Bytes::SIXES) { // a pair, at most 2 x 63 x 127, fits
        for (int r = 0; r < kRows; ++r) {
            const __m256i a = four_bytes(q[r] + at);
            acc[r].a = _mm256_add_epi32(acc[r].a, in_pairs(_mm256_maddubs_epi16(w.a, a)));
            acc[r].b = _mm256_add_epi32(acc[r].b, in_pairs(_mm256_maddubs_epi16(w.b, a)));
        }
    } else if constexpr (kBytes == Bytes::NIBBLES) { // nibbles as they are: 8 products of pairs, at most 8 x 2 x 15 x 127, fit 16 bits
        for (int r = 0; r < kRows; ++r) {
            const __m256i a = four_bytes(q[r] + at);
            acc[r].a = _mm256_add_epi16(acc[r].a, _mm256_maddubs_epi16(w.a, a));
            acc[r].b = _mm256_add_epi16(acc[r].b, _mm256_maddubs_epi16(w.b, a));
        }
    } else { // the weight's size times the activation with the weight's sign: a pair, at most 2 x 128 x 127, fits
        const i32 size = {_mm256_abs_epi8(w.a), _mm256_abs_epi8(w.b)};
        for (int r = 0; r < kRows; ++r) {
            const __m256i a = four_bytes(q[r] + at);
            acc[r].a = _mm256_add_epi32(acc[r].a, in_pairs(_mm256_maddubs_epi16(size.a, _mm256_sign_epi8(a, w.a))));
            acc[r].b = _mm256_add_epi32(acc[r].b, in_pairs(_mm256_maddubs_epi16(size.b, _mm256_sign_epi8(a, w.b))));
        }
    }
}

template <int kBits, int kPart, bool kLevels, int kRows, int kBlocks>
INLINE void add_group(const uint8_t* const (&p)[kBlocks], int64_t head, int g, const int8_t* const (&q)[kRows],
                      int64_t column, const ByteTable& table, i32 (&sum)[kRows][kBlocks]) {
    constexpr Bytes kBytes = kBits == 8 || kLevels ? Bytes::SIGNED : kBits == 6 ? Bytes::SIXES : Bytes::NIBBLES;
    // of 4 or 6 bits a half of 32 columns: low nibbles are its first 16 columns, high ones the last 16
    const int64_t half = (kPart == 32 ? g : g / 2) * (kBits == 6 ? 384 : 256);
    const int64_t at = head + (kBits == 8 ? g * kPart * 16 : half);
    const i32 low = splat_int(0x0f0f0f0f), middle = splat_int((int32_t)0x80808080);
    for (int b = 0; b < kBlocks; ++b) {
        i32 acc[kRows];
        for (i32& each : acc) each = splat_int(0);
        for (int quad = 0; quad < (kBits == 8 ? kPart / 4 : 4); ++quad) {
            const i32 bytes = load(reinterpret_cast<const int32_t*>(p[b] + at + quad * 64));
            if (kBits == 8) {
                add_four<kBytes>(bytes ^ middle, q, column + quad * 4, acc);
                continue;
            }
            i32 tops = bytes;
            if (kBits == 6) tops = load(reinterpret_cast<const int32_t*>(p[b] + at + 256 + quad / 2 * 64));
            if (kPart == 32 || g % 2 == 0) {
                i32 w = bytes & low;
                if (kBits == 6) w = w | top_bits<false>(tops, quad);
                add_four<kBytes>(kLevels ? look_up(table, w) : w, q, column + quad * 4, acc);
            }
            if (kPart == 32 || g % 2 == 1) {
                i32 w = shift_right<4>(bytes) & low;
                if (kBits == 6) w = w | top_bits<true>(tops, quad);
                add_four<kBytes>(kLevels ? look_up(table, w) : w, q, column + (kPart == 32 ? 16 : 0) + quad * 4, acc);
            }
        }
        for (int r = 0; r < kRows; ++r)
            sum[r][b] = sum[r][b] + (kBytes != Bytes::NIBBLES ? acc[r] : i32{in_pairs(acc[r].a), in_pairs(acc[r].b)});
    }
}

} // namespace headstart::HEADSTART_PATH
