// The vectors of simd.h on ARM: four Advanced SIMD registers of ARMv8.0, with the byte products of dotprod or i8mm if this
// translation unit is compiled for them.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace headstart::HEADSTART_PATH {

struct f32 {
    float32x4_t a, b, c, d;
};
struct i32 {
    int32x4_t a, b, c, d;
};

INLINE f32 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
INLINE void store(float* p, f32 x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}
INLINE f32 splat(float x) {
    const float32x4_t four = vdupq_n_f32(x);
    return {four, four, four, four};
}
INLINE f32 operator+(f32 x, f32 y) {
    return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b), vaddq_f32(x.c, y.c), vaddq_f32(x.d, y.d)};
}
INLINE f32 operator-(f32 x, f32 y) {
    return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b), vsubq_f32(x.c, y.c), vsubq_f32(x.d, y.d)};
}
INLINE f32 operator*(f32 x, f32 y) {
    return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b), vmulq_f32(x.c, y.c), vmulq_f32(x.d, y.d)};
}
INLINE f32 operator/(f32 x, f32 y) {
    return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b), vdivq_f32(x.c, y.c), vdivq_f32(x.d, y.d)};
}
INLINE f32 fma(f32 x, f32 y, f32 z) {
    return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
// A NaN in either operand stays; on x86 only the second operand's does.
INLINE f32 max(f32 x, f32 y) {
    return {vmaxq_f32(x.a, y.a), vmaxq_f32(x.b, y.b), vmaxq_f32(x.c, y.c), vmaxq_f32(x.d, y.d)};
}
INLINE f32 min(f32 x, f32 y) {
    return {vminq_f32(x.a, y.a), vminq_f32(x.b, y.b), vminq_f32(x.c, y.c), vminq_f32(x.d, y.d)};
}
INLINE f32 select_less(f32 x, f32 y, f32 yes, f32 no) {
    return {vbslq_f32(vcltq_f32(x.a, y.a), yes.a, no.a), vbslq_f32(vcltq_f32(x.b, y.b), yes.b, no.b),
            vbslq_f32(vcltq_f32(x.c, y.c), yes.c, no.c), vbslq_f32(vcltq_f32(x.d, y.d), yes.d, no.d)};
}
INLINE f32 load_half(const uint16_t* p) {
    const float16x8_t low = vreinterpretq_f16_u16(vld1q_u16(p)), high = vreinterpretq_f16_u16(vld1q_u16(p + 8));
    return {vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
            vcvt_high_f32_f16(high)};
}
INLINE float32x4_t float_of(uint32x4_t bits) { return vreinterpretq_f32_u32(bits); }
INLINE f32 load_bf16(const uint16_t* p) {
    const uint16x8_t low = vld1q_u16(p), high = vld1q_u16(p + 8);
    return {float_of(vshll_n_u16(vget_low_u16(low), 16)), float_of(vshll_high_n_u16(low, 16)),
            float_of(vshll_n_u16(vget_low_u16(high), 16)), float_of(vshll_high_n_u16(high, 16))};
}
INLINE f32 load_i8(const int8_t* p) {
    const int8x16_t bytes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
}
INLINE i32 load(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}; }
INLINE void store(int32_t* p, i32 x) {
    vst1q_s32(p, x.a);
    vst1q_s32(p + 4, x.b);
    vst1q_s32(p + 8, x.c);
    vst1q_s32(p + 12, x.d);
}
INLINE i32 splat_int(int32_t x) {
    const int32x4_t four = vdupq_n_s32(x);
    return {four, four, four, four};
}
INLINE i32 operator+(i32 x, i32 y) {
    return {vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b), vaddq_s32(x.c, y.c), vaddq_s32(x.d, y.d)};
}
INLINE i32 operator&(i32 x, i32 y) {
    return {vandq_s32(x.a, y.a), vandq_s32(x.b, y.b), vandq_s32(x.c, y.c), vandq_s32(x.d, y.d)};
}
INLINE i32 operator|(i32 x, i32 y) {
    return {vorrq_s32(x.a, y.a), vorrq_s32(x.b, y.b), vorrq_s32(x.c, y.c), vorrq_s32(x.d, y.d)};
}
INLINE i32 max(i32 x, i32 y) {
    return {vmaxq_s32(x.a, y.a), vmaxq_s32(x.b, y.b), vmaxq_s32(x.c, y.c), vmaxq_s32(x.d, y.d)};
}
template <int N> INLINE i32 shift_left(i32 x) {
    return {vshlq_n_s32(x.a, N), vshlq_n_s32(x.b, N), vshlq_n_s32(x.c, N), vshlq_n_s32(x.d, N)};
}
template <int N> INLINE i32 shift_right(i32 x) { // logical shift
    const auto shifted = [](int32x4_t v) __attribute__((always_inline)) {
        return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(v), N));
    };
    return {shifted(x.a), shifted(x.b), shifted(x.c), shifted(x.d)};
}
INLINE f32 to_float(i32 x) {
    return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b), vcvtq_f32_s32(x.c), vcvtq_f32_s32(x.d)};
}
// Rounds ties to even. Overflow saturates and NaN gives 0; callers stay within +-2^22 or ignore the lane.
INLINE i32 round_to_int(f32 x) {
    return {vcvtnq_s32_f32(x.a), vcvtnq_s32_f32(x.b), vcvtnq_s32_f32(x.c), vcvtnq_s32_f32(x.d)};
}
INLINE f32 as_float(i32 x) {
    return {vreinterpretq_f32_s32(x.a), vreinterpretq_f32_s32(x.b), vreinterpretq_f32_s32(x.c),
            vreinterpretq_f32_s32(x.d)};
}
INLINE i32 as_int(f32 x) {
    return {vreinterpretq_s32_f32(x.a), vreinterpretq_s32_f32(x.b), vreinterpretq_s32_f32(x.c),
            vreinterpretq_s32_f32(x.d)};
}
INLINE int32_t store_low_bytes(int8_t* p, i32 x) {
    const auto low = [](int32x4_t v) __attribute__((always_inline)) { return vreinterpretq_s16_s32(v); };
    const int16x8_t first = vuzp1q_s16(low(x.a), low(x.b)), second = vuzp1q_s16(low(x.c), low(x.d));
    const int8x16_t bytes = vuzp1q_s8(vreinterpretq_s8_s16(first), vreinterpretq_s8_s16(second));
    vst1q_s8(p, bytes);
    return vaddlvq_s8(bytes);
}

