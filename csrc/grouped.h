// Products with matrices whose groups of columns share a scale: integer codes times int8 rows (exact within a group), and
// small-float codes times float rows.
#pragma once

#include "group_sums.h"
#include "kernels.h"
#include "levels.h"
#include "simd.h"

namespace headstart::HEADSTART_PATH {

constexpr int64_t kNear = 2; // panels that reach the first cache before their use

enum class Read { F16, F32, I8, ANY }; // compile-time type of scales; ANY: decided at run time

// Scales divided by 2, because the E2M1 table holds twice the values.
INLINE f32 halved_e8m0(const uint8_t* p) {
    return as_float(max(shift_left<23>(load_u8(p)), splat_int(0x400000))) * splat(0.5f);
}
INLINE f32 halved_e4m3(const uint8_t* p, f32 factor) { // shifted to float32's digits; the exponent is 120 too small
    const i32 code = load_u8(p);
    const i32 bits = shift_left<24>(code & splat_int(0x80)) + shift_left<20>(code & splat_int(0x7f));
    return as_float(bits) * splat(0x1p120f) * factor * splat(0.5f);
}

// Scales (or mins) of one group; p: those of the panel.
template <Read kRead> INLINE f32 load_scale(const Matrix& w, const uint8_t* p, int64_t group, f32 factor) {
    if (kRead == Read::F32) return load(reinterpret_cast<const float*>(p) + group * 16);
    if (kRead == Read::F16) return load_half(reinterpret_cast<const uint16_t*>(p) + group * 16);
    if (kRead == Read::I8) return load_i8(reinterpret_cast<const int8_t*>(p) + group * 16) * factor;
    switch (w.scales) {
    case Scales::F32: return load(reinterpret_cast<const float*>(p) + group * 16);
    case Scales::BF16: return load_bf16(reinterpret_cast<const uint16_t*>(p) + group * 16);
    case Scales::E8M0: return halved_e8m0(p + group * 16);
    case Scales::E4M3: return halved_e4m3(p + group * 16, factor);
    case Scales::F16:
    case Scales::I8: break;
    }
    return load_half(reinterpret_cast<const uint16_t*>(p) + group * 16);
}

// acc[r][b] += row r of x times block kFirst + b, b < kBlocks. At most 32 columns are summed as integers, then scaled.
template <int kBits, int kGroup, Offsets kOffsets, Read kRead, bool kLevels, int kFirst, int kRows, int kBlocks>
INLINE void multiply_quantized(const Matrix& w, const uint8_t* const block[2], const Input& x, int64_t row,
                               f32 (&acc)[kRows][kBlocks]) {
    const QuantLayout layout(w.cols);
    constexpr bool kMin = kOffsets == Offsets::MINS, kPoints = kOffsets == Offsets::POINTS;
    constexpr int kPart = kGroup < 32 ? kGroup : 32, kParts = kPanel / kPart;
    constexpr int64_t kKnown = kPanel / kGroup * kLanes * (kRead == Read::I8 ? 1 : 2);
    const int64_t scale_bytes = kRead == Read::ANY ? w.scale_bytes() : kKnown;
    const int64_t head = kRead == Read::ANY ? w.head_bytes() : (kKnown * (kMin ? 2 : 1) + 63) / 64 * 64;
    const int64_t panel_bytes = head + kPanel * kLanes * kBits / 8, panel_lines = panel_bytes / 64;
    const ByteTable table = lowered_table(byte_levels(w.levels));
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
    constexpr int32_t kOff = kBits == 8 || kLevels ? kByteOffset : 0;
    constexpr bool kSubtracts = kOff || !(kMin || kPoints);
    const int32_t zero = kMin || kPoints ? kOff : kOff - w.zero; // factor of the activations' sum
    const bool factors = kRead == Read::ANY && kLevels && w.has_factors();
    f32 factor[kBlocks], min_factor[kBlocks];
    for (int b = 0; b < kBlocks; ++b)
        factor[b] = min_factor[b] = factors ? load(reinterpret_cast<const float*>(block[kFirst + b])) : splat(1.0f);
    const int64_t first = factors ? w.factor_bytes() : 0, num_panels = layout.padded / kPanel;
    const int64_t block_bytes = w.block_bytes(); // called once: it is long
    const bool adjacent = kBlocks == 2 && block[1] - block[0] == block_bytes; // behind the first lies the second
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        const int64_t before = kRead == Read::I8 ? (panel / kFactorPanels + 1) * kLanes * 4 : first;
        const uint8_t* p[kBlocks];
        for (int b = 0; b < kBlocks; ++b) p[b] = block[kFirst + b] + before + panel * panel_bytes;
        if (kRead == Read::I8 && panel % kFactorPanels == 0)
            for (int b = 0; b < kBlocks; ++b) {
                factor[b] = load_half(reinterpret_cast<const uint16_t*>(p[b] - kLanes * 4));
                if (kMin) min_factor[b] = load_half(reinterpret_cast<const uint16_t*>(p[b] - kLanes * 2));
            }
        int32_t starts[kRows][kParts];
        if (kSubtracts) {
            for (int r = 0; r < kRows; ++r)
                for (int g = 0; g < kParts; ++g) starts[r][g] = zero * sums[r][panel * kParts + g];
            asm volatile("" : "+m"(starts)); // in memory, from where they reach all lanes without a vector instruction
        }
        const int64_t near = kNear * panel_bytes + (adjacent && panel + kNear >= num_panels ? block_bytes : 0);
#if HEADSTART_AVX512 || HEADSTART_AVX2 // elsewhere sums would leave the registers, or GCC 12 mixes up lanes in memory
#pragma GCC unroll 4
#endif
        for (int g = 0; g < kParts; ++g) {
            if (row == 0) // in steps, because many requests at once hold up the loads behind them
                for (int64_t line = panel_lines * g / kParts; line < panel_lines * (g + 1) / kParts; ++line)
                    for (int b = 0; b < kBlocks; ++b) {
                        prefetch_near(p[b] + near + line * 64);
                        prefetch(p[b] + 2 * block_bytes + line * 64);
                    }
            const int64_t part = panel * kParts + g, column = part * kPart, group = g * kPart / kGroup;
            i32 sum[kRows][kBlocks];
            for (int r = 0; r < kRows; ++r) {
                const i32 start = splat_int(kSubtracts ? starts[r][g] : 0);
                for (int b = 0; b < kBlocks; ++b) sum[r][b] = start;
            }
            add_group<kBits, kPart, kLevels, kRows>(p, head, g, q, column, table, sum);
            f32 s[kBlocks], z[kBlocks];
            for (int b = 0; b < kBlocks; ++b) {
                s[b] = z[b] = load_scale<kRead>(w, p[b], group, factor[b]);
                if (kPoints) z[b] = splat(0.0f) - to_float(load_u8(p[b] + scale_bytes + group * 16));
            }
            for (int r = 0; r < kRows; ++r) {
                const f32 scale = splat(scales[r][column / 32]);
                for (int b = 0; b < kBlocks; ++b) {
                    f32 whole = to_float(sum[r][b]);
                    if (kPoints) whole = fma(z[b], splat((float)sums[r][part]), whole); // exact: integers below 2^24
                    acc[r][b] = fma(whole, s[b] * scale, acc[r][b]);
                }
            }
            if (!kMin) continue;
            for (int b = 0; b < kBlocks; ++b) s[b] = load_scale<kRead>(w, p[b] + scale_bytes, group, min_factor[b]);
            for (int r = 0; r < kRows; ++r) {
                const f32 total = splat(scaled_sums[r][part]);
                for (int b = 0; b < kBlocks; ++b) acc[r][b] = fma(s[b], total, acc[r][b]);
            }
        }
    }
}

