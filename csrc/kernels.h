// What an instruction-set path offers: the inner loops, on one task's worth of rows. No threads, no allocation.
#pragma once

#include <cstdint>

#include "matrix.h"

namespace headstart {

// Rows quantized to 8 bits in groups of 32 columns: x = scale * q, q in -127..127, columns padded to 64 with zeros.
// Per row: padded int8, then per 32 columns the scale, the sum of q and scale * sum, and per 16 the last two again.
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

// Input rows of a matrix product: floats, and the same quantized or in bfloat16 (nullptr where no matrix wants them).
struct Input {
    const float* values;
    int64_t stride; // floats
    uint8_t* quants;
    int64_t rows;
    const uint16_t* halves = nullptr; // rows of kPanel-padded width, with zeros
    const int32_t* index = nullptr;   // where the product's rows lie, if not one after the other
    const float* factors = nullptr;   // what the product's rows are multiplied by: gated does it to both products
    HEADSTART_INLINE int64_t at(int64_t row) const { return index ? index[row] : row; }
};

struct Output {
    float* values;
    int64_t stride;
    uint8_t* quants; // gated and attend quantize as well when not nullptr, in QuantLayout(width)
    int64_t width;
    HEADSTART_INLINE Output from_row(int64_t first) const {
        return {values + first * stride, stride, quants ? quants + first * QuantLayout(width).row_bytes() : nullptr, width};
    }
};

constexpr int64_t kMaxValueDim = 512, kMaxExperts = 1024;

enum class Activation : int32_t {
    SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, RELU2 = 4, IDENTITY = 5, CLAMPED = 6, SILU_7 = 7, SILU_16 = 8,
    SILU_OF_10 = 9
};

enum class Store : int32_t { F32 = 0, BF16 = 1, I8 = 2 };

// Keys and values of 16 slots and one head lie together: keys [head_dim][16], values [16][padded_value] -- for BF16 in
// pairs of dimensions [head_dim / 2][16][2] and pairs of slots [8][padded_value][2], as tiles take them --, and for I8 the
// float scales of the 16 keys and of the 16 values (one per token and head).
struct KVLayout {
    Store store = Store::BF16;
    int64_t num_heads = 0, head_dim = 0, value_dim = 0;
    HEADSTART_INLINE int64_t padded_value() const { return (value_dim + 15) / 16 * 16; }
    HEADSTART_INLINE int64_t item() const { return store == Store::F32 ? 4 : store == Store::BF16 ? 2 : 1; }
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
        return (scales_at() + (store == Store::I8 ? 128 : 0) + 63) / 64 * 64;
    }
    HEADSTART_INLINE int64_t tile_at(int64_t slot, int64_t head) const {
        return (slot / 16 * num_heads + head) * tile_bytes();
    }
};

constexpr int64_t kFewQueries = 6, kMostQueries = 24; // of an attention task: those that threads can share well, and most

// What a query sees is summed by stretches of so many positions, counted from absolute position 0, which are then joined in
// order: threads may share a long context, and bits do not tell whether they did.
constexpr int64_t kStretch = 512;

// Where the tiles of one kv head of a sequence lie.
struct Tiles {
    const uint8_t* pool;
    KVLayout layout;
    const int32_t* block_table; // of the sequence
    int64_t block_size;         // a multiple of 16
    int64_t kv_head;
    const uint8_t* scratch;     // the tile of position `scratch_from` of this head, and the ones behind it,
    int64_t scratch_from;       // wherever the block table has them; a multiple of 16
    HEADSTART_INLINE int64_t slot_of(int64_t position) const { // by the block table
        return block_table[position / block_size] * block_size + position % block_size;
    }
    HEADSTART_INLINE const uint8_t* tile_of(int64_t position) const { // position: the first of its tile
        if (position >= scratch_from) return scratch + (position - scratch_from) / 16 * layout.tile_bytes();
        return pool + layout.tile_at(slot_of(position), kv_head);
    }
};

// At most Kernels::most_queries queries of one kv head and one sequence. Query i is row first_row + i / group, head
// kv_head * group + i % group.
struct AttendTask : Tiles {
    const int32_t *positions, *sees; // of all rows
    int64_t first_row, group, first_query, num_queries;
    int64_t first_position, window; // the first position that holds a key; how many a row sees, 0: all
    int64_t unseen;                 // of what it sees so many at the end that it does not
    int64_t chunk;                  // a row sees from position - position % chunk on, 0: no chunks
    float scale, softcap;           // softcap 0: none
    const float* sinks;             // of all heads, or nullptr
    const float* queries;
    int64_t query_stride;
    Output out;
    int64_t stretch = -1;      // the only one that this task takes, or -1: all, and the result
    float* partials = nullptr; // of the pass: [row][head][num_stretches] of partial_size() floats
    int64_t num_stretches = 0;
    HEADSTART_INLINE int64_t partial_size() const { return layout.padded_value() + 16; } // sums, peak, total
    HEADSTART_INLINE int64_t row_of(int64_t index) const { return first_row + index / group; }
    HEADSTART_INLINE int64_t head_of(int64_t index) const { return kv_head * group + index % group; }
    HEADSTART_INLINE float* partial(int64_t index, int64_t at) const {
        const int64_t query = row_of(index) * layout.num_heads * group + head_of(index);
        return partials + (query * num_stretches + at) * partial_size();
    }
};

