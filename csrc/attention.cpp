// Attention of a few queries over paged keys and values: online softmax (Milakov, Gimelshein 2018) over chunks of 64
// positions counted from absolute position 0, so that a query's bits do not depend on how its keys came to be there.
#include <cstring>

#include "attention.h"

namespace headstart::HEADSTART_PATH {
namespace {

#define APART __attribute__((noinline))

// Of 16 columns, for so many queries; and tiles whose scores are summed together: two hide the latency of one.
#if HEADSTART_AVX512
template <int kQueries> constexpr int kStrips = 4; // 6 queries x 4 strips are 24 accumulators of 32 registers
template <int kQueries> constexpr int kAbreast = 2;
#elif HEADSTART_NEON
template <int kQueries> constexpr int kStrips = kQueries == 1 ? 2 : 1; // 4 queries x 4 registers
template <int kQueries> constexpr int kAbreast = kQueries == 1 ? 2 : 1;
#else
template <int kQueries> constexpr int kStrips = 1;
template <int kQueries> constexpr int kAbreast = 2;
#endif

// One query: which positions of this chunk it sees, and its sums so far.
struct Query : Sight {
    int64_t begin, end;
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

    // Scaled scores of kCount tiles; -inf where a query may not look. Fetches the next chunk meanwhile, bit by bit:
    // more requests than the core keeps open would hold up its own loads.
    template <int kCount> APART void score(int t) {
        constexpr int kEach = kWays<kStore>;
        const int64_t dim = task.layout.head_dim, values_at = task.layout.values_at();
        f32 sum[kQueries][kCount];
        for (auto& each : sum)
            for (f32& one : each) one = splat(0.0f);
        for (int64_t d = 0; d < dim; d += kEach) {
            const int64_t line = d / kEach * kLine<kStore>;
            f32 key[kCount][kEach];
            for (int c = 0; c < kCount; ++c) {
                if (t + c < next_tiles) {
                    prefetch(next[t + c] + line);
                    prefetch(next[t + c] + values_at + line);
                }
                load_items<kStore>(tile[t + c] + line, key[c]);
            }
            for (int way = 0; way < kEach && d + way < dim; ++way)
                for (int i = 0; i < kQueries; ++i) {
                    const f32 value = splat(query[i].values[d + way]);
                    for (int c = 0; c < kCount; ++c) sum[i][c] = fma(key[c][way], value, sum[i][c]);
                }
        }
        for (int c = 0; c < kCount; ++c) put_scores(t + c, sum, c);
    }

    template <int kCount> void put_scores(int t, const f32 (&sum)[kQueries][kCount], int c) {
        for (int i = 0; i < kQueries; ++i) {
            f32 value = sum[i][c] * splat(task.scale);
            if (kStore == Store::I8) value = value * load(scales(t));
            store(query[i].weight + t * 16, hide(value, t, query[i].begin, query[i].end));
        }
    }

    APART void soften(Query& each) {
        const float shrink = headstart::HEADSTART_PATH::soften(each.weight, tiles, task.softcap, each.peak, each.total);
        if (shrink != 1.0f)
            for (int64_t d = 0; d < task.layout.padded_value(); d += 16)
                store(each.sum + d, load(each.sum + d) * splat(shrink));
        if (kStore == Store::I8) // a value's scale goes into its weight
            for (int t = 0; t < tiles; ++t)
                store(each.weight + t * 16, load(each.weight + t * 16) * load(scales(t) + 16));
    }

    // sum += weight * value over positions begin .. end - 1 of the chunk, for kCount queries from `first`.
    template <int kCount, int kWidth> void gather_strips(int first, int64_t d, int64_t begin, int64_t end) {
        constexpr int kEach = kWays<kStore>;
        const int64_t line = task.layout.padded_value() / 16 * kLine<kStore>, at = task.layout.values_at() + d / 16 * kLine<kStore>;
        f32 sum[kCount][kWidth];
        for (int i = 0; i < kCount; ++i)
            for (int s = 0; s < kWidth; ++s) sum[i][s] = load(query[first + i].sum + d + s * 16);
        for (int64_t p = begin / kEach * kEach; p < end; p += kEach) {
            const uint8_t* row = tile[p / 16] + at + p % 16 / kEach * line;
            f32 value[kWidth][kEach];
            for (int s = 0; s < kWidth; ++s) load_items<kStore>(row + s * kLine<kStore>, value[s]);
            for (int way = 0; way < kEach; ++way) {
                if (p + way < begin || p + way >= end) continue;
                for (int i = 0; i < kCount; ++i) {
                    const f32 w = splat(query[first + i].weight[p + way]);
                    for (int s = 0; s < kWidth; ++s) sum[i][s] = fma(value[s][way], w, sum[i][s]);
                }
            }
        }
        for (int i = 0; i < kCount; ++i)
            for (int s = 0; s < kWidth; ++s) store(query[first + i].sum + d + s * 16, sum[i][s]);
    }

    template <int kCount> APART void gather(int first, int64_t begin, int64_t end) {
        const int64_t dim = task.layout.padded_value();
        int64_t d = 0;
        constexpr int kWidth = kStrips<kCount>;
        for (; d + kWidth * 16 <= dim; d += kWidth * 16) gather_strips<kCount, kWidth>(first, d, begin, end);
        for (; d < dim; d += 16) gather_strips<kCount, 1>(first, d, begin, end);
    }

    void run(int64_t first_query) {
        int64_t longest = 0, earliest = INT64_MAX;
        for (int i = 0; i < kQueries; ++i) {
            Query& each = query[i];
            static_cast<Sight&>(each) = sight_of(task, first_query + i);
            longest = each.limit > longest ? each.limit : longest;
            earliest = each.first < earliest ? each.first : earliest;
            for (int64_t d = 0; d < task.layout.padded_value(); ++d) each.sum[d] = 0.0f;
        }
        const int64_t from = earliest / kChunk * kChunk;
        next_tiles = locate(task, from, longest, next);
        for (int64_t start = from; start < longest; start += kChunk) {
            tiles = next_tiles;
            std::memcpy(tile, next, sizeof tile);
            next_tiles = locate(task, start + kChunk, longest, next);
            step(start);
        }
        for (int i = 0; i < kQueries; ++i) finish(task, first_query + i, query[i].sum, query[i].total);
    }

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
            each.begin = within_chunk(each.first - start);
            each.end = within_chunk(each.limit - start);
            begin = each.begin > begin ? each.begin : begin;
            end = each.end < end ? each.end : end;
            first = each.begin < first ? each.begin : first;
            last = each.end > last ? each.end : last;
        }
        int t = 0;
        for (; t + kAbreast<kQueries> <= tiles; t += kAbreast<kQueries>) score<kAbreast<kQueries>>(t);
        if (t < tiles) score<1>(t);
        for (Query& each : query)
            if (each.end > each.begin) soften(each);
        if (end <= begin) return gather_apart(first, last);
        if (first < begin) gather_apart(first, begin);
        gather<kQueries>(0, begin, end);
        if (end < last) gather_apart(end, last);
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