// Columns in 64 bytes of a block: four of F8 (as 2^-8 of the values), eight of L4 (table indices).
template <Kind kKind> constexpr int kUnit = kKind == Kind::F8 ? 4 : 8;
struct Levels4 {
    FloatTable table;
    i32 codes;
};
INLINE int64_t column_of(Kind kind, int64_t unit, int i) { // column of number i of a unit, within the panel
    return kind == Kind::F8 ? unit * 4 + i : unit / 4 * 32 + unit % 4 * 4 + i % 4 + i / 4 * 16;
}
INLINE f32 widen(const Levels4& from, int i) { // look_up uses the low 4 bits of a lane
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

#if HEADSTART_PAIRS
// acc[r][b] += row r of x times block b of F8: bfloat16 pairs of a group, then the group's scale.
template <int kRows>
INLINE void multiply_e4m3(const Matrix& w, const uint8_t* const block[2], const Input& x, int64_t row,
                          f32 (&acc)[kRows][2]) {
    const E4M3Pairs table = e4m3_pairs(kE4M3Halves.low, kE4M3Halves.high);
    const int64_t panel_bytes = w.panel_bytes(), head = w.head_bytes(), num_panels = w.padded() / kPanel;
    const int64_t units = w.group / kUnit<Kind::F8>; // of a group
    const int64_t ahead = row == 0 ? 2 * num_panels * panel_bytes : 0;
    const int8_t* in[kRows];
    for (int r = 0; r < kRows; ++r)
        in[r] = reinterpret_cast<const int8_t*>(x.halves + x.at(row + r) * w.padded());
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        const uint8_t* const p[2] = {block[0] + panel * panel_bytes, block[1] + panel * panel_bytes};
        for (int64_t line = 0; line < panel_bytes; line += 64)
            for (int b = 0; b < 2; ++b) prefetch(p[b] + ahead + line);
        for (int64_t group = 0, unit = 0; group < w.groups(); ++group) {
            f32 sum[kRows][2];
            for (auto& r : sum)
                for (f32& lanes : r) lanes = splat(0.0f);
            for (int64_t end = unit + units; unit < end; ++unit) {
                i32 pairs[2][2]; // [block][pair]
                for (int b = 0; b < 2; ++b) widen_pairs(table, p[b] + head + unit * 64, pairs[b]);
#pragma GCC unroll 2
                for (int i = 0; i < 2; ++i)
                    for (int r = 0; r < kRows; ++r) {
                        const i32 a = splat_bytes(in[r] + (panel * kPanel + unit * 4 + i * 2) * 2);
                        for (int b = 0; b < 2; ++b) sum[r][b] = dot_pairs(sum[r][b], pairs[b][i], a);
                    }
            }
            for (int b = 0; b < 2; ++b) {
                const f32 scale = load_scale<Read::F32>(w, p[b], group, splat(1.0f));
                for (int r = 0; r < kRows; ++r) acc[r][b] = fma(sum[r][b], scale, acc[r][b]);
            }
        }
    }
}
#endif

