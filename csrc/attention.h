// What attention has in common, whatever multiplies: where keys lie, what a query sees, the softmax of one chunk.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstring>

#include "activations.h"
#include "kernels.h"
#include "quantize_rows.h"
#include "simd.h"

namespace headstart::HEADSTART_PATH {

constexpr int kTiles = 4; // of 16 positions each, in a chunk
constexpr int64_t kChunk = kTiles * 16;

INLINE f32 lanes_from(int64_t first) { // first, first + 1, ... as floats
    alignas(64) static const float numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(numbers) + splat((float)first);
}

// kWays<kStore> neighbours of 16 lanes each from p on: of pairs, those of the even places, then those of the odd ones.
template <Store kStore> constexpr int kWays = kStore == Store::BF16 ? 2 : 1;
template <Store kStore> constexpr int64_t kLine = kStore == Store::I8 ? 16 : 64; // their bytes

template <Store kStore> INLINE void load_items(const uint8_t* p, f32 (&found)[kWays<kStore>]) {
    if constexpr (kStore == Store::F32) {
        found[0] = load(reinterpret_cast<const float*>(p));
    } else if constexpr (kStore == Store::BF16) {
        const i32 both = load(reinterpret_cast<const int32_t*>(p));
        found[0] = as_float(shift_left<16>(both));
        found[1] = as_float(both & splat_int((int32_t)0xffff0000));
    } else {
        found[0] = load_i8(reinterpret_cast<const int8_t*>(p));
    }
}

INLINE int64_t within_chunk(int64_t offset) { return offset < 0 ? 0 : offset < kChunk ? offset : kChunk; }

// The tiles of positions start .. longest - 1, at most a chunk of them; returns how many.
INLINE int locate(const AttendTask& task, int64_t start, int64_t longest, const uint8_t* (&found)[kTiles]) {
    int count = 0;
    for (; count < kTiles && start + count * 16 < longest; ++count) found[count] = task.tile_of(start + count * 16);
    return count;
}

// The softmax over some positions: the peak of their scores, the total of e^(score - peak).
struct Softmax {
    float peak = -FLT_MAX, total = 0.0f; // finite: scores of -inf weigh e^-inf = 0, not NaN
};

// What query `index` of the task sees, positions first .. limit - 1, and its softmax over the present stretch.
struct Sight : Softmax {
    const float* values;
    int64_t first, limit;
};

INLINE Sight sight_of(const AttendTask& task, int64_t index) {
    const int64_t row = task.row_of(index), position = task.positions[row];
    const int64_t oldest = task.window ? position - task.window + 1 : task.chunk ? position - position % task.chunk : 0;
    Sight found;
    found.values = task.queries + row * task.query_stride + task.head_of(index) * task.layout.head_dim;
    found.first = oldest > task.first_position ? oldest : task.first_position;
    found.limit = task.sees[row] + 1 - task.unseen;
    return found;
}

INLINE bool sees(const Sight& sight, int64_t stretch) {
    return sight.first < (stretch + 1) * kStretch && sight.limit > stretch * kStretch;
}

// Scaled scores of 16 positions from 16 t of the chunk on; -inf outside begin .. end - 1.
INLINE f32 hide(f32 score, int t, int64_t begin, int64_t end) {
    const f32 position = lanes_from(t * 16), never = splat(-INFINITY);
    if (t * 16 < begin) score = select_less(position, splat((float)begin), never, score);
    if (t * 16 + 16 > end) score = select_less(position, splat((float)end), score, never);
    return score;
}

INLINE float shrinks(float by) {
    alignas(64) float lanes[16];
    store(lanes, exp(splat(by)));
    return lanes[0];
}

// Scores of one query and chunk to e^(score - peak), put(t, weights of 16 positions). Returns what its sums so far shrink by.
template <int kCount, class Put>
INLINE float soften_tiles(const float* scores, float cap, Softmax& softmax, Put&& put) {
    f32 w[kTiles], best = splat(-INFINITY);
    for (int t = 0; t < kCount; ++t) {
        w[t] = load(scores + t * 16);
        if (cap != 0.0f) w[t] = select_less(w[t], splat(-FLT_MAX), w[t], softcap(w[t], cap)); // hidden ones stay -inf
        best = max(best, w[t]);
    }
    const float top = max_lanes(best);
    float shrink = 1.0f;
    if (top > softmax.peak || std::isnan(top)) {
        shrink = shrinks(softmax.peak - top);
        softmax.total *= shrink;
        softmax.peak = top;
    }
    for (int t = 0; t < kTiles; ++t) w[t] = t < kCount ? exp(w[t] - splat(softmax.peak)) : splat(0.0f);
    softmax.total += sum_lanes((w[0] + w[1]) + (w[2] + w[3]));
    for (int t = 0; t < kCount; ++t) put(t, w[t]);
    return shrink;
}

template <class Put> INLINE float soften(const float* scores, int tiles, float cap, Softmax& softmax, Put&& put) {
    switch (tiles) { // whole chunks stay in registers
    case 1: return soften_tiles<1>(scores, cap, softmax, put);
    case 2: return soften_tiles<2>(scores, cap, softmax, put);
    case 3: return soften_tiles<3>(scores, cap, softmax, put);
    default: return soften_tiles<4>(scores, cap, softmax, put);
    }
}

// Sums over some positions, and over those behind them (nullptr: zeros), become sums over all.
INLINE void join(float* sum, Softmax& whole, const float* more, const Softmax& part, int64_t wide) {
    const bool higher = part.peak > whole.peak || std::isnan(part.peak);
    const float factor = shrinks(higher ? whole.peak - part.peak : part.peak - whole.peak);
    const float of_whole = higher ? factor : 1.0f, of_part = higher ? 1.0f : factor;
    whole.total = whole.total * of_whole + part.total * of_part;
    if (higher) whole.peak = part.peak;
    for (int64_t d = 0; d < wide; d += 16) {
        const f32 kept = load(sum + d) * splat(of_whole);
        store(sum + d, more ? fma(load(more + d), splat(of_part), kept) : kept);
    }
}

// The stretches of one query so far.
struct Whole {
    alignas(64) float sum[kMaxValueDim];
    Softmax softmax;
    bool begun = false;

