// Integer sums of a group on AVX2, which multiplies pairs of bytes into 16-bit sums (see group_sums.h).
#pragma once

#include "kernels.h"
#include "simd.h"

namespace headstart::HEADSTART_PATH {

constexpr int32_t kByteOffset = 128; // subtracted from each Q8 byte and table level, to multiply them as signed bytes

INLINE ByteTable lowered_table(const uint8_t* levels) {
    return {_mm256_broadcastsi128_si256(_mm_xor_si128(_mm_load_si128((const __m128i*)levels), _mm_set1_epi8(-128)))};
}

INLINE __m256i four_bytes(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}

INLINE __m256i in_pairs(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }

enum class Bytes { UNSIGNED, SIGNED };

// Adds the products of 4 columns of a block to each row's sums: 32-bit, or 16-bit of pairs for unsigned bytes.
template <Bytes kBytes, int kRows>
INLINE void add_four(i32 w, const int8_t* const (&q)[kRows], int64_t at, i32 (&acc)[kRows]) {
    if constexpr (kBytes == Bytes::UNSIGNED) {
        for (int r = 0; r < kRows; ++r) {
            const __m256i a = four_bytes(q[r] + at);
            acc[r].a = _mm256_add_epi16(acc[r].a, _mm256_maddubs_epi16(w.a, a));
            acc[r].b = _mm256_add_epi16(acc[r].b, _mm256_maddubs_epi16(w.b, a));
        }
    } else { // |weight| * (activation with the weight's sign): a pair fits in 16 bits (2 x 128 x 127)
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
    constexpr Bytes kBytes = kBits == 8 || kLevels ? Bytes::SIGNED : Bytes::UNSIGNED;
    // in a half of 32 columns of 4 to 6 bits, low nibbles are the first 16 columns and high nibbles the last 16
    const int64_t at = head + (kBits == 8 ? g * kPart * 16 : (kPart == 32 ? g : g / 2) * half_bytes(kBits));
    const i32 low = splat_int(0x0f0f0f0f), middle = splat_int((int32_t)0x80808080);
    // pairs of products that fit in 16 bits: 8 x 2 x 15 x 127, 4 x 2 x 31 x 127, 2 x 2 x 63 x 127
    constexpr int kPairs = kBits == 4 ? 8 : kBits == 5 ? 4 : 2, kQuads = kBits == 8 ? kPart / 4 : 4;
    constexpr int kAtOnce = kBytes == Bytes::SIGNED || kPairs * 16 / kPart > 4 ? kQuads : kPairs * 16 / kPart;
    for (int b = 0; b < kBlocks; ++b) {
        i32 tops = low;
        for (int first = 0; first < kQuads; first += kAtOnce) {
            i32 acc[kRows];
            for (i32& each : acc) each = splat_int(0);
            for (int quad = first; quad < first + kAtOnce; ++quad) {
                const i32 bytes = load(reinterpret_cast<const int32_t*>(p[b] + at + quad * 64));
                if (kBits == 8) {
                    add_four<kBytes>(bytes ^ middle, q, column + quad * 4, acc);
                    continue;
                }
                const uint8_t* above = p[b] + at + 256;
                if (kBits == 6) tops = load(reinterpret_cast<const int32_t*>(above + quad / 2 * 64));
                if (kBits == 5) tops = quad ? shift_right<1>(tops) : load(reinterpret_cast<const int32_t*>(above));
                if (kPart == 32 || g % 2 == 0) {
                    i32 w = bytes & low;
                    if (kBits > 4) w = w | top_bits<kBits, false>(tops, quad);
                    add_four<kBytes>(kLevels ? look_up(table, w) : w, q, column + quad * 4, acc);
                }
                if (kPart == 32 || g % 2 == 1) {
                    i32 w = shift_right<4>(bytes) & low;
                    if (kBits > 4) w = w | top_bits<kBits, true>(tops, quad);
                    add_four<kBytes>(kLevels ? look_up(table, w) : w, q, column + (kPart == 32 ? 16 : 0) + quad * 4, acc);
                }
            }
            for (int r = 0; r < kRows; ++r)
                sum[r][b] = sum[r][b] + (kBytes == Bytes::SIGNED ? acc[r] : i32{in_pairs(acc[r].a), in_pairs(acc[r].b)});
        }
    }
}

} // namespace headstart::HEADSTART_PATH
