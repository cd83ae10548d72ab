// Products with matrices whose columns share scales in groups: of integers, exact inside a group, with rows in 8 bits; of
// small floats, widened in registers, with rows of floats.
#pragma once

#include "kernels.h"
#include "levels.h"
#include "simd.h"

namespace headstart::HEADSTART_PATH {

#if HEADSTART_AVX512
constexpr int kChains = 2; // sums of even and of odd columns, as one alone waits for itself
#else
constexpr int kChains = 1;
#endif

enum class Read { F16, F32, ANY }; // how scales are read: ANY looks at each panel what they are

INLINE i32 splat_bytes(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return splat_int(four);
}

// Powers of two, halved: they belong to twice the values of E2M1. So are the FP8 scales beside such values.
INLINE f32 halved_e8m0(const uint8_t* p) {
    return as_float(max(shift_left<23>(load_u8(p)), splat_int(0x400000))) * splat(0.5f);
}
INLINE f32 halved_e4m3(const uint8_t* p, f32 factor) { // digits in place, the exponent 120 too small
    const i32 code = load_u8(p);
    const i32 bits = shift_left<24>(code & splat_int(0x80)) + shift_left<20>(code & splat_int(0x7f));
    return as_float(bits) * splat(0x1p120f) * factor * splat(0.5f);
}

// The scales (or mins) of one group, from where those of the panel begin.
template <Read kRead> INLINE f32 load_scale(const Matrix& w, const uint8_t* p, int64_t group, f32 factor) {
    if (kRead == Read::F32) return load(reinterpret_cast<const float*>(p) + group * 16);
    if (kRead == Read::F16) return load_half(reinterpret_cast<const uint16_t*>(p) + group * 16);
    switch (w.scales) {
    case Scales::F32: return load(reinterpret_cast<const float*>(p) + group * 16);
    case Scales::BF16: return load_bf16(reinterpret_cast<const uint16_t*>(p) + group * 16);
    case Scales::E8M0: return halved_e8m0(p + group * 16);
    case Scales::E4M3: return halved_e4m3(p + group * 16, factor);
    case Scales::F16: break;
    }
    return load_half(reinterpret_cast<const uint16_t*>(p) + group * 16);
}

// acc[r][b] += row r of x times block b. Up to 32 columns are summed as integers, then scaled.
template <int kBits, int kGroup, Offsets kOffsets, Read kRead, bool kLevels, int kRows>
INLINE void multiply_quantized(const Matrix& w, const uint8_t* const block[2], const Input& x, int64_t row,
                               f32 (&acc)[kRows][2]) {
    const QuantLayout layout(w.cols);
    constexpr bool kMin = kOffsets == Offsets::MINS, kPoints = kOffsets == Offsets::POINTS;
    constexpr int kPart = kGroup < 32 ? kGroup : 32, kParts = kPanel / kPart;
    constexpr int64_t kKnown = kPanel / kGroup * kLanes * (kRead == Read::F32 ? 4 : 2);
    const int64_t scale_bytes = kRead == Read::ANY ? w.scale_bytes() : kKnown;
    const int64_t head = kRead == Read::ANY ? w.head_bytes() : (kKnown * (kMin ? 2 : 1) + 63) / 64 * 64;
    const int64_t panel_bytes = head + kPanel * kLanes * kBits / 8;
    const i32 low = splat_int(0x0f0f0f0f);
    const ByteTable table = byte_table(byte_levels(w.levels));
    const int8_t* q[kRows];
    const float *scales[kRows], *scaled_sums[kRows];
    const int32_t* sums[kRows];
    for (int r = 0; r < kRows; ++r) {
        uint8_t* p = x.quants + x.at(row + r) * layout.row_bytes();
        q[r] = reinterpret_cast<const int8_t*>(p);
        scales[r] = layout.scales(p);
        sums[r] = kPart == 32 ? layout.sums(p) : layout.half_sums(p);
        scaled_sums[r] = kPart == 32 ? layout.scaled_sums(p) : layout.scaled_half_sums(p);
    }
    const int32_t zero = -w.zero;
    const bool factors = kRead == Read::ANY && kLevels && w.has_factors();
    const f32 factor[2] = {factors ? load(reinterpret_cast<const float*>(block[0])) : splat(1.0f),
                           factors ? load(reinterpret_cast<const float*>(block[1])) : splat(1.0f)};
    const int64_t first = factors ? w.factor_bytes() : 0, num_panels = layout.padded / kPanel;
    const int64_t ahead = row == 0 ? 2 * (first + num_panels * panel_bytes) : 0; // the next pair of blocks
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        const uint8_t* p[2] = {block[0] + first + panel * panel_bytes, block[1] + first + panel * panel_bytes};
        for (int64_t line = 0; line < panel_bytes; line += 64) {
            prefetch(p[0] + ahead + line);
            prefetch(p[1] + ahead + line);
        }
        for (int g = 0; g < kParts; ++g) {
            const int64_t part = panel * kParts + g, column = part * kPart, group = g * kPart / kGroup;
            i32 sum[kRows][2];
            for (int r = 0; r < kRows; ++r)
                sum[r][0] = sum[r][1] = splat_int(kMin || kPoints ? 0 : zero * sums[r][part]);
            if (kBits == 8) {
                const uint8_t* quants[2] = {p[0] + head + g * kPart * 16, p[1] + head + g * kPart * 16};
                for (int quad = 0; quad < kPart / 4; ++quad) {
                    const i32 w0 = load(reinterpret_cast<const int32_t*>(quants[0] + quad * 64));
                    const i32 w1 = load(reinterpret_cast<const int32_t*>(quants[1] + quad * 64));
                    for (int r = 0; r < kRows; ++r) {
                        const i32 a = splat_bytes(q[r] + column + quad * 4);
                        sum[r][0] = dot(sum[r][0], w0, a);
                        sum[r][1] = dot(sum[r][1], w1, a);
                    }
                }
            } else {
                // a half of 32 columns: low nibbles are its first 16 columns, high ones the last 16
                const int64_t half = kPart == 32 ? g : g / 2;
                const uint8_t* quants[2] = {p[0] + head + half * 256, p[1] + head + half * 256};
                for (int quad = 0; quad < 4; ++quad) {
                    const i32 v0 = load(reinterpret_cast<const int32_t*>(quants[0] + quad * 64));
                    const i32 v1 = load(reinterpret_cast<const int32_t*>(quants[1] + quad * 64));
                    if (kPart == 32 || g % 2 == 0) {
                        i32 w0 = v0 & low, w1 = v1 & low;
                        if (kLevels) w0 = look_up(table, w0), w1 = look_up(table, w1);
                        for (int r = 0; r < kRows; ++r) {
                            const i32 a = splat_bytes(q[r] + column + quad * 4);
                            sum[r][0] = dot(sum[r][0], w0, a);
                            sum[r][1] = dot(sum[r][1], w1, a);
                        }
                    }
                    if (kPart == 32 || g % 2 == 1) {
                        i32 w0 = shift_right<4>(v0) & low, w1 = shift_right<4>(v1) & low;
                        if (kLevels) w0 = look_up(table, w0), w1 = look_up(table, w1);
                        for (int r = 0; r < kRows; ++r) {
                            const i32 a = splat_bytes(q[r] + column + (kPart == 32 ? 16 : 0) + quad * 4);
                            sum[r][0] = dot(sum[r][0], w0, a);
                            sum[r][1] = dot(sum[r][1], w1, a);
                        }
                    }
                }
            }
            const f32 s0 = load_scale<kRead>(w, p[0], group, factor[0]), s1 = load_scale<kRead>(w, p[1], group, factor[1]);
            f32 z0 = s0, z1 = s1;
            if (kPoints) {
                z0 = splat(0.0f) - to_float(load_u8(p[0] + scale_bytes + group * 16));
                z1 = splat(0.0f) - to_float(load_u8(p[1] + scale_bytes + group * 16));
            }
            for (int r = 0; r < kRows; ++r) {
                const f32 scale = splat(scales[r][column / 32]);
                f32 whole0 = to_float(sum[r][0]), whole1 = to_float(sum[r][1]);
                if (kPoints) { // of integers below 2^24: exact
                    const f32 s = splat((float)sums[r][part]);
                    whole0 = fma(z0, s, whole0);
                    whole1 = fma(z1, s, whole1);
                }
                acc[r][0] = fma(whole0, s0 * scale, acc[r][0]);
                acc[r][1] = fma(whole1, s1 * scale, acc[r][1]);
            }
            if (kMin) {
                const f32 m0 = load_scale<kRead>(w, p[0] + scale_bytes, group, factor[0]);
                const f32 m1 = load_scale<kRead>(w, p[1] + scale_bytes, group, factor[1]);
                for (int r = 0; r < kRows; ++r) {
                    const f32 s = splat(scaled_sums[r][part]);
                    acc[r][0] = fma(m0, s, acc[r][0]);
                    acc[r][1] = fma(m1, s, acc[r][1]);
                }
            }
        }
    }
}

