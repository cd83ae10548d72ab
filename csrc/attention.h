// Shared by attention.cpp and amx_attention.cpp: tile addresses, visible ranges, the online softmax of a chunk.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstring>

#include "activations.h"
#include "kernels.h"
#include "quantize_rows.h"
#include "simd.h"

namespace headstart::HEADSTART_PATH {

constexpr int kTiles = 4; // tiles (16 positions) per chunk
constexpr int64_t kChunk = kTiles * 16;

INLINE f32 lanes_from(int64_t first) { // first, first + 1, ..., first + 15
    alignas(64) static const float numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(numbers) + splat((float)first);
}

// Loads kWays<kStore> vectors of 16 numbers from p on; BF16 pairs are split into the even and the odd numbers.
template <Store kStore> constexpr int kWays = kStore == Store::BF16 ? 2 : 1;
template <Store kStore> constexpr int64_t kLine = is_scaled(kStore) ? 16 : 64; // bytes loaded

template <Store kStore> INLINE f32 load_code(const uint8_t* p) { // a code of F8 as 2^-8 of its value
    return kStore == Store::I8 ? load_i8(reinterpret_cast<const int8_t*>(p)) : load_e4m3_halves(p);
}

template <Store kStore> INLINE void load_items(const uint8_t* p, f32 (&found)[kWays<kStore>]) {
    if constexpr (kStore == Store::F32) {
        found[0] = load(reinterpret_cast<const float*>(p));
    } else if constexpr (kStore == Store::BF16) {
        const i32 both = load(reinterpret_cast<const int32_t*>(p));
        found[0] = as_float(shift_left<16>(both));
        found[1] = as_float(both & splat_int((int32_t)0xffff0000));
    } else {
        found[0] = load_code<kStore>(p);
    }
}

INLINE void store_pair(f32 even, f32 odd, uint8_t* to) {
    const i32 high = splat_int((int32_t)0xffff0000);
    store(reinterpret_cast<int32_t*>(to), shift_right<16>(as_int(even)) | (as_int(odd) & high));
}

// Converts an I8 or F8 tile to BF16's layout (exact, without the scales).
template <Store kStore> INLINE void widen_tile(const KVLayout& layout, const uint8_t* from, uint8_t* to) {
    const int64_t dim = layout.head_dim, width = layout.padded_value();
    const uint8_t* values = from + dim * 16;
    for (int64_t d = 0; d < dim; d += 2, from += 32, to += 64)
        store_pair(load_code<kStore>(from), d + 1 < dim ? load_code<kStore>(from + 16) : splat(0.0f), to);
    for (int64_t p = 0; p < 16; p += 2, values += 2 * width)
        for (int64_t d = 0; d < width; d += 16, to += 64)
            store_pair(load_code<kStore>(values + d), load_code<kStore>(values + width + d), to);
}

// Key scales [16] and value scales [16] of an I8 or F8 tile.
INLINE const float* scales_of(const KVLayout& layout, const uint8_t* tile) {
    return reinterpret_cast<const float*>(tile + layout.scales_at());
}

// Softmax weights times the scales of their values. Scales of unwritten slots may be NaN: there the weight is 0.
INLINE f32 scale_weights(f32 weights, const float* scales) {
    return select_less(splat(0.0f), weights, weights * load(scales + 16), splat(0.0f));
}

INLINE int64_t within_chunk(int64_t offset) { return offset < 0 ? 0 : offset < kChunk ? offset : kChunk; }

// Finds the tiles of positions start .. longest - 1, at most one chunk; returns their number.
INLINE int find_tiles(const AttendTask& task, int64_t start, int64_t longest, const uint8_t* (&found)[kTiles]) {
    int count = 0;
    for (; count < kTiles && start + count * 16 < longest; ++count) found[count] = task.tile_of(start + count * 16);
    return count;
}

// State of the online softmax: maximum score, and sum of e^(score - peak).
struct Softmax {
    float peak = -FLT_MAX, total = 0.0f; // finite, so that masked scores (-inf) get weight 0 and not NaN
};

// One query: its values [head_dim], visible positions first .. limit - 1, and the softmax over the current split; the biases
// of its scores, from position `biased` on.
struct QueryState : Softmax {
    const float *values, *bias;
    int64_t first, limit, biased;
};

INLINE QueryState query_state_of(const AttendTask& task, int64_t index) {
    const int64_t row = task.row_of(index), position = task.positions[row];
    const int64_t oldest = task.window  ? std::min<int64_t>(position - task.window + 1, task.visible_start[row])
                           : task.chunk ? position - position % task.chunk
                                        : 0;
    QueryState found;
    found.values = task.queries + row * task.query_stride + task.head_of(index) * task.layout.head_dim;
    if (task.bias) found.bias = task.bias + row * task.bias_stride + task.head_of(index) * task.extent;
    found.biased = position - task.extent + 1;
    found.first = oldest > task.first_position ? oldest : task.first_position;
    found.limit = task.visible_end[row] + 1 - task.num_masked;
    return found;
}

INLINE bool sees(const QueryState& query_state, int64_t split) {
    return query_state.first < (split + 1) * kSplit && query_state.limit > split * kSplit;
}

// Adds the query's biases to the scores of 16 positions from `start` on.
INLINE f32 add_bias(f32 score, const QueryState& query_state, int64_t extent, int64_t start) {
    const int64_t at = start - query_state.biased;
    if (at <= -16 || at >= extent) return score;
    if (at >= 0 && at + 16 <= extent) return score + load(query_state.bias + at);
    alignas(64) float some[16] = {};
    for (int64_t i = 0; i < 16; ++i)
        if (at + i >= 0 && at + i < extent) some[i] = query_state.bias[at + i];
    return score + load(some);
}

// Masks the scores of tile t of a chunk: -inf outside positions begin .. end - 1 of the chunk.
INLINE f32 mask_scores(f32 score, int t, int64_t begin, int64_t end) {
    const f32 position = lanes_from(t * 16), never = splat(-INFINITY);
    if (t * 16 < begin) score = select_less(position, splat((float)begin), never, score);
    if (t * 16 + 16 > end) score = select_less(position, splat((float)end), score, never);
    return score;
}

INLINE float scalar_exp(float by) {
    alignas(64) float lanes[16];
    store(lanes, exp(splat(by)));
    return lanes[0];
}

// Turns one query's scores of a chunk into weights e^(score - peak), stored by put(t, weights). Returns the factor that the
// query's sums so far must be multiplied by.
template <int kCount, class Put>
INLINE float softmax_tiles(const float* scores, float cap, Softmax& softmax, Put&& put) {
    f32 w[kTiles], best = splat(-INFINITY);
    for (int t = 0; t < kCount; ++t) {
        w[t] = load(scores + t * 16);
        if (cap != 0.0f) w[t] = select_less(w[t], splat(-FLT_MAX), w[t], softcap(w[t], cap)); // masked scores stay -inf
        best = max(best, w[t]);
    }
    const float top = max_lanes(best);
    float shrink = 1.0f;
    if (top > softmax.peak || std::isnan(top)) {
        shrink = scalar_exp(softmax.peak - top);
        softmax.total *= shrink;
        softmax.peak = top;
    }
    for (int t = 0; t < kTiles; ++t) w[t] = t < kCount ? exp(w[t] - splat(softmax.peak)) : splat(0.0f);
    softmax.total += sum_lanes((w[0] + w[1]) + (w[2] + w[3]));
    for (int t = 0; t < kCount; ++t) put(t, w[t]);
    return shrink;
}

template <class Put> INLINE float softmax_chunk(const float* scores, int tiles, float cap, Softmax& softmax, Put&& put) {
    switch (tiles) { // constant counts keep the weights in registers
    case 1: return softmax_tiles<1>(scores, cap, softmax, put);
    case 2: return softmax_tiles<2>(scores, cap, softmax, put);
    case 3: return softmax_tiles<3>(scores, cap, softmax, put);
    default: return softmax_tiles<4>(scores, cap, softmax, put);
    }
}

// Adds the sums and softmax of a part to those of the positions before it. more nullptr: the part's sums are zeros.
INLINE void join(float* sum, Softmax& whole, const float* more, const Softmax& part, int64_t wide) {
    const bool higher = part.peak > whole.peak || std::isnan(part.peak);
    const float factor = scalar_exp(higher ? whole.peak - part.peak : part.peak - whole.peak);
    const float of_whole = higher ? factor : 1.0f, of_part = higher ? 1.0f : factor;
    whole.total = whole.total * of_whole + part.total * of_part;
    if (higher) whole.peak = part.peak;
    for (int64_t d = 0; d < wide; d += 16) {
        const f32 kept = load(sum + d) * splat(of_whole);
        store(sum + d, more ? fma(load(more + d), splat(of_part), kept) : kept);
    }
}

// Joined splits of one query.
struct JoinedSplits {
    alignas(64) float sum[kMaxValueDim];
    Softmax softmax;
    bool started = false;

