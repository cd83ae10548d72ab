// Table of kernels that every instruction-set path implements. A call does one task: no threads, no allocation.
#pragma once

#include <cstdint>

#include "matrix.h"

namespace headstart {

// Layout of an activation row quantized to int8 in groups of 32 columns: x = scale * q, q in -127..127.
// A row has the int8 values (zero-padded to 64 columns), then for each group scale, sum(q) and scale * sum(q), then the
// last two again for each half group of 16.
struct QuantLayout {
    HEADSTART_INLINE explicit QuantLayout(int64_t width)
        : padded(whole_panels(width)), groups(padded / 32) {}
    int64_t padded, groups;
    HEADSTART_INLINE int64_t row_bytes() const { return padded + groups * 4 * 7; }
    HEADSTART_INLINE float* scales(uint8_t* row) const { return floats(row, 0); }
    HEADSTART_INLINE int32_t* sums(uint8_t* row) const { return integers(row, 4); }
    HEADSTART_INLINE float* scaled_sums(uint8_t* row) const { return floats(row, 8); }
    HEADSTART_INLINE int32_t* half_sums(uint8_t* row) const { return integers(row, 12); }
    HEADSTART_INLINE float* scaled_half_sums(uint8_t* row) const { return floats(row, 20); }

  private:
    HEADSTART_INLINE float* floats(uint8_t* row, int64_t before) const {
        return reinterpret_cast<float*>(row + padded + groups * before);
    }
    HEADSTART_INLINE int32_t* integers(uint8_t* row, int64_t before) const {
        return reinterpret_cast<int32_t*>(row + padded + groups * before);
    }
};

// Input rows of a matrix product, as float32 and, where some matrix needs them, as int8 and bfloat16 (else nullptr).
struct Input {
    const float* values;
    int64_t stride; // floats between rows of `values`
    uint8_t* quants; // int8 rows in QuantLayout, or nullptr
    int64_t rows;
    const uint16_t* halves = nullptr; // bfloat16 rows, zero-padded to a multiple of kPanel, or nullptr
    const int32_t* index = nullptr;   // [rows] input row of each output row; nullptr: the same row
    const float* factors = nullptr;   // [rows] factor of each row's products (gated applies it to both), or nullptr
    HEADSTART_INLINE int64_t at(int64_t row) const { return index ? index[row] : row; }
};

struct Output {
    float* values;
    int64_t stride;
    uint8_t* quants; // int8 rows in QuantLayout(width) that gated and attend also write, or nullptr
    int64_t width;
    HEADSTART_INLINE Output from_row(int64_t first) const {
        return {values + first * stride, stride, quants ? quants + first * QuantLayout(width).row_bytes() : nullptr, width};
    }
};

constexpr int64_t kMaxValueDim = 512, kMaxExperts = 1024;

enum class Activation : int32_t {
    SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, RELU2 = 4, IDENTITY = 5, CLAMPED = 6, SILU_7 = 7, SILU_16 = 8,
    SILU_OF_10 = 9, SITU = 10
};

enum class Store : int32_t { F32 = 0, BF16 = 1, I8 = 2, F8 = 3 }; // F8: E4M3
HEADSTART_INLINE constexpr bool is_scaled(Store store) { return store >= Store::I8; }

// Layout of a KV tile: the keys and values of 16 slots and one head. Keys [head_dim][16], values
// [16][padded_value]. BF16 interleaves pairs, as AMX reads them: keys [head_dim / 2][16][2], values [8][padded_value][2].
// I8 and F8 add the float32 scales of the 16 keys, then of the 16 values (one per token and head). F8's scales are 256
// times as large, because its codes are read as float16 numbers of 2^-8 of their value.
struct KVLayout {
    Store store = Store::BF16;
    int64_t num_heads = 0, head_dim = 0, value_dim = 0;
    HEADSTART_INLINE int64_t padded_value() const { return (value_dim + 15) / 16 * 16; }
    HEADSTART_INLINE int64_t item() const { return store == Store::F32 ? 4 : store == Store::BF16 ? 2 : 1; } // bytes
    HEADSTART_INLINE int64_t ways() const { return store == Store::BF16 ? 2 : 1; }
    HEADSTART_INLINE int64_t key_at(int64_t d, int64_t lane) const { // in items
        return (d / ways() * 16 + lane) * ways() + d % ways();
    }
    HEADSTART_INLINE int64_t value_at(int64_t lane, int64_t d) const { // in items behind values_at()
        return (lane / ways() * padded_value() + d) * ways() + lane % ways();
    }
    HEADSTART_INLINE int64_t values_at() const { return (head_dim + ways() - 1) / ways() * ways() * 16 * item(); }
    HEADSTART_INLINE int64_t scales_at() const { return values_at() + padded_value() * 16 * item(); }
    HEADSTART_INLINE int64_t tile_bytes() const {
        return (scales_at() + (is_scaled(store) ? 128 : 0) + 63) / 64 * 64;
    }
    HEADSTART_INLINE int64_t tile_at(int64_t slot, int64_t head) const {
        return (slot / 16 * num_heads + head) * tile_bytes();
    }
};

// Queries per attention task: number if larger tasks were too few for all threads, and maximum.
constexpr int64_t kSharedQueries = 6, kMaxQueries = 24;

// Attention sums run over KV splits of fixed size, counted from absolute position 0, and are joined in order. So threads
// can share a long context without changing a bit of the result.
constexpr int64_t kSplit = 512;

// Addresses of the KV tiles of one sequence and KV head.
struct Tiles {
    const uint8_t* pool;
    KVLayout layout;
    const int32_t* block_table; // the sequence's
    int64_t block_size;         // positions per block, a multiple of 16
    int64_t kv_head;
    const uint8_t* scratch;     // copied tiles that replace the pool's from position scratch_from on
    int64_t scratch_from;       // a multiple of 16
    HEADSTART_INLINE int64_t slot_of(int64_t position) const { // according to the block table
        return block_table[position / block_size] * block_size + position % block_size;
    }
    HEADSTART_INLINE const uint8_t* tile_of(int64_t position) const { // position: a multiple of 16
        if (position >= scratch_from) return scratch + (position - scratch_from) / 16 * layout.tile_bytes();
        return pool + layout.tile_at(slot_of(position), kv_head);
    }
};

// Attention of at most Kernels::max_queries queries of one KV head and sequence. Query i is row first_row + i / group,
// query head kv_head * group + i % group.
struct AttendTask : Tiles {
    // [rows of the pass] position, last visible position, and a position that the window includes (used with a window)
    const int32_t *positions, *visible_end, *visible_start;
    int64_t first_row, group, first_query, num_queries;
    int64_t first_position, window; // first position with a key; sliding window, 0: none
    int64_t num_masked;                 // 1 masks the last visible position, so that a row does not see itself; else 0
    int64_t chunk;                  // a row sees positions from position - position % chunk on, 0: no chunks
    float scale, softcap;           // softcap 0: none
    const float* sinks;             // [query heads], or nullptr
    const float* bias; // [rows of the pass][query heads][extent] added to scores of the last positions, or nullptr
    int64_t bias_stride, extent;
    const float* queries;
    int64_t query_stride;
    Output out;
    int64_t split = -1;      // the one KV split to compute into `partials`; -1: all of them, and the output
    float* partials = nullptr; // [row][head][num_splits][partial_size()]
    int64_t num_splits = 0;
    HEADSTART_INLINE int64_t partial_size() const { return layout.padded_value() + 16; } // weighted sum of values, maximum, total
    HEADSTART_INLINE int64_t row_of(int64_t index) const { return first_row + index / group; }
    HEADSTART_INLINE int64_t head_of(int64_t index) const { return kv_head * group + index % group; }
    HEADSTART_INLINE float* partial(int64_t index, int64_t at) const {
        const int64_t query = row_of(index) * layout.num_heads * group + head_of(index);
        return partials + (query * num_splits + at) * partial_size();
    }
};

// Indexer scores of positions begin .. end - 1 for one row: scores[p - begin] = sum over heads h, in order, of weights[h] *
// max(queries[h] . key[p], 0); without weights: queries[0] . key[p]. NaN becomes -infinity. begin is a multiple of 16; the
// last tile is written whole.
struct IndexTask : Tiles {
    int64_t num_heads, begin, end;
    const float *queries, *weights; // weights: or nullptr
    float* scores;
};

enum class Scoring : int32_t { SOFTMAX = 0, SIGMOID = 1, SOFTPLUS = 2 };

// Router of a mixture of experts (RouterSpec of headstart/kernels/specs.py).
struct Router {
    int64_t num_experts, top_k, num_groups, top_groups, num_matrices;
    Scoring scoring;
    bool normalize;
    float scale;
    bool scales_inputs; // weights scale the experts' inputs instead of their outputs
};

// Hyper-connections (StreamSpec of headstart/kernels/specs.py). last: only the weights of the final sum. mixed: with a
// mixing matrix; else streams keep themselves, and eps is added to output weights, too. softmax: the weights of a sum
// alone are a softmax.
struct StreamShape {
    int64_t count, iterations;
    float eps, magnitude;
    bool last, mixed, softmax;
};

// Compresses `span` rows [values, gates] into one entry [dim]; rows before `first` are missing.
struct CompressTask {
    const float* rows;
    int64_t stride, span, first, dim;
    bool overlap;
    float* out;
};

constexpr int64_t kMaxKeyDim = 256, kMaxTaps = 16;

// Gated delta rule or selective scan (Ops.gated_delta, Ops.selective_scan of headstart/kernels/ops.py) for some columns of
// one head and sequence: starts from the state before position `start`, replays kept rows, then runs the pass's rows.
struct RecurrenceTask {
    int64_t key_dim, value_dim, head, first_column, num_columns;
    bool delta;                         // gated delta rule; else selective scan
    int64_t query_at, key_at, value_at; // offsets of the head's parts in a row
    int64_t decay_at, strength_at;      // offsets in a kept row; a scan's strength is its time step
    bool by_channel;                    // a delta's log decays: one for each key feature, else one
    float rate, skip;                   // parameters of the scan
    const float* from;                  // state [heads][key_dim][value_dim], or nullptr: zeros
    int64_t start, num_kept, num_rows;
    const float* kept;
    int64_t kept_stride;
    const float *rows, *decay, *strength; // from the first row on; decay and strength of the head; log decay of a delta
    int64_t row_stride, decay_stride, gate_stride;
    float* out;
    int64_t out_stride;
    int64_t num_stores; // the state before store_positions[i] is saved in slot store_slots[i]
    const int32_t *store_positions, *store_slots;
    float* states;
    int64_t state_size;
};

struct Kernels {
    const char* name;
    // Outputs 32 * pair .. 32 * pair + 31 of x W^T + bias.
    void (*linear)(const Matrix& w, const float* bias, const Input& x, int64_t pair, const Output& out);
    // The same outputs of activate(x G^T + gate_bias) * (x U^T + up_bias).
    void (*gated)(const Matrix& gate, const Matrix& up, const float* gate_bias, const float* up_bias, Activation kind,
                  const Input& x, int64_t pair, const Output& out);
    void (*embed)(const Matrix& table, int64_t id, float* out);
    void (*quantize)(const float* x, int64_t width, uint8_t* row);
    // total = x + residual (x when residual is nullptr); out = total / rms(total) * weight, by groups of `group` columns.
    void (*norm)(const float* x, const float* residual, const float* weight, float eps, int64_t width, int64_t group,
                 float* out, float* total);
    void (*activate)(const float* x, Activation kind, int64_t width, float* out);
    void (*activate_mul)(const float* gate, const float* up, Activation kind, int64_t width, float* out);
    void (*scale)(const float* x, float factor, int64_t width, float* out);
    void (*softcap)(const float* x, float cap, int64_t width, float* out);
    void (*add)(const float* a, const float* b, int64_t width, float* out);
    void (*rope)(const float* x, const float* cosines, const float* sines, int64_t num_heads, int64_t head_dim,
                 int64_t half, float* out);
    void (*store_kv)(const float* keys, const float* values, uint8_t* pool, const KVLayout& layout, int64_t slot);
    void (*attend)(const AttendTask& task);
    void (*join)(const AttendTask& task); // writes the output from the partials of all splits
    // out = sigmoid(gate) * x; each gate applies to width / gates adjacent columns.
    void (*sigmoid_mul)(const float* gate, const float* x, int64_t gates, int64_t width, float* out);
    // logits [num_experts] -> ids [top_k] in ascending order and their weights. told [top_k]: expert ids that replace the
    // best ones, or nullptr.
    void (*route)(const float* logits, const float* bias, const int64_t* token_experts, const Router& router, int32_t* ids,
                  float* weights);
    // out = sum over i < count, in order, of weights[i] * values[slots[i]]; slot -1 is the row x.
    void (*weighted_sum)(const float* values, int64_t stride, const int32_t* slots, const float* weights, int64_t count,
                  const float* x, int64_t width, float* out);
    // out = bias + sum over j < width of taps[j] * rows[j], by channel; nullptr rows and a nullptr bias are zeros.
    void (*conv)(const float* const* rows, const float* taps, const float* bias, int64_t width, int64_t channels,
                 float* out);
    // out = rate * ln(1 + e^(x + bias)); rate nullptr: 1.
    void (*softplus)(const float* x, const float* rate, const float* bias, int64_t width, float* out);
    // out = bound * sigmoid(rate * (x + bias)).
    void (*bounded_decay)(const float* x, const float* rate, const float* bias, float bound, int64_t width, float* out);
    void (*recur)(const RecurrenceTask& task);
    void (*stream_weights)(const float* mixes, const float* base, const float* scale, const StreamShape& shape, float* out);
    // Weighted sum of `count` streams of `width`; weights nullptr: their mean.
    void (*sum_streams)(const float* streams, const float* weights, int64_t count, int64_t width, float* out);
    void (*mix_streams)(const float* streams, const float* x, const float* weights, int64_t count, int64_t width, bool mixed,
                        float* out);
    void (*compress)(const CompressTask& task);
    void (*index_scores)(const IndexTask& task);
    int64_t max_queries = kMaxQueries; // maximum queries of an attend task
    // Rounds to bfloat16 (ties to even), zero-padded to kPanel; nullptr: bfloat16 matrices read float32 on this path.
    void (*to_bf16_row)(const float* x, int64_t width, uint16_t* row) = nullptr;
};

namespace portable {
const Kernels& kernels();
}
namespace avx2 {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}
namespace neon { // ARMv8.0
const Kernels& kernels();
}
namespace dotprod { // neon + signed byte dot products
const Kernels& kernels();
}
namespace i8mm { // dotprod + unsigned by signed byte dot products
const Kernels& kernels();
}
namespace avx512bf16 {
const Kernels& kernels();
}
namespace avxvnni { // avx2 + AVX-VNNI
const Kernels& kernels();
}
namespace amx { // avx512bf16 + AMX-BF16
const Kernels& kernels();
}

} // namespace headstart
