// Vectors of 16 float32 or int32 for the instruction set of this translation unit: AVX-512, AVX2, NEON (simd_neon.h) or
// plain C++. A lane's result does not depend on other lanes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define HEADSTART_AVX512 1
#if defined(__AVX512BF16__)
#define HEADSTART_PAIRS 1 // has products of pairs of bfloat16
#endif
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HEADSTART_AVX2 1
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if HEADSTART_NEON
#include "simd_neon.h"
#endif

namespace headstart::HEADSTART_PATH {

#if HEADSTART_AVX512

struct f32 {
    __m512 v;
};
struct i32 {
    __m512i v;
};

INLINE f32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE void store(float* p, f32 a) { _mm512_storeu_ps(p, a.v); }
INLINE f32 splat(float a) { return {_mm512_set1_ps(a)}; }
INLINE f32 operator+(f32 a, f32 b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE f32 operator-(f32 a, f32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE f32 operator*(f32 a, f32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE f32 operator/(f32 a, f32 b) { return {_mm512_div_ps(a.v, b.v)}; }
INLINE f32 fma(f32 a, f32 b, f32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INLINE f32 max(f32 a, f32 b) { return {_mm512_max_ps(a.v, b.v)}; }
INLINE f32 min(f32 a, f32 b) { return {_mm512_min_ps(a.v, b.v)}; }
INLINE f32 select_less(f32 a, f32 b, f32 yes, f32 no) { // a < b ? yes : no
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
INLINE f32 load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
INLINE f32 load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
INLINE f32 load_i8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
INLINE i32 load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
INLINE void store(int32_t* p, i32 a) { _mm512_storeu_si512(p, a.v); }
INLINE i32 splat_int(int32_t a) { return {_mm512_set1_epi32(a)}; }
INLINE i32 operator+(i32 a, i32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
INLINE i32 operator&(i32 a, i32 b) { return {_mm512_and_si512(a.v, b.v)}; }
INLINE i32 operator|(i32 a, i32 b) { return {_mm512_or_si512(a.v, b.v)}; }
INLINE i32 select_bits(i32 mask, i32 a, i32 b) { return {_mm512_ternarylogic_epi32(mask.v, a.v, b.v, 0xca)}; } // a where 1
INLINE i32 max(i32 a, i32 b) { return {_mm512_max_epi32(a.v, b.v)}; }
template <int N> INLINE i32 shift_left(i32 a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N> INLINE i32 shift_right(i32 a) { return {_mm512_srli_epi32(a.v, N)}; }
INLINE f32 to_float(i32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
INLINE i32 round_to_int(f32 a) { return {_mm512_cvtps_epi32(a.v)}; } // ties to even
INLINE f32 as_float(i32 a) { return {_mm512_castsi512_ps(a.v)}; }
INLINE i32 as_int(f32 a) { return {_mm512_castps_si512(a.v)}; }
// Stores the low byte of each lane; returns the sum of these signed bytes.
INLINE int32_t store_low_bytes(int8_t* p, i32 a) {
    const __m128i bytes = _mm512_cvtepi32_epi8(a.v), raised = _mm_xor_si128(bytes, _mm_set1_epi8(-128)); // bytes + 128
    const __m128i sums = _mm_sad_epu8(raised, _mm_setzero_si128());
    _mm_storeu_si128((__m128i*)p, bytes);
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}
// sum + the products of each lane's 4 unsigned bytes of w with its 4 signed bytes of a.
INLINE i32 dot(i32 sum, i32 w, i32 a) { return {_mm512_dpbusd_epi32(sum.v, w.v, a.v)}; }
#if HEADSTART_PAIRS
// sum + the products of each lane's 2 bfloat16 numbers of a with those of b. Subnormal numbers count as zero.
INLINE f32 dot_pairs(f32 sum, i32 a, i32 b) { return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)}; }
INLINE void store_bf16(uint16_t* p, f32 a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v)); }
// Table that converts 64 E4M3 codes to pairs of bfloat16. Its 128 entries, without the sign, fill two registers per byte.
struct E4M3Pairs {
    __m512i low[2], high[2], order[2];
};
INLINE E4M3Pairs e4m3_pairs(const uint8_t* low, const uint8_t* high) {
    alignas(64) uint8_t order[128]; // low byte, then high byte of each code
    for (int i = 0; i < 64; ++i) order[2 * i] = (uint8_t)i, order[2 * i + 1] = (uint8_t)(64 + i);
    return {{_mm512_loadu_si512(low), _mm512_loadu_si512(low + 64)}, {_mm512_loadu_si512(high), _mm512_loadu_si512(high + 64)},
            {_mm512_load_si512(order), _mm512_load_si512(order + 64)}};
}
INLINE void widen_pairs(const E4M3Pairs& by, const uint8_t* p, i32 (&pairs)[2]) {
    const __m512i codes = _mm512_loadu_si512(p), low = _mm512_permutex2var_epi8(by.low[0], codes, by.low[1]);
    const __m512i size = _mm512_permutex2var_epi8(by.high[0], codes, by.high[1]);
    const __m512i high = _mm512_ternarylogic_epi64(size, codes, _mm512_set1_epi8(-128), 0xf8); // size | codes & sign
    for (int i = 0; i < 2; ++i) pairs[i].v = _mm512_permutex2var_epi8(low, by.order[i], high);
}
#endif
INLINE i32 load_u8(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
// Tables of 16 bytes, indexed by bytes 0..15, or of 16 floats, indexed by the low 4 bits of each lane.
struct ByteTable {
    __m512i v;
};
struct FloatTable {
    __m512 v;
};
INLINE ByteTable byte_table(const uint8_t* p) {
    return {_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p))};
}
INLINE FloatTable float_table(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE i32 look_up(ByteTable table, i32 at) { return {_mm512_shuffle_epi8(table.v, at.v)}; }
INLINE f32 look_up(FloatTable table, i32 at) { return {_mm512_permutexvar_ps(at.v, table.v)}; }
// 64 E4M3 codes: 16 lanes x 2 columns, twice. Shifted into float16 the digits are right, also of subnormal numbers, and the
// value is 2^-8 of the code's.
INLINE f32 load_e4m3_halves(const uint8_t* p) { // 16 codes as float16 numbers: 2^-8 of their value; NaN as 480
    const __m256i codes = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    return {_mm512_cvtph_ps(_mm256_and_si256(codes, _mm256_set1_epi16((short)0xbf80)))};
}
INLINE __m512i half_e4m3(__m512i high) { return _mm512_and_si512(_mm512_srai_epi16(high, 1), _mm512_set1_epi16((short)0xbf80)); }
struct E4M3 {
    __m512i even, odd;
};
INLINE E4M3 load_e4m3(const uint8_t* p) {
    const __m512i both = _mm512_loadu_si512(p);
    return {half_e4m3(_mm512_slli_epi16(both, 8)), half_e4m3(both)};
}
INLINE f32 widen(const E4M3& codes, int column) {
    const __m512i halves = column % 2 ? codes.odd : codes.even;
    return {_mm512_cvtph_ps(column < 2 ? _mm512_castsi512_si256(halves) : _mm512_extracti64x4_epi64(halves, 1))};
}

#elif HEADSTART_AVX2

struct f32 {
    __m256 a, b;
};
struct i32 {
    __m256i a, b;
};

INLINE f32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, f32 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
INLINE f32 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE f32 operator+(f32 x, f32 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE f32 operator-(f32 x, f32 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE f32 operator*(f32 x, f32 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE f32 operator/(f32 x, f32 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE f32 fma(f32 x, f32 y, f32 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE f32 max(f32 x, f32 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE f32 min(f32 x, f32 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE f32 select_less(f32 x, f32 y, f32 yes, f32 no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
INLINE f32 load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
INLINE __m256 bf16_half(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
INLINE f32 load_bf16(const uint16_t* p) { return {bf16_half(p), bf16_half(p + 8)}; }
INLINE __m256 i8_half(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
INLINE f32 load_i8(const int8_t* p) { return {i8_half(p), i8_half(p + 8)}; }
INLINE i32 load(const int32_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
INLINE void store(int32_t* p, i32 x) {
    _mm256_storeu_si256((__m256i*)p, x.a);
    _mm256_storeu_si256((__m256i*)p + 1, x.b);
}
INLINE i32 splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE i32 operator+(i32 x, i32 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE i32 operator&(i32 x, i32 y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
INLINE i32 operator|(i32 x, i32 y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
INLINE i32 operator^(i32 x, i32 y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
INLINE i32 max(i32 x, i32 y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
template <int N> INLINE i32 shift_left(i32 x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N> INLINE i32 shift_right(i32 x) { return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)}; }
INLINE f32 to_float(i32 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE i32 round_to_int(f32 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE f32 as_float(i32 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
INLINE i32 as_int(f32 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
INLINE int32_t store_low_bytes(int8_t* p, i32 x) {
    const __m256i low = _mm256_set1_epi32(0xff);
    const __m256i words = _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
    const __m256i in_order = _mm256_permute4x64_epi64(words, 0xd8);
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(in_order), _mm256_extracti128_si256(in_order, 1));
    const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128()); // + 128
    _mm_storeu_si128((__m128i*)p, bytes);
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}
#if defined(__AVXVNNI__)
INLINE __m256i dot_half(__m256i sum, __m256i w, __m256i a) { return _mm256_dpbusd_avx_epi32(sum, w, a); }
#else
// vpmaddubsw saturates, so even and odd bytes are widened to 16 bits separately; each pair of products fits in 32 bits.
INLINE __m256i dot_half(__m256i sum, __m256i w, __m256i a) {
    const __m256i low = _mm256_set1_epi16(0x00ff);
    __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, low), _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8));
    __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(a, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
#endif
INLINE i32 dot(i32 sum, i32 w, i32 a) { return {dot_half(sum.a, w.a, a.a), dot_half(sum.b, w.b, a.b)}; }
INLINE i32 load_u8(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
struct ByteTable {
    __m256i v;
};
struct FloatTable {
    __m256 low, high;
};
INLINE ByteTable byte_table(const uint8_t* p) { return {_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p))}; }
INLINE FloatTable float_table(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE i32 look_up(ByteTable table, i32 at) { return {_mm256_shuffle_epi8(table.v, at.a), _mm256_shuffle_epi8(table.v, at.b)}; }
INLINE __m256 look_up_half(FloatTable table, __m256i at) { // bit 3 selects the half
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, at), _mm256_permutevar8x32_ps(table.high, at),
                            _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
}
INLINE f32 look_up(FloatTable table, i32 at) { return {look_up_half(table, at.a), look_up_half(table, at.b)}; }
INLINE f32 load_e4m3_halves(const uint8_t* p) {
    const __m256i codes = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    const __m256i halves = _mm256_and_si256(codes, _mm256_set1_epi16((short)0xbf80));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
INLINE __m256i half_e4m3(__m256i high) { return _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((short)0xbf80)); }
struct E4M3 {
    __m256i pairs[2];
};
INLINE E4M3 load_e4m3(const uint8_t* p) {
    return {{_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)}};
}
INLINE f32 widen(const E4M3& codes, int column) {
    const __m256i both = codes.pairs[column / 2], halves = half_e4m3(column % 2 ? both : _mm256_slli_epi16(both, 8));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}

#elif !HEADSTART_NEON

struct f32 {
    float v[16];
};
struct i32 {
    int32_t v[16];
};

#define LANES for (int l = 0; l < 16; ++l)
INLINE float half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    uint32_t bits;
    float value;
    if (exponent == 0) { // subnormal: mantissa * 2^-24 is exact
        value = (float)mantissa * 5.9604644775390625e-8f;
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    } else {
        bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    }
    std::memcpy(&value, &bits, 4);
    return value;
}
INLINE f32 load(const float* p) { f32 r; LANES r.v[l] = p[l]; return r; }
INLINE void store(float* p, f32 a) { LANES p[l] = a.v[l]; }
INLINE f32 splat(float a) { f32 r; LANES r.v[l] = a; return r; }
INLINE f32 operator+(f32 a, f32 b) { LANES a.v[l] += b.v[l]; return a; }
INLINE f32 operator-(f32 a, f32 b) { LANES a.v[l] -= b.v[l]; return a; }
INLINE f32 operator*(f32 a, f32 b) { LANES a.v[l] *= b.v[l]; return a; }
INLINE f32 operator/(f32 a, f32 b) { LANES a.v[l] /= b.v[l]; return a; }
#if defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
INLINE f32 fma(f32 a, f32 b, f32 c) { LANES c.v[l] = __builtin_fmaf(a.v[l], b.v[l], c.v[l]); return c; }
#else
// The bits of the instruction. The product is exact in double; the sum is rounded to odd (Boldo, Melquiond 2008), so that
// rounding it again to float is as good as rounding once. `error` is that of the sum (Knuth's TwoSum).
__attribute__((noinline, unused)) static f32 fma(f32 a, f32 b, f32 c) {
    LANES {
        const double product = (double)a.v[l] * b.v[l], more = c.v[l], sum = product + more, part = sum - product;
        const double error = (product - (sum - part)) + (more - part);
        int64_t bits;
        std::memcpy(&bits, &sum, 8);
        const int64_t even = (bits & 1) - 1, step = error * sum > 0.0 ? 1 : -1; // infinity becomes the largest double
        bits += error != 0.0 ? step & even : 0;
        double odd;
        std::memcpy(&odd, &bits, 8);
        c.v[l] = (float)odd;
    }
    return c;
}
#endif
INLINE f32 max(f32 a, f32 b) { LANES a.v[l] = a.v[l] > b.v[l] ? a.v[l] : b.v[l]; return a; }
INLINE f32 min(f32 a, f32 b) { LANES a.v[l] = a.v[l] < b.v[l] ? a.v[l] : b.v[l]; return a; }
INLINE f32 select_less(f32 a, f32 b, f32 yes, f32 no) { LANES no.v[l] = a.v[l] < b.v[l] ? yes.v[l] : no.v[l]; return no; }
INLINE f32 load_half(const uint16_t* p) { f32 r; LANES r.v[l] = half_to_float(p[l]); return r; }
INLINE f32 load_bf16(const uint16_t* p) {
    f32 r;
    LANES {
        const uint32_t bits = (uint32_t)p[l] << 16;
        std::memcpy(&r.v[l], &bits, 4);
    }
    return r;
}
INLINE f32 load_i8(const int8_t* p) { f32 r; LANES r.v[l] = p[l]; return r; }
INLINE i32 load(const int32_t* p) { i32 r; std::memcpy(r.v, p, 64); return r; }
INLINE void store(int32_t* p, i32 a) { std::memcpy(p, a.v, 64); }
INLINE i32 splat_int(int32_t a) { i32 r; LANES r.v[l] = a; return r; }
INLINE i32 operator+(i32 a, i32 b) { LANES a.v[l] = (int32_t)((uint32_t)a.v[l] + (uint32_t)b.v[l]); return a; }
INLINE i32 operator&(i32 a, i32 b) { LANES a.v[l] &= b.v[l]; return a; }
INLINE i32 operator|(i32 a, i32 b) { LANES a.v[l] |= b.v[l]; return a; }
INLINE i32 max(i32 a, i32 b) { LANES a.v[l] = a.v[l] > b.v[l] ? a.v[l] : b.v[l]; return a; }
template <int N> INLINE i32 shift_left(i32 a) { LANES a.v[l] = (int32_t)((uint32_t)a.v[l] << N); return a; }
template <int N> INLINE i32 shift_right(i32 a) { LANES a.v[l] = (int32_t)((uint32_t)a.v[l] >> N); return a; }
INLINE f32 to_float(i32 a) { f32 r; LANES r.v[l] = (float)a.v[l]; return r; }
INLINE i32 round_to_int(f32 a) { // callers stay within +-2^22; NaN and overflow as on x86
    i32 r;
    LANES {
        const float x = a.v[l];
        r.v[l] = x > -2147483648.0f && x < 2147483648.0f ? (int32_t)std::nearbyintf(x) : INT32_MIN;
    }
    return r;
}
INLINE f32 as_float(i32 a) { f32 r; std::memcpy(r.v, a.v, 64); return r; }
INLINE i32 as_int(f32 a) { i32 r; std::memcpy(r.v, a.v, 64); return r; }
INLINE int32_t store_low_bytes(int8_t* p, i32 a) { int32_t sum = 0; LANES sum += p[l] = (int8_t)a.v[l]; return sum; }
INLINE i32 dot(i32 sum, i32 w, i32 a) {
    const uint8_t* wb = (const uint8_t*)w.v;
    const int8_t* ab = (const int8_t*)a.v;
    LANES sum.v[l] += wb[4 * l] * ab[4 * l] + wb[4 * l + 1] * ab[4 * l + 1] + wb[4 * l + 2] * ab[4 * l + 2] +
                      wb[4 * l + 3] * ab[4 * l + 3];
    return sum;
}
INLINE i32 load_u8(const uint8_t* p) { i32 r; LANES r.v[l] = p[l]; return r; }
struct ByteTable {
    uint8_t v[16];
};
struct FloatTable {
    float v[16];
};
INLINE ByteTable byte_table(const uint8_t* p) { ByteTable table; std::memcpy(table.v, p, 16); return table; }
INLINE FloatTable float_table(const float* p) { FloatTable table; std::memcpy(table.v, p, 64); return table; }
INLINE i32 look_up(ByteTable table, i32 at) {
    uint8_t bytes[64];
    std::memcpy(bytes, at.v, 64);
    for (int i = 0; i < 64; ++i) bytes[i] = table.v[bytes[i] & 15];
    std::memcpy(at.v, bytes, 64);
    return at;
}
INLINE f32 look_up(FloatTable table, i32 at) { f32 r; LANES r.v[l] = table.v[at.v[l] & 15]; return r; }
INLINE f32 load_e4m3_halves(const uint8_t* p) {
    f32 r;
    LANES {
        const uint32_t bits = (uint32_t)(p[l] & 0x80) << 24 | (uint32_t)(p[l] & 0x7f) << 20; // float32's exponent is 120 above
        std::memcpy(&r.v[l], &bits, 4);
        r.v[l] *= 0x1p112f;
    }
    return r;
}
struct E4M3 {
    const uint8_t* codes;
};
INLINE E4M3 load_e4m3(const uint8_t* p) { return {p}; }
INLINE f32 widen(const E4M3& from, int column) {
    f32 r;
    LANES {
        const uint8_t code = from.codes[column / 2 * 32 + l * 2 + column % 2];
        r.v[l] = half_to_float((uint16_t)((code & 0x80) << 8 | (code & 0x7f) << 7));
    }
    return r;
}
#undef LANES

#endif

// Loads min(count, 16) floats; other lanes are 0.
INLINE f32 load_some(const float* p, int64_t count) {
    if (count >= 16) return load(p);
    float lanes[16] = {};
    for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
    return load(lanes);
}

INLINE void store_some(float* p, int64_t count, f32 a) {
    if (count >= 16) return store(p, a);
    float lanes[16];
    store(lanes, a);
    for (int64_t i = 0; i < count; ++i) p[i] = lanes[i];
}

INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
INLINE void prefetch_near(const void* p) { __builtin_prefetch(p, 0, 3); } // into the first cache

// Sums and maxima over the lanes, in one fixed tree: lanes l and l + 8, then l and l + 4, l + 2, l + 1.
#if HEADSTART_AVX512
template <class F> INLINE float reduce_lanes(f32 a, F&& join) {
    a = join(a, f32{_mm512_shuffle_f32x4(a.v, a.v, 0x4e)});
    a = join(a, f32{_mm512_shuffle_f32x4(a.v, a.v, 0xb1)});
    a = join(a, f32{_mm512_permute_ps(a.v, 0x4e)});
    a = join(a, f32{_mm512_permute_ps(a.v, 0xb1)});
    return _mm512_cvtss_f32(a.v);
}
INLINE float sum_lanes(f32 a) {
    return reduce_lanes(a, [](f32 x, f32 y) __attribute__((always_inline)) { return x + y; });
}
INLINE float max_lanes(f32 a) { // not for NaN
    return reduce_lanes(a, [](f32 x, f32 y) __attribute__((always_inline)) { return max(x, y); });
}
INLINE int32_t max_lanes(i32 a) { return _mm512_reduce_max_epi32(a.v); }
#elif HEADSTART_AVX2
template <class F> INLINE float reduce_lanes(__m256 eight, F&& join) {
    __m128 found = join(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    found = join(found, _mm_movehl_ps(found, found));
    return _mm_cvtss_f32(join(found, _mm_movehdup_ps(found)));
}
INLINE float sum_lanes(f32 x) {
    return reduce_lanes(_mm256_add_ps(x.a, x.b), [](__m128 a, __m128 b) __attribute__((always_inline)) { return _mm_add_ps(a, b); });
}
INLINE float max_lanes(f32 x) { // not for NaN
    return reduce_lanes(_mm256_max_ps(x.a, x.b), [](__m128 a, __m128 b) __attribute__((always_inline)) { return _mm_max_ps(a, b); });
}
INLINE int32_t max_lanes(i32 x) {
    const __m256i eight = _mm256_max_epi32(x.a, x.b);
    __m128i found = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    found = _mm_max_epi32(found, _mm_shuffle_epi32(found, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(found, _mm_shuffle_epi32(found, 0xb1)));
}
#elif !HEADSTART_NEON
INLINE int32_t max_lanes(i32 a) {
    int32_t v[16], most = INT32_MIN;
    store(v, a);
    for (int32_t each : v) most = each > most ? each : most;
    return most;
}
INLINE float sum_lanes(f32 a) {
    float v[16];
    store(v, a);
    for (int step = 8; step > 0; step /= 2)
        for (int l = 0; l < step; ++l) v[l] += v[l + step];
    return v[0];
}
INLINE float max_lanes(f32 a) { // not for NaN
    float v[16];
    store(v, a);
    for (int step = 8; step > 0; step /= 2)
        for (int l = 0; l < step; ++l) v[l] = v[l] > v[l + step] ? v[l] : v[l + step];
    return v[0];
}
#endif

// e^x: x = k ln 2 + r, Taylor series of degree 7 in r (|r| <= ln(2) / 2), times 2^k. 0 below -87; callers ensure x <= 88.
// NaN stays NaN.
INLINE f32 exp(f32 x) {
    const f32 low = splat(-87.0f);
#if HEADSTART_AVX512 // same bits with fewer operations: lanes below -87 are zeroed at the end
    const f32 safe = x;
    const f32 k = {_mm512_roundscale_ps((safe * splat(1.4426950216293335f)).v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
#else
    const f32 safe = max(low, x); // max returns its second operand for NaN, so a NaN in x stays
    const f32 k = to_float(round_to_int(safe * splat(1.4426950216293335f)));
#endif
    const f32 r = fma(k, splat(-1.428606765330187e-06f), fma(k, splat(-0.693145751953125f), safe));
    f32 y = splat(1.0f / 5040);
    y = fma(y, r, splat(1.0f / 720));
    y = fma(y, r, splat(1.0f / 120));
    y = fma(y, r, splat(1.0f / 24));
    y = fma(y, r, splat(1.0f / 6));
    y = fma(y, r, splat(0.5f));
    y = fma(y, r, splat(1.0f));
    y = fma(y, r, splat(1.0f));
#if HEADSTART_AVX512
    return {_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x.v, low.v, _CMP_NLT_UQ), y.v, k.v)};
#else
    const f32 power = as_float(shift_left<23>(round_to_int(k) + splat_int(127)));
    return select_less(x, low, splat(0.0f), y * power);
#endif
}

INLINE f32 sigmoid(f32 x) { // 1 / (1 + e^-x); under 2e-38 below -87. NaN stays NaN.
    return splat(1.0f) / (splat(1.0f) + exp(min(splat(87.0f), splat(0.0f) - x)));
}

INLINE f32 silu(f32 x) { // x / (1 + e^-x); 0 below -87, where the quotient is under 2e-36. NaN stays NaN.
    const f32 y = x / (splat(1.0f) + exp(min(splat(87.0f), splat(0.0f) - x)));
    return select_less(x, splat(-87.0f), splat(0.0f), y);
}

} // namespace headstart::HEADSTART_PATH
