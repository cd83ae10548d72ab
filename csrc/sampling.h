// Samples a token from a row of logits, bit for bit as defined by kernels/reference/sampling.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "noise.h"
#include "sampling_loops.h"

namespace headstart {

constexpr float kGreedyBelow = 1e-5f; // as float32: NumPy compares float32 temperatures in float32

// Sampling parameters of a row, after mask, bias and penalties.
struct Draw {
    float temperature;
    int64_t top_k; // 0: off
    double top_p;  // 1: off
    double min_p;  // 0: off
    NoiseKey key;
};

// Columns left after top-k, top-p and min-p, ascending, with their scores (logits / temperature). Arrays may be longer than
// `count`.
struct Candidates {
    std::vector<double> scores;
    std::vector<int32_t> columns;
    int64_t count = 0;
    void reserve(int64_t n) {
        if (int64_t(scores.size()) < n) scores.resize(n), columns.resize(n);
        count = 0;
    }
    void add(double score, int32_t column) { scores[count] = score, columns[count++] = column; }
};

// Working memory of one thread, reused between calls.
struct Scratch {
    const Loops* loops; // of the instruction-set path in use
    std::vector<double> edited, maxima64, sorted64;
    std::vector<float> maxima32, sorted32;
    std::vector<int32_t> order;
    Candidates candidates, next;
};

constexpr int64_t kNothingLeft = -1, kNotFinite = -2;

// Philox counters of a block's tokens: groups[i] + offset; adjacent tokens with the same counter share it.
struct BlockGroups {
    alignas(64) uint64_t groups[kBlock] = {};
    int32_t place[kBlock]; // index of each token's word
    int count = kGroups;
    uint64_t offset = 0;

    BlockGroups(); // of consecutive token ids
    void find(const int32_t* columns, const int64_t* token_ids, int64_t start, int size);
    static std::vector<BlockGroups> of(const int64_t* token_ids, int64_t n); // of each block of these tokens
};

// Width of a row of logits, and the token ids of its columns.
struct Vocabulary {
    const int64_t* token_ids; // [width] ascending; nullptr: column i is token i
    int64_t width;
    const BlockGroups* groups = nullptr; // of each block of token_ids; nullptr: found at each draw

    int64_t token_id(int64_t column) const { return token_ids ? token_ids[column] : column; }

    int64_t column(int64_t id) const { // -1: not in this vocabulary
        if (!token_ids) return id >= 0 && id < width ? id : -1;
        const int64_t* found = std::lower_bound(token_ids, token_ids + width, id);
        return found < token_ids + width && *found == id ? found - token_ids : -1;
    }
};

// Returns the column sampled from logits x [width], or kNothingLeft or kNotFinite. probs [all tokens], zeroed by the caller,
// receives the processed distribution, unless nullptr.
template <class Real>
int64_t draw_row(const Real* x, const Vocabulary& vocabulary, const Draw& draw, double* probs, Scratch& scratch);

// Raw log-softmax of x [n] at one column, and at the num_top best (columns and values). Returns the number of those.
int64_t logprob_row(const float* x, int64_t n, int64_t column, int64_t num_top, float* value, int64_t* top_columns,
                    float* top_values, Scratch& scratch);

} // namespace headstart