// 64 bytes of a block hold its next columns: of F8 four (2^-8 of their values), of L4 eight, looked up in a table.
template <Kind kKind> constexpr int kUnit = kKind == Kind::F8 ? 4 : 8;
struct Levels4 {
    FloatTable table;
    i32 codes;
};
INLINE int64_t column_of(Kind kind, int64_t unit, int i) { // within a panel
    return kind == Kind::F8 ? unit * 4 + i : unit / 4 * 32 + unit % 4 * 4 + i % 4 + i / 4 * 16;
}
INLINE f32 widen(const Levels4& from, int i) { // a table looks at the low 4 bits of a lane
    switch (i) {
    case 1: return look_up(from.table, shift_right<8>(from.codes));
    case 2: return look_up(from.table, shift_right<16>(from.codes));
    case 3: return look_up(from.table, shift_right<24>(from.codes));
    case 4: return look_up(from.table, shift_right<4>(from.codes));
    case 5: return look_up(from.table, shift_right<12>(from.codes));
    case 6: return look_up(from.table, shift_right<20>(from.codes));
    case 7: return look_up(from.table, shift_right<28>(from.codes));
    default: return look_up(from.table, from.codes);
    }
}
template <Kind kKind> INLINE auto load_codes(const FloatTable& table, const uint8_t* p) {
    if constexpr (kKind == Kind::F8)
        return load_e4m3(p);
    else
        return Levels4{table, load(reinterpret_cast<const int32_t*>(p))};
}

