// Matrix products and row-wise kernels of one instruction-set path. A row's bits depend on that row only: every output lane
// sums over groups or columns in ascending order, whatever tile it is computed in.
#include "kernels.h"

#include <type_traits>

#include "grouped.h"
#include "products.h"
#include "simd.h"

namespace headstart::HEADSTART_PATH {
namespace {

// Rows and blocks multiplied together: as many accumulators as fit in registers. kSimple: weights are loaded as float32 and
// need no further registers.
#if HEADSTART_AVX512
constexpr int kRowTile = 8; // 8 rows x 2 blocks: 16 integer sums of 32 registers, which spill float sums once a group
template <int kRows, bool kSimple = false> constexpr int kBlocksAtOnce = 2;
#elif HEADSTART_AVX2
constexpr int kRowTile = 4; // 4 rows x a block's 2 registers: 8 accumulators of 16 registers
template <int kRows, bool kSimple = false> constexpr int kBlocksAtOnce = kRows <= (kSimple ? 2 : 1) ? 2 : 1;
#elif HEADSTART_NEON
constexpr int kRowTile = 4; // 4 rows x a block's 4 registers: 16 accumulators of 32 registers
template <int kRows, bool kSimple = false> constexpr int kBlocksAtOnce = 1;
#else
constexpr int kRowTile = 1;
template <int kRows, bool kSimple = false> constexpr int kBlocksAtOnce = 2;
#endif

// acc[r][b] += row r of x times block kFirst + b, b < kBlocks, of a float matrix, column by column.
template <Kind kKind, int kFirst, int kRows, int kBlocks>
INLINE void multiply_float(const Matrix& w, const uint8_t* const block[2], const Input& x, int64_t row,
                           f32 (&acc)[kRows][kBlocks]) {
    const float* in[kRows];
    for (int r = 0; r < kRows; ++r) in[r] = x.values + x.at(row + r) * x.stride;
    const auto add = [&](int64_t column, const f32 (&weights)[kBlocks]) __attribute__((always_inline)) {
        for (int r = 0; r < kRows; ++r) {
            const f32 a = splat(in[r][column]);
            for (int b = 0; b < kBlocks; ++b) acc[r][b] = fma(weights[b], a, acc[r][b]);
        }
    };
#if HEADSTART_PAIRS
    if (kKind == Kind::BF16 && x.halves) {
        const uint8_t* pairs[kRows];
        for (int r = 0; r < kRows; ++r)
            pairs[r] = reinterpret_cast<const uint8_t*>(x.halves + x.at(row + r) * w.padded());
        const int64_t ahead = row == 0 ? 2 * w.block_bytes() : 0; // prefetches the next pair of blocks
        for (int64_t k = 0; k < w.cols; k += 2) {
            prefetch(block[0] + ahead + k * 32);
            prefetch(block[1] + ahead + k * 32);
            const i32 w0 = load(reinterpret_cast<const int32_t*>(block[0] + k * 32));
            const i32 w1 = load(reinterpret_cast<const int32_t*>(block[1] + k * 32));
            for (int r = 0; r < kRows; ++r) {
                const i32 a = splat_bytes(reinterpret_cast<const int8_t*>(pairs[r] + k * 2));
                acc[r][0] = dot_pairs(acc[r][0], w0, a);
                acc[r][1] = dot_pairs(acc[r][1], w1, a);
            }
        }
        return;
    }
#endif
    if (kKind == Kind::BF16) {
        const i32 high = splat_int((int32_t)0xffff0000);
        for (int64_t k = 0; k < w.cols; k += 2) {
            i32 pair[kBlocks];
            f32 half[kBlocks]; // even column, then odd column
            for (int b = 0; b < kBlocks; ++b) {
                pair[b] = load(reinterpret_cast<const int32_t*>(block[kFirst + b] + k * 32));
                half[b] = as_float(shift_left<16>(pair[b]));
            }
            add(k, half);
            if (k + 1 == w.cols) break;
            for (int b = 0; b < kBlocks; ++b) half[b] = as_float(pair[b] & high);
            add(k + 1, half);
        }
        return;
    }
    for (int64_t k = 0; k < w.cols; ++k) {
        f32 weights[kBlocks];
        for (int b = 0; b < kBlocks; ++b) {
            if (kKind == Kind::F16)
                weights[b] = load_half(reinterpret_cast<const uint16_t*>(block[kFirst + b] + k * 32));
            else
                weights[b] = load(reinterpret_cast<const float*>(block[kFirst + b] + k * 64));
        }
        add(k, weights);
    }
}

template <int kRows> using Tile = f32[kRows][2];
template <int kRows> using Multiply = void (*)(const Matrix&, const uint8_t* const[2], const Input&, int64_t, Tile<kRows>&);

// acc = the sums that multiply(sums, first block) adds to zeros, for both blocks.
template <int kRows, bool kSimple = false, class F> INLINE void from_zero(Tile<kRows>& acc, F&& multiply) {
    const auto take = [&](auto first) __attribute__((always_inline)) {
        constexpr int kBlocks = kBlocksAtOnce<kRows, kSimple>;
        f32 sum[kRows][kBlocks];
        for (auto& r : sum)
            for (f32& lanes : r) lanes = splat(0.0f);
        multiply(sum, first);
        for (int r = 0; r < kRows; ++r)
            for (int b = 0; b < kBlocks; ++b) acc[r][first.value + b] = sum[r][b];
    };
    take(std::integral_constant<int, 0>{});
    if constexpr (kBlocksAtOnce<kRows, kSimple> == 1) take(std::integral_constant<int, 1>{});
}

template <int kBits, int kGroup, Offsets kOffsets, Read kRead, bool kLevels, int kRows>
void quantized(const Matrix& w, const uint8_t* const block[2], const Input& x, int64_t row, Tile<kRows>& acc) {
    from_zero<kRows>(acc, [&](auto& sum, auto first) __attribute__((always_inline)) {
        multiply_quantized<kBits, kGroup, kOffsets, kRead, kLevels, first.value>(w, block, x, row, sum);
    });
}

template <Kind kKind, int kRows>
void floating(const Matrix& w, const uint8_t* const block[2], const Input& x, int64_t row, Tile<kRows>& acc) {
    from_zero<kRows, kKind != Kind::BF16>(acc, [&](auto& sum, auto first) __attribute__((always_inline)) {
        multiply_float<kKind, first.value>(w, block, x, row, sum);
    });
}

template <Kind kKind, int kRows>
void coded(const Matrix& w, const uint8_t* const block[2], const Input& x, int64_t row, Tile<kRows>& acc) {
    if constexpr (kRows > 6) { // two tiles: a group's float sums do not fit in registers
        coded<kKind, 4>(w, block, x, row, reinterpret_cast<Tile<4>&>(acc));
        return coded<kKind, kRows - 4>(w, block, x, row + 4, reinterpret_cast<Tile<kRows - 4>&>(acc[4]));
    }
    from_zero<kRows>(acc, [&](auto& sum, auto first) __attribute__((always_inline)) {
#if HEADSTART_PAIRS
        if constexpr (kKind == Kind::F8)
            if (x.halves) return multiply_e4m3(w, block, x, row, sum);
#endif
        multiply_coded<kKind, first.value>(w, block, x, row, sum);
    });
}

template <int kBits, int kGroup, Read kRead, int kRows> Multiply<kRows> pick_quantized(const Matrix& w) {
    if (w.offsets == Offsets::MINS) return quantized<kBits, kGroup, Offsets::MINS, kRead, false, kRows>;
    return quantized<kBits, kGroup, Offsets::NONE, kRead, false, kRows>;
}

template <int kRows> Multiply<kRows> pick(const Matrix& w) { // w.known() must hold
    const bool levels = w.levels != Levels::NONE, points = w.offsets == Offsets::POINTS;
    switch (w.kind) {
    case Kind::F32: return floating<Kind::F32, kRows>;
    case Kind::F16: return floating<Kind::F16, kRows>;
    case Kind::BF16: return floating<Kind::BF16, kRows>;
    case Kind::F8: return coded<Kind::F8, kRows>;
    case Kind::L4: return coded<Kind::L4, kRows>;
    case Kind::Q8:
        if (points) return quantized<8, 64, Offsets::POINTS, Read::ANY, false, kRows>;
        if (w.group == 64) return quantized<8, 64, Offsets::NONE, Read::ANY, false, kRows>;
        return quantized<8, 32, Offsets::NONE, Read::F16, false, kRows>;
    case Kind::Q5:
        if (w.scales == Scales::I8) return quantized<5, 32, Offsets::MINS, Read::I8, false, kRows>;
        return pick_quantized<5, 32, Read::F16, kRows>(w);
    case Kind::Q6:
        return quantized<6, 16, Offsets::NONE, Read::I8, false, kRows>;
    case Kind::Q4: break;
    }
    if (levels && w.group == 16) return quantized<4, 16, Offsets::NONE, Read::ANY, true, kRows>;
    if (levels && w.scales == Scales::I8) return quantized<4, 32, Offsets::NONE, Read::I8, true, kRows>;
    if (levels) return quantized<4, 32, Offsets::NONE, Read::ANY, true, kRows>;
    if (points && w.group == 64) return quantized<4, 64, Offsets::POINTS, Read::ANY, false, kRows>;
    if (points) return quantized<4, 32, Offsets::POINTS, Read::ANY, false, kRows>;
    if (w.group == 16) return pick_quantized<4, 16, Read::I8, kRows>(w);
    if (w.scales == Scales::I8) return quantized<4, 32, Offsets::MINS, Read::I8, false, kRows>;
    return pick_quantized<4, 32, Read::F16, kRows>(w);
}

template <int kRows>
void linear_rows(const Matrix& w, const uint8_t* const block[2], const float* bias, const Input& x, int64_t row,
                 int64_t pair, const Output& out) {
    Tile<kRows> acc;
    pick<kRows>(w)(w, block, x, row, acc);
    for (int r = 0; r < kRows; ++r) put_linear(acc[r], w, bias, row + r, pair, out);
}

void quantize(const float* x, int64_t width, uint8_t* row) {
    const QuantLayout layout(width);
    for (int64_t group = 0; group < layout.groups; ++group) {
        const int64_t rest = width - group * 32;
        if (rest >= 32) {
            quantize_group(x + group * 32, group, layout, row);
        } else {
            float tail[32] = {};
            for (int64_t i = 0; i < rest; ++i) tail[i] = x[group * 32 + i];
            quantize_group(tail, group, layout, row);
        }
    }
}

// The existing ones of blocks 2 * pair and 2 * pair + 1 of both matrices, as [half][gate, up].
struct GatedBlocks {
    const uint8_t* at[2][2];
    int halves;
    bool same_format;
};

INLINE GatedBlocks gated_blocks(const Matrix& gate, const Matrix& up, int64_t pair) {
    GatedBlocks found{{}, 2 * pair + 1 < gate.num_blocks() ? 2 : 1, gate.same_format(up)};
    for (int half = 0; half < found.halves; ++half) {
        found.at[half][0] = gate.block(2 * pair + half);
        found.at[half][1] = up.block(2 * pair + half);
    }
    return found;
}

template <int kRows>
void gated_rows(const Matrix& gate, const Matrix& up, const GatedBlocks& blocks, const float* gate_bias,
                const float* up_bias, Activation kind, const Input& x, int64_t row, int64_t pair, const Output& out) {
    alignas(64) float tile[kRows][32]; // lanes without a block are beyond the output width
    for (int half = 0; half < blocks.halves; ++half) {
        const uint8_t* const* block = blocks.at[half];
        Tile<kRows> acc;
        if (blocks.same_format) {
            pick<kRows>(gate)(gate, block, x, row, acc);
        } else { // formats differ (GGUF files mix types in a layer): multiply each matrix separately
            Tile<kRows> other;
            const uint8_t* const first[2] = {block[0], block[0]};
            const uint8_t* const second[2] = {block[1], block[1]};
            pick<kRows>(gate)(gate, first, x, row, acc);
            pick<kRows>(up)(up, second, x, row, other);
            for (int r = 0; r < kRows; ++r) acc[r][1] = other[r][1];
        }
        for (int r = 0; r < kRows; ++r) {
            if (x.factors) scale_both(acc[r], x.factors[row + r]);
            const int64_t at = (2 * pair + half) * 16;
            store(tile[r] + half * 16, gate_lanes(acc[r], gate.rows, gate_bias, up_bias, kind, at));
        }
    }
    for (int r = 0; r < kRows; ++r) put_gated(tile[r], row + r, pair, out);
}

// Calls f(first row, constant number of rows) for tiles of at most kRowTile rows.
template <class F> INLINE void in_tiles(int64_t rows, F&& f) {
    int64_t row = 0;
    for (; rows - row >= kRowTile; row += kRowTile) f(row, std::integral_constant<int, kRowTile>{});
    switch (rows - row) {
#if HEADSTART_AVX512
    case 7: f(row, std::integral_constant<int, 7>{}); break;
    case 6: f(row, std::integral_constant<int, 6>{}); break;
    case 5: f(row, std::integral_constant<int, 5>{}); break;
    case 4: f(row, std::integral_constant<int, 4>{}); break;
#endif
#if HEADSTART_AVX512 || HEADSTART_AVX2 || HEADSTART_NEON
    case 3: f(row, std::integral_constant<int, 3>{}); break;
    case 2: f(row, std::integral_constant<int, 2>{}); break;
    case 1: f(row, std::integral_constant<int, 1>{}); break;
#endif
    default: break;
    }
}

void linear(const Matrix& w, const float* bias, const Input& x, int64_t pair, const Output& out) {
    const int64_t last = 2 * pair + 1 < w.num_blocks() ? 2 * pair + 1 : 2 * pair;
    const uint8_t* const block[2] = {w.block(2 * pair), w.block(last)};
    in_tiles(x.rows, [&](int64_t row, auto tile) { linear_rows<tile.value>(w, block, bias, x, row, pair, out); });
}

void gated(const Matrix& gate, const Matrix& up, const float* gate_bias, const float* up_bias, Activation kind,
           const Input& x, int64_t pair, const Output& out) {
    const GatedBlocks blocks = gated_blocks(gate, up, pair);
    in_tiles(x.rows, [&](int64_t row, auto tile) {
        gated_rows<tile.value>(gate, up, blocks, gate_bias, up_bias, kind, x, row, pair, out);
    });
    pad_gated(x.rows, pair, gate.num_blocks(), out);
}

void embed(const Matrix& table, int64_t id, float* out) { read_row(table, id, out); }

void norm(const float* x, const float* residual, const float* weight, float eps, int64_t width, int64_t group,
          float* out, float* total) {
    for (int64_t start = 0; start < width; start += group) {
        f32 squares = splat(0.0f);
        for (int64_t i = start; i < start + group; i += 16) {
            const int64_t rest = start + group - i;
            f32 value = load_some(x + i, rest);
            if (residual) value = value + load_some(residual + i, rest);
            if (total) store_some(total + i, rest, value);
            squares = fma(value, value, squares);
        }
        const f32 inverse = splat(1.0f / std::sqrt(sum_lanes(squares) / (float)group + eps));
        const float* from = total ? total : x;
        for (int64_t i = start; i < start + group; i += 16) {
            const int64_t rest = start + group - i;
            store_some(out + i, rest, load_some(from + i, rest) * inverse * load_some(weight + i - start, rest));
        }
    }
}

void activate_row(const float* x, Activation kind, int64_t width, float* out) {
    for (int64_t i = 0; i < width; i += 16) store_some(out + i, width - i, activate(load_some(x + i, width - i), kind));
}

void activate_mul(const float* gate, const float* up, Activation kind, int64_t width, float* out) {
    for (int64_t i = 0; i < width; i += 16)
        store_some(out + i, width - i, gate_mul(load_some(gate + i, width - i), load_some(up + i, width - i), kind));
}

void scale(const float* x, float factor, int64_t width, float* out) {
    for (int64_t i = 0; i < width; i += 16) store_some(out + i, width - i, load_some(x + i, width - i) * splat(factor));
}

void softcap_row(const float* x, float cap, int64_t width, float* out) {
    for (int64_t i = 0; i < width; i += 16) store_some(out + i, width - i, softcap(load_some(x + i, width - i), cap));
}

void add(const float* a, const float* b, int64_t width, float* out) {
    for (int64_t i = 0; i < width; i += 16)
        store_some(out + i, width - i, load_some(a + i, width - i) + load_some(b + i, width - i));
}

void rope(const float* x, const float* cosines, const float* sines, int64_t num_heads, int64_t head_dim, int64_t half,
          float* out) {
    for (int64_t head = 0; head < num_heads; ++head, x += head_dim, out += head_dim) {
        for (int64_t i = 0; i < half; i += 16) {
            const int64_t rest = half - i;
            const f32 a = load_some(x + i, rest), b = load_some(x + half + i, rest);
            const f32 c = load_some(cosines + i, rest), s = load_some(sines + i, rest);
            store_some(out + i, rest, a * c - b * s);
            store_some(out + half + i, rest, b * c + a * s);
        }
        for (int64_t i = 2 * half; i < head_dim; ++i) out[i] = x[i];
    }
}

INLINE uint16_t to_bf16(float value) { // rounds to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE uint8_t to_e4m3(float value) { // rounds to nearest, ties to even; above 448 becomes 448. value: no NaN
    const float size = std::fabs(value) < 448.0f ? std::fabs(value) : 448.0f, shifted = size + 0x1p14f;
    uint32_t bits, digits, sign;
    std::memcpy(&bits, &size, 4);
    std::memcpy(&digits, &shifted, 4); // the last digit of 2^14 is 2^-9, the step of subnormal codes
    std::memcpy(&sign, &value, 4);
    const uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    return (uint8_t)((size < 0x1p-6f ? digits & 15 : normal) | (sign >> 24 & 0x80));
}

// Quantizes a key or value vector to I8 or F8 with one scale; returns the scale.
template <Store kStore> float quantize_vector(const float* x, int64_t count, uint8_t* out, int64_t step) {
    constexpr float kLargest = kStore == Store::I8 ? 127.0f : 448.0f, kUnit = kStore == Store::I8 ? 1.0f : 256.0f;
    float peak = 0.0f;
    bool finite = true;
    for (int64_t i = 0; i < count; ++i) {
        finite = finite && std::isfinite(x[i]);
        peak = std::fabs(x[i]) > peak ? std::fabs(x[i]) : peak;
    }
    const bool empty = peak < 1e-30f || !finite;
    const float inverse = empty ? 0.0f : kLargest / peak;
    for (int64_t i = 0; i < count; ++i) {
        const float scaled = x[i] * inverse;
        out[i * step] = empty ? 0 : kStore == Store::I8 ? (uint8_t)(int8_t)std::nearbyintf(scaled) : to_e4m3(scaled);
    }
    return finite ? (empty ? 0.0f : peak * (kUnit / kLargest)) : std::nanf("");
}

void store_kv(const float* keys, const float* values, uint8_t* pool, const KVLayout& layout, int64_t slot) {
    const int64_t dim = layout.head_dim, wide = layout.value_dim, lane = slot % 16;
    for (int64_t head = 0; head < layout.num_heads; ++head, keys += dim, values += wide) {
        uint8_t* tile = pool + layout.tile_at(slot, head);
        uint8_t* value_row = tile + layout.values_at() + layout.value_at(lane, 0) * layout.item();
        if (layout.store == Store::F32) {
            for (int64_t d = 0; d < dim; ++d) reinterpret_cast<float*>(tile)[d * 16 + lane] = keys[d];
            std::memcpy(value_row, values, wide * 4);
        } else if (layout.store == Store::BF16) {
            auto* key = reinterpret_cast<uint16_t*>(tile) + lane * 2;
            for (int64_t d = 0; d < dim; ++d) key[d / 2 * 32 + d % 2] = to_bf16(keys[d]);
            for (int64_t d = 0; d < wide; ++d) reinterpret_cast<uint16_t*>(value_row)[d * 2] = to_bf16(values[d]);
        } else {
            const auto quantize = layout.store == Store::I8 ? quantize_vector<Store::I8> : quantize_vector<Store::F8>;
            float* scales = reinterpret_cast<float*>(tile + layout.scales_at());
            scales[lane] = quantize(keys, dim, tile + lane, 16);
            scales[16 + lane] = quantize(values, wide, value_row, 1);
        }
    }
}

} // namespace

#if HEADSTART_PAIRS
void to_bf16_row(const float* x, int64_t width, uint16_t* row) {
    for (int64_t i = 0; i < whole_panels(width); i += 16) store_bf16(row + i, load_some(x + i, width - i));
}
#else
constexpr auto to_bf16_row = nullptr;
#endif

void attend(const AttendTask& task); // attention.cpp
void join(const AttendTask& task);
void sigmoid_mul(const float* gate, const float* x, int64_t gates, int64_t width, float* out); // experts.cpp
void route(const float* logits, const float* bias, const int64_t* token_experts, const Router& router, int32_t* ids,
           float* weights);
void weighted_sum(const float* values, int64_t stride, const int32_t* slots, const float* weights, int64_t count,
           const float* x, int64_t width, float* out);
// recurrent.cpp
void conv(const float* const* rows, const float* taps, const float* bias, int64_t width, int64_t channels, float* out);
void softplus(const float* x, const float* rate, const float* bias, int64_t width, float* out);
void bounded_decay(const float* x, const float* rate, const float* bias, float bound, int64_t width, float* out);
void recur(const RecurrenceTask& task);
void index_scores(const IndexTask& task); // indexer.cpp
void stream_weights(const float* mixes, const float* base, const float* scale, const StreamShape& shape, float* out);
void sum_streams(const float* streams, const float* weights, int64_t count, int64_t width, float* out);
void mix_streams(const float* streams, const float* x, const float* weights, int64_t count, int64_t width, bool mixed,
                 float* out);
void compress(const CompressTask& task); // streams.cpp has these four

const Kernels& kernels() {
    static constexpr Kernels table{HEADSTART_STRING(HEADSTART_PATH), linear,      gated,  embed,    quantize, norm,
                                   activate_row,            activate_mul, scale, softcap_row, add,   rope,
                                   store_kv,                attend,      join,   sigmoid_mul, route, weighted_sum,  conv,
                                   softplus,                bounded_decay, recur, stream_weights,
                                   sum_streams,             mix_streams, compress, index_scores, kMaxQueries, to_bf16_row};
    return table;
}

} // namespace headstart::HEADSTART_PATH
