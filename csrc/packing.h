// Packs rows of weight files into the blocks of matrix.h.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string_view>
#include <vector>

#include "matrix.h"
#include "pool.h"

namespace headstart {

// The Matrix of Python; owns the array of `data`. Copy and destroy with the GIL held.
struct OwnedMatrix : Matrix {
    nanobind::object owner;
    std::vector<Matrix> copies; // one per NUMA node, if replicated
    const Matrix& local_copy() const { return copies.size() > 1 ? copies[ThreadPool::current_node()] : *this; }
};

// 64 columns of one row in the panel's order, before the 16 rows are interleaved.
struct Strip {
    alignas(64) uint8_t body[kPanel * 4]; // values; Q8, F8: 1 byte per column; Q4, L4: 32 bytes; Q5: 40; Q6: 48
    uint32_t scales[4], offsets[4];       // by group, as bits of their type
    uint32_t factors[2];                  // factors of scales and of mins, as bits
};

// Reads `count` <= 64 columns of a file's row from `column` on; other columns of the strip stay as they are.
using Fill = void (*)(const uint8_t* row, int64_t column, int64_t count, Strip& strip);

// Fills that quantize float32 rows (quantize.cpp).
void fill_int8(const uint8_t* row, int64_t column, int64_t count, Strip& strip);
void fill_int4(const uint8_t* row, int64_t column, int64_t count, Strip& strip);

// A source type of rows: the format of its packed matrix, and how to read it.
struct Source {
    std::string_view name;
    Kind kind;
    int32_t group, zero;
    Scales scales;
    Offsets offsets;
    Levels levels;
    int32_t unit_columns, unit_bytes; // a row is whole units: ggml blocks, or elements; E4M3 scales: a float factor first
    Fill fill;

    Matrix form(int64_t rows, int64_t cols) const {
        return {kind, rows, cols, group, zero, scales, offsets, levels, nullptr};
    }
    int64_t head_bytes() const { return scales == Scales::E4M3 ? 4 : 0; }
    int64_t row_bytes(int64_t cols) const { return head_bytes() + (cols + unit_columns - 1) / unit_columns * unit_bytes; }
};

// The source of a file's type name, or of "int8" and "int4" (float32 rows to quantize); nullptr for other names.
const Source* find_source(std::string_view name);

// Packs raw [rows, row_bytes] into out [num_bytes()], on all threads.
void pack(ThreadPool& pool, const Source& source, const uint8_t* raw, int64_t row_bytes, int64_t rows, int64_t cols,
          uint8_t* out);

// Dequantizes a matrix to out [rows, cols], on all threads.
void dequantize(ThreadPool& pool, const Matrix& matrix, float* out);

} // namespace headstart