// What an indexer makes of positions begin .. end - 1 of one row: scores[p] = sum over heads of weights[h] *
// max(queries[h] . key of p, 0), in this order; NaN is -infinity. begin is the first of a tile; of the last tile all 16
// are written.
struct IndexTask : Tiles {
    int64_t num_heads, begin, end;
    const float *queries, *weights;
    float* scores;
};

enum class Scoring : int32_t { SOFTMAX = 0, SIGMOID = 1, SOFTPLUS = 2 };

// Which experts a row takes, and how it weighs them (RouterSpec of headstart/kernels/ops.py).
struct Router {
    int64_t num_experts, top_k, num_groups, top_groups, num_matrices;
    Scoring scoring;
    bool normalize;
    float scale;
    bool scales_inputs; // weights are of what experts read
};

// Hyper-connections (StreamSpec of headstart/kernels/ops.py). last: weights of a sum alone.
struct StreamShape {
    int64_t count, iterations;
    float eps;
    bool last;
};

// One entry of rows [values, gates], as floats `stride` apart; the first ones, before `first`, are not there.
struct CompressTask {
    const float* rows;
    int64_t stride, span, first, dim;
    bool overlap;
    float* out;
};

constexpr int64_t kMaxKeyDim = 256, kMaxTaps = 16;

// The gated delta rule or the selective scan (Ops.gated_delta, Ops.selective_scan of headstart/kernels/ops.py) for some
// columns of one head of one sequence: from the state before position `start` over kept rows and the rows of the pass.
struct RecurrenceTask {
    int64_t key_dim, value_dim, head, first_column, num_columns;
    bool delta;                         // else: scan
    int64_t query_at, key_at, value_at; // where a row has those of the head
    int64_t decay_at, strength_at;      // where a kept row has these; a scan's strength is its step
    float rate, skip;                   // of a scan
    const float* from;                  // the state [heads][key_dim][value_dim], or nullptr: zeros
    int64_t start, num_kept, num_rows;
    const float* kept;
    int64_t kept_stride;
    const float *rows, *decay, *strength; // of the first row, the last two of the head; decay: the logarithm, of a delta
    int64_t row_stride, gate_stride;
    float* out;
    int64_t out_stride;
    int64_t num_stores; // after the rows before store_positions[i] the state goes to slot store_slots[i]
    const int32_t *store_positions, *store_slots;
    float* states;
    int64_t state_size;
};

struct Kernels {
    const char* name;
    // 32 outputs (block pair `pair`) of x W^T + bias.
    void (*linear)(const Matrix& w, const float* bias, const Input& x, int64_t pair, const Output& out);
    // 32 outputs of activate(x G^T + bias) * (x U^T + bias).
    void (*gated)(const Matrix& gate, const Matrix& up, const float* gate_bias, const float* up_bias, Activation kind,
                  const Input& x, int64_t pair, const Output& out);
    void (*embed)(const Matrix& table, int64_t id, float* out);
    void (*quantize)(const float* x, int64_t width, uint8_t* row);
    // total = x + residual (x when residual is nullptr); out = total / rms(total) * weight per group of `group`.
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
    void (*join)(const AttendTask& task); // the result of all stretches' partials
    // sigmoid(gate) * x; each gate serves width / gates neighbours.
    void (*sigmoid_mul)(const float* gate, const float* x, int64_t gates, int64_t width, float* out);
    // logits [num_experts] -> ids [top_k] in ascending order, those told if not nullptr, and their weights.
    void (*route)(const float* logits, const float* bias, const int64_t* told, const Router& router, int32_t* ids,
                  float* weights);
    // out = sum over i < count of weights[i] * row slots[i] of values, in this order; slot -1 is the row x.
    void (*weigh)(const float* values, int64_t stride, const int32_t* slots, const float* weights, int64_t count,
                  const float* x, int64_t width, float* out);
    // out = bias + sum over j < width of taps[j] * rows[j], by channel; rows that are nullptr, or no bias, are zeros.
    void (*conv)(const float* const* rows, const float* taps, const float* bias, int64_t width, int64_t channels,
                 float* out);
    // out = rate * ln(1 + e^(x + bias)); rate nullptr: 1.
    void (*softplus)(const float* x, const float* rate, const float* bias, int64_t width, float* out);
    void (*recur)(const RecurrenceTask& task);
    void (*stream_weights)(const float* mixes, const float* base, const float* scale, const StreamShape& shape, float* out);
    // Of `count` streams of `width`; weights nullptr: their mean.
    void (*sum_streams)(const float* streams, const float* weights, int64_t count, int64_t width, float* out);
    void (*mix_streams)(const float* streams, const float* x, const float* weights, int64_t count, int64_t width,
                        float* out);
    void (*compress)(const CompressTask& task);
    void (*index_scores)(const IndexTask& task);
    int64_t most_queries = kMostQueries; // of a task of attend
    // To bfloat16 (ties to even), padded with zeros to kPanel; nullptr: bfloat16 matrices take floats on this path.
    void (*halve)(const float* x, int64_t width, uint16_t* row) = nullptr;
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
namespace dotprod { // neon with dot products of signed bytes
const Kernels& kernels();
}
namespace i8mm { // and of unsigned by signed ones
const Kernels& kernels();
}
namespace avx512bf16 {
const Kernels& kernels();
}
namespace avxvnni { // avx2 with AVX-VNNI
const Kernels& kernels();
}
namespace amx { // avx512bf16 with AMX-BF16
const Kernels& kernels();
}

} // namespace headstart