    void add(const float* part, const Softmax& more, int64_t wide) {
        if (begun) return join(sum, softmax, part, more, wide);
        begun = true;
        softmax = more;
        std::memcpy(sum, part, wide * 4);
    }
};

// A sink is one more logit, without a value.
INLINE void finish(const AttendTask& task, int64_t index, Whole& whole) {
    const int64_t dim = task.layout.value_dim, row = task.row_of(index), head = task.head_of(index);
    float* sum = whole.sum;
    if (!whole.begun) { // it sees nothing
        whole.softmax = {};
        std::memset(sum, 0, task.layout.padded_value() * 4);
    }
    if (task.sinks) join(sum, whole.softmax, nullptr, {task.sinks[head], 1.0f}, task.layout.padded_value());
    const QuantLayout layout(task.out.width);
    const f32 inverse = splat(1.0f / whole.softmax.total);
    for (int64_t d = 0; d < dim; d += 16) store(sum + d, load(sum + d) * inverse);
    std::memcpy(task.out.values + row * task.out.stride + head * dim, sum, dim * 4);
    if (task.out.quants) // the caller asks for it only where heads are whole groups
        for (int64_t d = 0; d < dim; d += 32)
            quantize_group(sum + d, (head * dim + d) / 32, layout, task.out.quants + row * layout.row_bytes());
}

// Ends a stretch of query `index`: joined to those before it, or kept for join_all.
INLINE void close(const AttendTask& task, int64_t index, int64_t stretch, Sight& sight, float* sum, Whole& whole) {
    const int64_t wide = task.layout.padded_value();
    if (!sees(sight, stretch)) return;
    if (task.stretch < 0) {
        whole.add(sum, sight, wide);
    } else {
        float* kept = task.partial(index, stretch);
        std::memcpy(kept, sum, wide * 4);
        kept[wide] = sight.peak;
        kept[wide + 1] = sight.total;
    }
    static_cast<Softmax&>(sight) = {};
    std::memset(sum, 0, wide * 4);
}

INLINE void join_all(const AttendTask& task) {
    const int64_t wide = task.layout.padded_value();
    for (int64_t index = task.first_query; index < task.first_query + task.num_queries; ++index) {
        const Sight sight = sight_of(task, index);
        Whole whole;
        for (int64_t stretch = sight.first / kStretch; stretch * kStretch < sight.limit; ++stretch) {
            const float* kept = task.partial(index, stretch);
            whole.add(kept, {kept[wide], kept[wide + 1]}, wide);
        }
        finish(task, index, whole);
    }
}

// The positions of a task: from a chunk's first one to behind the last that a query sees.
struct Extent {
    int64_t from = INT64_MAX, until = 0;
    void add(const Sight& sight) {
        from = sight.first < from ? sight.first : from;
        until = sight.limit > until ? sight.limit : until;
    }
    void cut(int64_t stretch) {
        from = from / kChunk * kChunk;
        if (stretch < 0) return;
        from = from > stretch * kStretch ? from : stretch * kStretch;
        until = until < (stretch + 1) * kStretch ? until : (stretch + 1) * kStretch;
    }
};

} // namespace headstart::HEADSTART_PATH