// acc[r][b] += row r of x times block b: codes of a group times floats, then the group's scale.
template <Kind kKind, int kRows>
INLINE void multiply_coded(const Matrix& w, const uint8_t* const block[2], const Input& x, int64_t row,
                           f32 (&acc)[kRows][2]) {
    const FloatTable table = float_table(float_levels(w.levels));
    const f32 unit_value = splat(kKind == Kind::F8 ? 256.0f : 1.0f);
    const int64_t panel_bytes = w.panel_bytes(), head = w.head_bytes(), num_panels = w.padded() / kPanel;
    const int64_t units = w.group / kUnit<kKind>; // of a group
    const int64_t ahead = row == 0 ? 2 * num_panels * panel_bytes : 0;
    alignas(64) float tail[kRows][kPanel] = {};
    const float* in[kRows];
    for (int r = 0; r < kRows; ++r) in[r] = x.values + x.at(row + r) * x.stride;
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        const int64_t rest = w.cols - panel * kPanel;
        if (rest < kPanel) // what lies behind a row is not its own
            for (int r = 0; r < kRows; ++r) {
                std::memcpy(tail[r], in[r], rest * 4);
                in[r] = tail[r];
            }
        const uint8_t* p[2] = {block[0] + panel * panel_bytes, block[1] + panel * panel_bytes};
        for (int64_t line = 0; line < panel_bytes; line += 64) {
            prefetch(p[0] + ahead + line);
            prefetch(p[1] + ahead + line);
        }
        for (int64_t group = 0, unit = 0; group < kPanel / w.group; ++group) {
            f32 sum[kRows][2][kChains];
            for (auto& r : sum)
                for (auto& b : r)
                    for (auto& chain : b) chain = splat(0.0f);
            for (int64_t end = unit + units; unit < end; ++unit) {
                const auto codes0 = load_codes<kKind>(table, p[0] + head + unit * 64);
                const auto codes1 = load_codes<kKind>(table, p[1] + head + unit * 64);
#pragma GCC unroll 8
                for (int i = 0; i < kUnit<kKind>; ++i) {
                    const f32 w0 = widen(codes0, i), w1 = widen(codes1, i);
#pragma GCC unroll 8
                    for (int r = 0; r < kRows; ++r) {
                        const f32 a = splat(in[r][column_of(kKind, unit, i)]);
                        sum[r][0][i % kChains] = fma(w0, a, sum[r][0][i % kChains]);
                        sum[r][1][i % kChains] = fma(w1, a, sum[r][1][i % kChains]);
                    }
                }
            }
#pragma GCC unroll 2
            for (int b = 0; b < 2; ++b) {
                const f32 scale = load_scale<Read::F32>(w, p[b], group, unit_value) * unit_value;
                for (int r = 0; r < kRows; ++r)
                    acc[r][b] = fma(kChains > 1 ? sum[r][b][0] + sum[r][b][kChains - 1] : sum[r][b][0], scale, acc[r][b]);
            }
        }
        for (int r = 0; r < kRows; ++r) in[r] += kPanel;
    }
}

} // namespace headstart::HEADSTART_PATH