// acc[r][b] += row r of x times block kFirst + b: codes of a group times float32, then the group's scale.
template <Kind kKind, int kFirst, int kRows, int kBlocks>
INLINE void multiply_coded(const Matrix& w, const uint8_t* const block[2], const Input& x, int64_t row,
                           f32 (&acc)[kRows][kBlocks]) {
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
        if (rest < kPanel) // columns beyond the row's end count as zero
            for (int r = 0; r < kRows; ++r) {
                std::memcpy(tail[r], in[r], rest * 4);
                in[r] = tail[r];
            }
        const uint8_t* p[kBlocks];
        for (int b = 0; b < kBlocks; ++b) p[b] = block[kFirst + b] + panel * panel_bytes;
        for (int64_t line = 0; line < panel_bytes; line += 64)
            for (int b = 0; b < kBlocks; ++b) prefetch(p[b] + ahead + line);
        for (int64_t group = 0, unit = 0; group < w.groups(); ++group) {
            f32 sum[kRows][kBlocks];
            for (auto& r : sum)
                for (f32& lanes : r) lanes = splat(0.0f);
            for (int64_t end = unit + units; unit < end; ++unit) {
                decltype(load_codes<kKind>(table, nullptr)) codes[kBlocks];
                for (int b = 0; b < kBlocks; ++b) codes[b] = load_codes<kKind>(table, p[b] + head + unit * 64);
#pragma GCC unroll 8
                for (int i = 0; i < kUnit<kKind>; ++i) {
                    f32 weights[kBlocks];
#pragma GCC unroll 2
                    for (int b = 0; b < kBlocks; ++b) weights[b] = widen(codes[b], i);
#pragma GCC unroll 8
                    for (int r = 0; r < kRows; ++r) {
                        const f32 a = splat(in[r][column_of(kKind, unit, i)]);
#pragma GCC unroll 2
                        for (int b = 0; b < kBlocks; ++b) sum[r][b] = fma(weights[b], a, sum[r][b]);
                    }
                }
            }
#pragma GCC unroll 2
            for (int b = 0; b < kBlocks; ++b) {
                const f32 scale = load_scale<Read::F32>(w, p[b], group, unit_value) * unit_value;
                for (int r = 0; r < kRows; ++r) acc[r][b] = fma(sum[r][b], scale, acc[r][b]);
            }
        }
        for (int r = 0; r < kRows; ++r) in[r] += kPanel;
    }
}

} // namespace headstart::HEADSTART_PATH
