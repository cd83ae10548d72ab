// Products of bfloat16 matrices with AMX tiles; all other kernels are those of avx512bf16. Each output sums its columns in
// ascending order, so a row's bits depend on that row only. The instruction treats subnormal numbers as zeros.
#include <immintrin.h>

#include "amx.h"
#include "products.h"
#include "simd.h"

namespace headstart::HEADSTART_PATH {
namespace {

constexpr int64_t kStep = 32; // columns per tile: 16 pairs x 16 lanes, 1 KiB of a block

INLINE const uint16_t* bf16_row(const Matrix& w, const Input& x, int64_t row) {
    return x.halves + x.at(row) * w.padded();
}

constexpr int kRowTile = 32; // two tiles of rows x two blocks: four accumulators

// Tiles 0 to 3: sums of (rows 0.., block 0), (rows 0.., block 1), (rows 16.., block 0), (rows 16.., block 1); 4 and 5:
// input rows in bfloat16; 6 and 7: weight blocks.
void configure(int rows) {
    TileConfig config;
    const int first = rows < 16 ? rows : 16, second = rows > 16 ? rows - 16 : 1;
    const int each[8] = {first, first, second, second, first, second, 16, 16};
    for (int i = 0; i < 8; ++i) config.set(i, each[i], 64);
    _tile_loadconfig(&config);
}

// sums[b][r] = row `row` + r of x times block b, for `rows` rows.
void multiply(const Matrix& w, const uint8_t* const block[2], const Input& x, int64_t row, int rows,
              float (&sums)[2][kRowTile][16]) {
    alignas(64) uint16_t gathered[kRowTile][kStep];
    const bool more = rows > 16;
    const int64_t stride = x.index ? kStep * 2 : w.padded() * 2;
    configure(rows);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < w.padded(); k += kStep) {
        const uint8_t *first = block[0] + k * 32, *second = block[1] + k * 32;
        const uint16_t* in = x.index ? gathered[0] : x.halves + row * w.padded() + k;
        if (x.index)
            for (int r = 0; r < rows; ++r) std::memcpy(gathered[r], bf16_row(w, x, row + r) + k, kStep * 2);
        _tile_loadd(4, in, stride);
        _tile_loadd(6, first, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, second, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (more) {
            _tile_loadd(5, reinterpret_cast<const uint8_t*>(in) + 16 * stride, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(1, sums[1][0], 64);
    if (more) {
        _tile_stored(2, sums[0][16], 64);
        _tile_stored(3, sums[1][16], 64);
    }
    _tile_release();
}

// Calls f(first row, number of rows, sums) for tiles of rows.
template <class F>
INLINE void in_tiles(const Matrix& w, const uint8_t* const block[2], const Input& x, F&& f) {
    alignas(64) float sums[2][kRowTile][16];
    for (int64_t row = 0; row < x.rows; row += kRowTile) {
        const int rows = x.rows - row < kRowTile ? (int)(x.rows - row) : kRowTile;
        multiply(w, block, x, row, rows, sums);
        f(row, rows, sums);
    }
}

void linear(const Matrix& w, const float* bias, const Input& x, int64_t pair, const Output& out) {
    if (w.kind != Kind::BF16 || !x.halves) return avx512bf16::kernels().linear(w, bias, x, pair, out);
    const bool both = 2 * pair + 1 < w.num_blocks();
    const uint8_t* const block[2] = {w.block(2 * pair), w.block(2 * pair + (both ? 1 : 0))};
    in_tiles(w, block, x, [&](int64_t row, int rows, const float(&sums)[2][kRowTile][16]) __attribute__((always_inline)) {
        for (int r = 0; r < rows; ++r) put_linear({load(sums[0][r]), load(sums[1][r])}, w, bias, row + r, pair, out);
    });
}

void gated(const Matrix& gate, const Matrix& up, const float* gate_bias, const float* up_bias, Activation kind,
           const Input& x, int64_t pair, const Output& out) {
    if (gate.kind != Kind::BF16 || up.kind != Kind::BF16 || !x.halves)
        return avx512bf16::kernels().gated(gate, up, gate_bias, up_bias, kind, x, pair, out);
    for (int64_t half = 0; half < 2 && 2 * pair + half < gate.num_blocks(); ++half) {
        const int64_t at = (2 * pair + half) * 16;
        const uint8_t* const block[2] = {gate.block(2 * pair + half), up.block(2 * pair + half)};
        in_tiles(gate, block, x, [&](int64_t row, int rows, const float(&sums)[2][kRowTile][16]) __attribute__((always_inline)) {
            for (int r = 0; r < rows; ++r) {
                f32 both[2] = {load(sums[0][r]), load(sums[1][r])};
                if (x.factors) scale_both(both, x.factors[row + r]);
                store_some(out.values + (row + r) * out.stride + at, out.width - at,
                           gate_lanes(both, gate.rows, gate_bias, up_bias, kind, at));
            }
        });
    }
    if (!out.quants) return;
    for (int64_t r = 0; r < x.rows; ++r) {
        float lanes[32];
        const int64_t at = pair * 32, count = out.width - at < 32 ? out.width - at : 32;
        std::memcpy(lanes, out.values + r * out.stride + at, count * 4);
        quantize_gated(lanes, count, r, pair, out);
    }
    pad_gated(x.rows, pair, gate.num_blocks(), out);
}

} // namespace

void attend(const AttendTask& task); // amx_attention.cpp

const Kernels& kernels() {
    static const Kernels table = [] {
        Kernels made = avx512bf16::kernels();
        made.name = HEADSTART_STRING(HEADSTART_PATH);
        made.linear = linear;
        made.gated = gated;
        made.attend = attend;
        made.max_queries = kTileQueries;
        return made;
    }();
    return table;
}

} // namespace headstart::HEADSTART_PATH
