// Attention of a few queries over paged keys and values: online softmax (Milakov, Gimelshein 2018) over chunks of 64
// positions counted from absolute position 0, so that a query's bits do not depend on how its keys came to be there.
#include <cfloat>
#include <cmath>
#include <cstring>

#include "activations.h"
#include "kernels.h"
#include "quantize_rows.h"
#include "simd.h"

namespace headstart::HEADSTART_PATH {
namespace {

#define APART __attribute__((noinline))

constexpr int kTiles = 4; // of 16 positions each, in a chunk
constexpr int64_t kChunk = kTiles * 16;
#if HEADSTART_AVX512
constexpr int kStrips = 4; // of 16 columns: 6 queries x 4 strips are 24 accumulators of 32 registers
#else
constexpr int kStrips = 1;
#endif

template <Store kStore> INLINE f32 load_item(const uint8_t* p, int64_t index) {
    if (kStore == Store::F32) return load(reinterpret_cast<const float*>(p) + index);
    if (kStore == Store::BF16) return load_bf16(reinterpret_cast<const uint16_t*>(p) + index);
    return load_i8(reinterpret_cast<const int8_t*>(p) + index);
}

INLINE f32 lanes_from(int64_t first) { // first, first + 1, ... as floats
    alignas(64) static const float numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(numbers) + splat((float)first);
}

// One query: which positions it sees, which of them in this chunk, and its softmax so far.
struct Query {
    const float* values;
    int64_t first, limit, begin, end;
    float peak, total;
    alignas(64) float sum[kMaxValueDim];
    alignas(64) float weight[kChunk]; // scores of the chunk, then e^(score - peak)
};

// Its loops are functions of their own, so that none costs another its registers.
template <Store kStore, int kQueries> struct Attend {
    explicit Attend(const AttendTask& work) : task(work) {} // the rest is set where it is used: it is large
    const AttendTask& task;
    Query query[kQueries];
    const uint8_t *tile[kTiles], *next[kTiles]; // of this chunk and the one after it
    int tiles, next_tiles;

    const float* scales(int t) const { return reinterpret_cast<const float*>(tile[t] + task.layout.scales_at()); }

    int locate(int64_t start, int64_t longest, const uint8_t* (&found)[kTiles]) const {
        int count = 0;
        for (; count < kTiles && start + count * 16 < longest; ++count) {
            const int64_t position = start + count * 16;
            if (position >= task.scratch_from) {
                found[count] = task.scratch + (position - task.scratch_from) / 16 * task.layout.tile_bytes();
                continue;
            }
            const int64_t slot = task.block_table[position / task.block_size] * task.block_size +
                                 position % task.block_size;
            found[count] = task.pool + (slot / 16 * task.layout.num_heads + task.kv_head) * task.layout.tile_bytes();
        }
        return count;
    }

    // Scaled scores of one tile; -inf where a query may not look. Fetches the tile's values meanwhile.
    APART void score(int t) {
        const int64_t dim = task.layout.head_dim, line = 16 * task.layout.item();
        const uint8_t* values = tile[t] + task.layout.values_at();
        f32 sum[kQueries];
        for (auto& each : sum) each = splat(0.0f);
        for (int64_t d = 0; d < dim; ++d) {
            prefetch(values + d * line);
            const f32 key = load_item<kStore>(tile[t], d * 16);
            for (int i = 0; i < kQueries; ++i) sum[i] = fma(key, splat(query[i].values[d]), sum[i]);
        }
        const f32 position = lanes_from(t * 16), never = splat(-INFINITY);
        for (int i = 0; i < kQueries; ++i) {
            Query& each = query[i];
            f32 value = sum[i] * splat(task.scale);
            if (kStore == Store::I8) value = value * load(scales(t));
            if (t * 16 < each.begin) value = select_less(position, splat((float)each.begin), never, value);
            if (t * 16 + 16 > each.end) value = select_less(position, splat((float)each.end), value, never);
            store(each.weight + t * 16, value);
        }
    }

    // Hidden scores stay -inf.
    APART void cap(Query& each) {
        for (int t = 0; t < tiles; ++t) {
            const f32 score = load(each.weight + t * 16);
            const f32 capped = softcap(score, task.softcap);
            store(each.weight + t * 16, select_less(score, splat(-FLT_MAX), score, capped));
        }
    }

    // Scores to e^(score - peak); rescales what was summed before.
    APART void soften(Query& each) {
        if (task.softcap != 0.0f) cap(each);
        f32 w[kTiles], best = splat(-INFINITY);
        for (int t = 0; t < tiles; ++t) best = max(best, w[t] = load(each.weight + t * 16));
        const float top = max_lanes(best);
        if (top > each.peak || std::isnan(top)) {
            alignas(64) float shrink[16];
            store(shrink, exp(splat(each.peak - top)));
            each.total *= shrink[0];
            for (int64_t d = 0; d < task.layout.padded_value(); d += 16)
                store(each.sum + d, load(each.sum + d) * splat(shrink[0]));
            each.peak = top;
        }
        for (int t = 0; t < kTiles; ++t) w[t] = t < tiles ? exp(w[t] - splat(each.peak)) : splat(0.0f);
        each.total += sum_lanes((w[0] + w[1]) + (w[2] + w[3]));
        for (int t = 0; t < tiles; ++t) { // a value's scale goes into its weight
            if (kStore == Store::I8) w[t] = w[t] * load(scales(t) + 16);
            store(each.weight + t * 16, w[t]);
        }
    }

    // sum += weight * value over positions begin .. end - 1 of the chunk, for kCount queries from `first`.
    template <int kCount, int kWidth> void gather_strips(int first, int64_t d, int64_t begin, int64_t end) {
        const int64_t dim = task.layout.padded_value(), item = task.layout.item();
        f32 sum[kCount][kWidth];
        for (int i = 0; i < kCount; ++i)
            for (int s = 0; s < kWidth; ++s) sum[i][s] = load(query[first + i].sum + d + s * 16);
        for (int64_t p = begin; p < end; ++p) {
            const uint8_t* row = tile[p / 16] + task.layout.values_at() + p % 16 * dim * item;
            f32 value[kWidth];
            for (int s = 0; s < kWidth; ++s) value[s] = load_item<kStore>(row, d + s * 16);
            for (int i = 0; i < kCount; ++i) {
                const f32 w = splat(query[first + i].weight[p]);
                for (int s = 0; s < kWidth; ++s) sum[i][s] = fma(value[s], w, sum[i][s]);
            }
        }
        for (int i = 0; i < kCount; ++i)
            for (int s = 0; s < kWidth; ++s) store(query[first + i].sum + d + s * 16, sum[i][s]);
    }

    template <int kCount> APART void gather(int first, int64_t begin, int64_t end) {
        const int64_t dim = task.layout.padded_value();
        int64_t d = 0;
        for (; d + kStrips * 16 <= dim; d += kStrips * 16) gather_strips<kCount, kStrips>(first, d, begin, end);
        for (; d < dim; d += 16) gather_strips<kCount, 1>(first, d, begin, end);
    }

    void fetch_next() const {
        const int64_t bytes = task.layout.values_at();
        for (int t = 0; t < next_tiles; ++t)
            for (int64_t at = 0; at < bytes; at += 64) prefetch(next[t] + at);
    }

    void run(int64_t first_query) {
        int64_t longest = 0, earliest = INT64_MAX;
        for (int i = 0; i < kQueries; ++i) {
            const int64_t row = task.first_row + (first_query + i) / task.group;
            const int64_t head = task.kv_head * task.group + (first_query + i) % task.group;
            Query& each = query[i];
            each.values = task.queries + row * task.query_stride + head * task.layout.head_dim;
            each.limit = task.sees[row] + 1;
            longest = each.limit > longest ? each.limit : longest;
            const int64_t at = task.positions[row];
            const int64_t oldest = task.window > 0 ? at - task.window + 1 : task.window ? at - at % -task.window : 0;
            each.first = oldest > task.first_position ? oldest : task.first_position;
            earliest = each.first < earliest ? each.first : earliest;
            each.peak = -FLT_MAX; // finite: scores of -inf weigh e^-inf = 0, not NaN
            each.total = 0.0f;
            if (task.sinks) { // the first logit of the sum: e^(sink - sink)
                each.peak = task.sinks[head] > each.peak ? task.sinks[head] : each.peak;
                each.total = 1.0f;
            }
            for (int64_t d = 0; d < task.layout.padded_value(); ++d) each.sum[d] = 0.0f;
        }
        const int64_t from = earliest / kChunk * kChunk;
        next_tiles = locate(from, longest, next);
        for (int64_t start = from; start < longest; start += kChunk) {
            tiles = next_tiles;
            std::memcpy(tile, next, sizeof tile);
            next_tiles = locate(start + kChunk, longest, next);
            step(start);
        }
        for (int i = 0; i < kQueries; ++i) finish(query[i], first_query + i);
    }

    static int64_t within(int64_t offset) { return offset < 0 ? 0 : offset < kChunk ? offset : kChunk; }

    // What single queries see of positions begin .. end - 1.
    APART void gather_apart(int64_t begin, int64_t end) {
        for (int i = 0; i < kQueries; ++i) {
            const int64_t from = query[i].begin > begin ? query[i].begin : begin;
            const int64_t to = query[i].end < end ? query[i].end : end;
            if (from < to) gather<1>(i, from, to);
        }
    }

    // Each query's sum goes over its positions one after the other, some of them beside the other queries.
    void step(int64_t start) {
        int64_t begin = 0, end = kChunk, first = kChunk, last = 0; // what all see, and any
        for (Query& each : query) {
            each.begin = within(each.first - start);
            each.end = within(each.limit - start);
            begin = each.begin > begin ? each.begin : begin;
            end = each.end < end ? each.end : end;
            first = each.begin < first ? each.begin : first;
            last = each.end > last ? each.end : last;
        }
        for (int t = 0; t < tiles; ++t) score(t);
        fetch_next();
        for (Query& each : query)
            if (each.end > each.begin) soften(each);
        if (end <= begin) return gather_apart(first, last);
        if (first < begin) gather_apart(first, begin);
        gather<kQueries>(0, begin, end);
        if (end < last) gather_apart(end, last);
    }

    void finish(Query& each, int64_t index) {
        const int64_t dim = task.layout.value_dim;
        const QuantLayout layout(task.out.width);
        const int64_t row = task.first_row + index / task.group;
        const int64_t head = task.kv_head * task.group + index % task.group;
        const f32 inverse = splat(1.0f / each.total);
        for (int64_t d = 0; d < dim; d += 16) store(each.sum + d, load(each.sum + d) * inverse);
        std::memcpy(task.out.values + row * task.out.stride + head * dim, each.sum, dim * 4);
        if (task.out.quants) // the caller asks for it only where heads are whole groups
            for (int64_t d = 0; d < dim; d += 32)
                quantize_group(each.sum + d, (head * dim + d) / 32, layout, task.out.quants + row * layout.row_bytes());
    }
};

template <Store kStore, int kQueries> void attend_few(const AttendTask& task) {
    Attend<kStore, kQueries>(task).run(task.first_query);
}

template <Store kStore> void attend_store(const AttendTask& task) {
    static_assert(kMostQueries == 6);
    switch (task.num_queries) {
    case 6: return attend_few<kStore, 6>(task);
    case 5: return attend_few<kStore, 5>(task);
    case 4: return attend_few<kStore, 4>(task);
    case 3: return attend_few<kStore, 3>(task);
    case 2: return attend_few<kStore, 2>(task);
    default: return attend_few<kStore, 1>(task);
    }
}

} // namespace

void attend(const AttendTask& task) {
    switch (task.layout.store) {
    case Store::F32: return attend_store<Store::F32>(task);
    case Store::BF16: return attend_store<Store::BF16>(task);
    case Store::I8: return attend_store<Store::I8>(task);
    }
}

} // namespace headstart::HEADSTART_PATH