INLINE i32 load_u8(const uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
    const auto as_signed = [](uint32x4_t v) __attribute__((always_inline)) { return vreinterpretq_s32_u32(v); };
    return {as_signed(vmovl_u16(vget_low_u16(low))), as_signed(vmovl_high_u16(low)),
            as_signed(vmovl_u16(vget_low_u16(high))), as_signed(vmovl_high_u16(high))};
}

struct ByteTable {
    uint8x16_t v;
};
struct FloatTable {
    uint8x16x4_t v; // bytes of 16 floats
};
INLINE ByteTable byte_table(const uint8_t* p) { return {vld1q_u8(p)}; }
INLINE FloatTable float_table(const float* p) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(p);
    return {{{vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}}};
}
INLINE float32x4_t look_up_four(FloatTable table, int32x4_t at) { // float i is bytes 4 i .. 4 i + 3
    const int32x4_t code = vandq_s32(at, vdupq_n_s32(15));
    const int32x4_t bytes = vmlaq_s32(vdupq_n_s32(0x03020100), code, vdupq_n_s32(0x04040404));
    return vreinterpretq_f32_u8(vqtbl4q_u8(table.v, vreinterpretq_u8_s32(bytes)));
}
INLINE f32 look_up(FloatTable table, i32 at) {
    return {look_up_four(table, at.a), look_up_four(table, at.b), look_up_four(table, at.c), look_up_four(table, at.d)};
}
// As on x86: shifted codes are float16 numbers of 2^-8 of the value.
INLINE float16x8_t half_e4m3(int16x8_t high) {
    return vreinterpretq_f16_s16(vandq_s16(vshrq_n_s16(high, 1), vdupq_n_s16((int16_t)0xbf80)));
}
INLINE f32 load_e4m3_halves(const uint8_t* p) {
    const uint8x16_t codes = vld1q_u8(p);
    const auto high = [](uint8x8_t half) __attribute__((always_inline)) { return vreinterpretq_s16_u16(vshll_n_u8(half, 8)); };
    const float16x8_t low = half_e4m3(high(vget_low_u8(codes))), rest = half_e4m3(high(vget_high_u8(codes)));
    return {vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(rest)),
            vcvt_high_f32_f16(rest)};
}
struct E4M3 {
    int16x8_t low[2], high[2]; // codes of each pair of columns
};
INLINE E4M3 load_e4m3(const uint8_t* p) {
    const auto words = [](const uint8_t* at) __attribute__((always_inline)) { return vreinterpretq_s16_u8(vld1q_u8(at)); };
    return {{words(p), words(p + 32)}, {words(p + 16), words(p + 48)}};
}
INLINE f32 widen(const E4M3& codes, int column) {
    const int16x8_t first = codes.low[column / 2], second = codes.high[column / 2];
    const float16x8_t low = half_e4m3(column % 2 ? first : vshlq_n_s16(first, 8));
    const float16x8_t high = half_e4m3(column % 2 ? second : vshlq_n_s16(second, 8));
    return {vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
            vcvt_high_f32_f16(high)};
}

// The fixed tree of simd.h: lanes l and l + 8, then l and l + 4, l + 2, l + 1.
INLINE float sum_lanes(f32 x) {
    const float32x4_t four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    return vaddv_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
}
INLINE float max_lanes(f32 x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.a, x.c), vmaxq_f32(x.b, x.d))); }
INLINE int32_t max_lanes(i32 x) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.a, x.c), vmaxq_s32(x.b, x.d))); }

} // namespace headstart::HEADSTART_PATH
