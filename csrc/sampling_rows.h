// SamplingRows (headstart/core.py) in C++: sampling parameters of each row, and edits of its logits.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "cpu.h"
#include "sampling.h"

namespace headstart {

namespace nb = nanobind;

template <class T> using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Sparse edits of one kind (bias, penalties), in CSR by row.
template <class Value> struct Edits {
    Column<int32_t> indptr, ids;
    Column<Value> values;

    Edits(nb::handle rows, const char* indptr, const char* ids, const char* values, size_t num_rows);
    int32_t begin(int64_t row) const { return indptr.data()[row]; }
    int32_t end(int64_t row) const { return indptr.data()[row + 1]; }
};

class DrawRows {
  public:
    DrawRows(nb::handle rows, size_t count, int64_t vocab_size); // throws nb::value_error

    int64_t position(int64_t row) const { return position_.data()[row]; }

    bool is_penalized(int64_t row) const {
        return repetition_.data()[row] != 1 || presence_.data()[row] != 0 || frequency_.data()[row] != 0;
    }

    // Samples the token of a row from logits x; returns kNothingLeft or kNotFinite if there is none. The token follows
    // num_drafted drafted tokens, which add to the position and to penalties. probs: see draw_row.
    int64_t draw(const float* x, int64_t row, const Vocabulary& vocabulary, double* probs, Scratch& scratch,
                 const int64_t* drafted = nullptr, int64_t num_drafted = 0) const;

  private:
    bool is_edited(int64_t row) const {
        return allowed_ || bias_.begin(row) < bias_.end(row) || penalty_.begin(row) < penalty_.end(row);
    }
    void edit(const float* x, int64_t row, const Vocabulary& vocabulary, const int64_t* drafted, int64_t num_drafted,
              double* scores) const;

    Column<float> temperature_, top_p_, min_p_, repetition_, presence_, frequency_;
    Column<int32_t> top_k_, choice_;
    Column<uint64_t> seed_;
    Column<int64_t> position_;
    Edits<float> bias_;
    Edits<int32_t> penalty_;
    std::optional<nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>> allowed_;
};

Scratch& thread_scratch(const Path& path); // scratch memory of the calling thread

} // namespace headstart
