// Epilogues of matrix products: bias, activation, output as float32 and int8.
#pragma once

#include "activations.h"
#include "kernels.h"
#include "quantize_rows.h"
#include "simd.h"

namespace headstart::HEADSTART_PATH {

INLINE f32 with_bias(f32 value, const float* bias, int64_t at, int64_t width) {
    if (!bias) return value;
    if (at + 16 <= width) return value + load(bias + at);
    float tail[16] = {};
    for (int64_t i = at; i < width; ++i) tail[i - at] = bias[i];
    return value + load(tail);
}

// Adds the bias and writes outputs 32 * pair .. 32 * pair + 31 of one row.
INLINE void put_linear(const f32 (&acc)[2], const Matrix& w, const float* bias, int64_t row, int64_t pair,
                       const Output& out) {
    const int64_t at = pair * 32;
    float* to = out.values + row * out.stride + at;
    store_some(to, w.rows - at, with_bias(acc[0], bias, at, w.rows));
    if (at + 16 < w.rows) store_some(to + 16, w.rows - at - 16, with_bias(acc[1], bias, at + 16, w.rows));
}

// Multiplies both products of a row by its factor (Input::factors).
INLINE void scale_both(f32 (&acc)[2], float factor) {
    for (f32& each : acc) each = each * splat(factor);
}

// Outputs at .. at + 15 of a gated product; acc: products with gate and up.
INLINE f32 gate_lanes(const f32 (&acc)[2], int64_t width, const float* gate_bias, const float* up_bias, Activation kind,
                      int64_t at) {
    return gate_mul(with_bias(acc[0], gate_bias, at, width), with_bias(acc[1], up_bias, at, width), kind);
}

// Quantizes outputs 32 * pair .. 32 * pair + 31 of one row if out.quants is set; lanes from `count` on become zeros.
INLINE void quantize_gated(float (&lanes)[32], int64_t count, int64_t row, int64_t pair, const Output& out) {
    if (!out.quants) return;
    const QuantLayout layout(out.width);
    for (int64_t i = count; i < 32; ++i) lanes[i] = 0.0f;
    quantize_group(lanes, pair, layout, out.quants + row * layout.row_bytes());
}

INLINE void put_gated(float (&lanes)[32], int64_t row, int64_t pair, const Output& out) {
    const int64_t count = out.width - pair * 32 < 32 ? out.width - pair * 32 : 32;
    float* to = out.values + row * out.stride + pair * 32;
    store_some(to, count, load(lanes));
    if (count > 16) store_some(to + 16, count - 16, load(lanes + 16));
    quantize_gated(lanes, count, row, pair, out);
}

// Zero-pads the int8 rows to 64 columns if the number of groups is odd.
INLINE void pad_gated(int64_t rows, int64_t pair, int64_t num_blocks, const Output& out) {
    if (!out.quants || 2 * pair + 2 < num_blocks) return;
    const QuantLayout layout(out.width);
    const float zeros[32] = {};
    for (int64_t group = pair + 1; group < layout.groups; ++group)
        for (int64_t r = 0; r < rows; ++r) quantize_group(zeros, group, layout, out.quants + r * layout.row_bytes());
}

} // namespace headstart::HEADSTART_PATH
