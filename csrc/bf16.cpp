// bfloat16 matrices times rows rounded to bfloat16, by the instructions for that: pairs of columns at once (VDPBF16PS),
// or tiles (AMX). All else is the avx512 path's. A sum over columns is one chain in ascending order, whatever the tile:
// bits of a row depend on that row only. Both instructions read subnormal numbers as zeros.
#include <immintrin.h>

#include "kernels.h"
#include "products.h"
#include "simd.h"

namespace headstart::HEADSTART_PATH {
namespace {

constexpr int64_t kStep = 32; // columns of a tile: 16 pairs of 16 lanes, 1 KiB of a block

INLINE int64_t halves_stride(const Matrix& w) { return w.padded(); } // of a row, in items

INLINE const uint16_t* halves_of(const Matrix& w, const Input& x, int64_t row) {
    return x.halves + x.at(row) * halves_stride(w);
}

#if defined(__AMX_BF16__)

constexpr int kRowTile = 32; // two tiles of rows x two blocks: four sums

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
};

// Tiles 0 to 3: sums of (rows 0.., block 0), (rows 0.., block 1), (rows 16.., block 0), (rows 16.., block 1); 4 and 5:
// the rows' halves; 6 and 7: blocks. Other code of this thread (oneDNN) may have configured them since.
void configure(int rows) {
    TileConfig config;
    const uint8_t first = rows < 16 ? rows : 16, second = rows > 16 ? rows - 16 : 1;
    const uint8_t each[8] = {first, first, second, second, first, second, 16, 16};
    for (int i = 0; i < 8; ++i) config.rows[i] = each[i];
    _tile_loadconfig(&config);
}

// sums[block][row] = row `row` of x times a block of w, for `rows` rows.
void multiply(const Matrix& w, const uint8_t* const block[2], const Input& x, int64_t row, int rows,
              float (&sums)[2][kRowTile][16]) {
    alignas(64) uint16_t gathered[kRowTile][kStep];
    const bool more = rows > 16;
    const int64_t stride = x.index ? kStep * 2 : halves_stride(w) * 2;
    configure(rows);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const int64_t ahead = row == 0 ? 2 * w.padded() * 32 : 0; // the next pair of blocks
    for (int64_t k = 0; k < w.padded(); k += kStep) {
        const uint8_t *first = block[0] + k * 32, *second = block[1] + k * 32;
        for (int64_t line = 0; line < kStep * 32; line += 64) {
            prefetch(first + ahead + line);
            prefetch(second + ahead + line);
        }
        const uint16_t* in = x.index ? gathered[0] : x.halves + row * halves_stride(w) + k;
        if (x.index)
            for (int r = 0; r < rows; ++r) std::memcpy(gathered[r], halves_of(w, x, row + r) + k, kStep * 2);
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

#else

constexpr int kRowTile = 8;

template <int kRows>
INLINE void multiply_rows(const Matrix& w, const uint8_t* const block[2], const Input& x, int64_t row,
                          float (&sums)[2][kRowTile][16]) {
    const uint16_t* in[kRows];
    f32 acc[kRows][2];
    for (int r = 0; r < kRows; ++r) in[r] = halves_of(w, x, row + r), acc[r][0] = acc[r][1] = splat(0.0f);
    const int64_t ahead = row == 0 ? 2 * w.padded() * 32 : 0; // the next pair of blocks
    for (int64_t k = 0; k < w.padded(); k += 2) {
        prefetch(block[0] + ahead + k * 32);
        prefetch(block[1] + ahead + k * 32);
        const auto w0 = (__m512bh)_mm512_loadu_si512(block[0] + k * 32);
        const auto w1 = (__m512bh)_mm512_loadu_si512(block[1] + k * 32);
        for (int r = 0; r < kRows; ++r) {
            int32_t pair;
            std::memcpy(&pair, in[r] + k, 4);
            const auto a = (__m512bh)_mm512_set1_epi32(pair);
            acc[r][0].v = _mm512_dpbf16_ps(acc[r][0].v, w0, a);
            acc[r][1].v = _mm512_dpbf16_ps(acc[r][1].v, w1, a);
        }
    }
    for (int r = 0; r < kRows; ++r) store(sums[0][r], acc[r][0]), store(sums[1][r], acc[r][1]);
}

void multiply(const Matrix& w, const uint8_t* const block[2], const Input& x, int64_t row, int rows,
              float (&sums)[2][kRowTile][16]) {
    switch (rows) {
    case 1: return multiply_rows<1>(w, block, x, row, sums);
    case 2: return multiply_rows<2>(w, block, x, row, sums);
    case 3: return multiply_rows<3>(w, block, x, row, sums);
    case 4: return multiply_rows<4>(w, block, x, row, sums);
    case 5: return multiply_rows<5>(w, block, x, row, sums);
    case 6: return multiply_rows<6>(w, block, x, row, sums);
    case 7: return multiply_rows<7>(w, block, x, row, sums);
    default: return multiply_rows<8>(w, block, x, row, sums);
    }
}

#endif

// Calls f(first row, number of rows, their sums) for tiles of rows.
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
    if (w.kind != Kind::BF16 || !x.halves) return avx512::kernels().linear(w, bias, x, pair, out);
    const bool both = 2 * pair + 1 < w.num_blocks();
    const uint8_t* const block[2] = {w.block(2 * pair), w.block(2 * pair + (both ? 1 : 0))};
    in_tiles(w, block, x, [&](int64_t row, int rows, const float(&sums)[2][kRowTile][16]) __attribute__((always_inline)) {
        for (int r = 0; r < rows; ++r) put_linear({load(sums[0][r]), load(sums[1][r])}, w, bias, row + r, pair, out);
    });
}

void gated(const Matrix& gate, const Matrix& up, const float* gate_bias, const float* up_bias, Activation kind,
           const Input& x, int64_t pair, const Output& out) {
    if (gate.kind != Kind::BF16 || up.kind != Kind::BF16 || !x.halves)
        return avx512::kernels().gated(gate, up, gate_bias, up_bias, kind, x, pair, out);
    for (int64_t half = 0; half < 2 && 2 * pair + half < gate.num_blocks(); ++half) {
        const int64_t at = (2 * pair + half) * 16;
        const uint8_t* const block[2] = {gate.block(2 * pair + half), up.block(2 * pair + half)};
        in_tiles(gate, block, x, [&](int64_t row, int rows, const float(&sums)[2][kRowTile][16]) __attribute__((always_inline)) {
            for (int r = 0; r < rows; ++r)
                store_some(out.values + (row + r) * out.stride + at, out.width - at,
                           gate_lanes({load(sums[0][r]), load(sums[1][r])}, gate.rows, gate_bias, up_bias, kind, at));
        });
    }
    if (!out.quants) return;
    for (int64_t r = 0; r < x.rows; ++r) {
        float lanes[32];
        const int64_t at = pair * 32, count = out.width - at < 32 ? out.width - at : 32;
        std::memcpy(lanes, out.values + r * out.stride + at, count * 4);
        put_gated(lanes, r, pair, out);
    }
    pad_gated(x.rows, pair, gate.num_blocks(), out);
}

void halve(const float* x, int64_t width, uint16_t* row) {
    const int64_t padded = (width + kPanel - 1) / kPanel * kPanel;
    for (int64_t i = 0; i < padded; i += 16)
        _mm256_storeu_si256((__m256i*)(row + i), (__m256i)_mm512_cvtneps_pbh(load_some(x + i, width - i).v));
}

} // namespace

const Kernels& kernels() {
    static const Kernels table = [] {
        Kernels made = avx512::kernels();
        made.name = HEADSTART_STRING(HEADSTART_PATH);
        made.linear = linear;
        made.gated = gated;
        made.halve = halve;
        return made;
    }();
    return table;
}

} // namespace headstart::HEADSTART_PATH
