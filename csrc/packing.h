// Weights on their way in: a file's rows -> the blocks of matrix.h.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string_view>
#include <vector>

#include "matrix.h"
#include "pool.h"

namespace headstart {

// Python's Matrix: the layout and the array that `data` lies in. Copy and destroy it with the GIL held.
struct OwnedMatrix : Matrix {
    nanobind::object owner;
    std::vector<Matrix> copies; // by node, where each has its own
    const Matrix& here() const { return copies.size() > 1 ? copies[ThreadPool::own_node()] : *this; }
};

// Columns [column, column + 64) of one row, as they go into a panel, before the 16 rows are interleaved.
struct Strip {
    alignas(64) uint8_t body[kPanel * 4]; // plain values; or Q8, F8: one byte a column; or the panel's order: Q4, L4 32 bytes, Q6 48
    uint32_t scales[4], offsets[4];       // their bits
    uint32_t factors[2];                  // of scales and mins
};

// Reads the file's form of a row: `count` of 64 columns from `column` on. Columns beyond count are left as they are.
using Fill = void (*)(const uint8_t* row, int64_t column, int64_t count, Strip& strip);

// The fills of float32 rows to quantize (quantize.cpp).
void fill_int8(const uint8_t* row, int64_t column, int64_t count, Strip& strip);
void fill_int4(const uint8_t* row, int64_t column, int64_t count, Strip& strip);

// One type of source rows: what its matrix looks like and how to read it.
struct Source {
    std::string_view name;
    Kind kind;
    int32_t group, zero;
    Scales scales;
    Offsets offsets;
    Levels levels;
    int32_t unit_columns, unit_bytes; // a row is whole units (ggml's blocks; single elements of plain types), behind its
    Fill fill;                        // factor as a float where scales take one

    Matrix form(int64_t rows, int64_t cols) const {
        return {kind, rows, cols, group, zero, scales, offsets, levels, nullptr};
    }
    int64_t head_bytes() const { return scales == Scales::E4M3 ? 4 : 0; }
    int64_t row_bytes(int64_t cols) const { return head_bytes() + (cols + unit_columns - 1) / unit_columns * unit_bytes; }
};

// By a file's type name, or "int8" and "int4": float32 rows to quantize. nullptr for any other name.
const Source* find_source(std::string_view name);

// raw [rows, row_bytes] -> out [num_bytes()] of the source's form, by all threads.
void pack(ThreadPool& pool, const Source& source, const uint8_t* raw, int64_t row_bytes, int64_t rows, int64_t cols,
          uint8_t* out);

// matrix -> out [rows, cols], by all threads
void dequantize(ThreadPool& pool, const Matrix& matrix, float* out);

} // namespace headstart