    void add(const float* part, const Softmax& more, int64_t wide) {
        if (started) return join(sum, softmax, part, more, wide);
        started = true;
        softmax = more;
        std::memcpy(sum, part, wide * 4);
    }
};

// Normalizes and writes the output. A sink is one more logit without a value.
INLINE void finish(const AttendTask& task, int64_t index, JoinedSplits& whole) {
    const int64_t dim = task.layout.value_dim, row = task.row_of(index), head = task.head_of(index);
    float* sum = whole.sum;
    if (!whole.started) { // no visible position
        whole.softmax = {};
        std::memset(sum, 0, task.layout.padded_value() * 4);
    }
    if (task.sinks) join(sum, whole.softmax, nullptr, {task.sinks[head], 1.0f}, task.layout.padded_value());
    const QuantLayout layout(task.out.width);
    const f32 inverse = splat(1.0f / whole.softmax.total);
    for (int64_t d = 0; d < dim; d += 16) store(sum + d, load(sum + d) * inverse);
    std::memcpy(task.out.values + row * task.out.stride + head * dim, sum, dim * 4);
    if (task.out.quants) // requested only if value_dim is a multiple of 32
        for (int64_t d = 0; d < dim; d += 32)
            quantize_group(sum + d, (head * dim + d) / 32, layout, task.out.quants + row * layout.row_bytes());
}

// Ends a split of query `index`: joins it to the splits before, or stores it for join_all.
INLINE void end_split(const AttendTask& task, int64_t index, int64_t split, QueryState& query_state, float* sum,
                      JoinedSplits& whole) {
    const int64_t wide = task.layout.padded_value();
    if (!sees(query_state, split)) return;
    if (task.split < 0) {
        whole.add(sum, query_state, wide);
    } else {
        float* kept = task.partial(index, split);
        std::memcpy(kept, sum, wide * 4);
        kept[wide] = query_state.peak;
        kept[wide + 1] = query_state.total;
    }
    static_cast<Softmax&>(query_state) = {};
    std::memset(sum, 0, wide * 4);
}

INLINE void join_all(const AttendTask& task) {
    const int64_t wide = task.layout.padded_value();
    for (int64_t index = task.first_query; index < task.first_query + task.num_queries; ++index) {
        const QueryState query_state = query_state_of(task, index);
        JoinedSplits whole;
        for (int64_t split = query_state.first / kSplit; split * kSplit < query_state.limit; ++split) {
            const float* kept = task.partial(index, split);
            whole.add(kept, {kept[wide], kept[wide + 1]}, wide);
        }
        finish(task, index, whole);
    }
}

// The positions that a task visits: from the start of a chunk to the last visible position.
struct Extent {
    int64_t from = INT64_MAX, end_position = 0;
    void add(const QueryState& query_state) {
        from = query_state.first < from ? query_state.first : from;
        end_position = query_state.limit > end_position ? query_state.limit : end_position;
    }
    void cut(int64_t split) {
        from = from / kChunk * kChunk;
        if (split < 0) return;
        from = from > split * kSplit ? from : split * kSplit;
        end_position = end_position < (split + 1) * kSplit ? end_position : (split + 1) * kSplit;
    }
};

} // namespace headstart::HEADSTART_PATH
