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
#elif HEADSTART_AVX2
template <int kQueries> constexpr int kStrips = kQueries == 1 ? 2 : 1; // 4 queries x 2 registers, of 16
template <int kQueries> constexpr int kAbreast = kQueries == 1 ? 4 : kQueries == 2 ? 2 : 1;
#else
template <int kQueries> constexpr int kStrips = 1;
template <int kQueries> constexpr int kAbreast = 2;
#endif

// Whether keys and values meet queries and weights as pairs of bfloat16, which are rounded to them.
#if HEADSTART_PAIRS
template <Store kStore> constexpr bool kPairs = kStore == Store::BF16;
#else
template <Store> constexpr bool kPairs = false;
INLINE f32 dot_pairs(f32 sum, i32, i32) { return sum; }
INLINE void store_bf16(uint16_t*, f32) {}
#endif

INLINE i32 splat_pair(const uint16_t* p) {
    int32_t both;
    std::memcpy(&both, p, 4);
    return splat_int(both);
}

#if HEADSTART_NEON || HEADSTART_AVX2
constexpr int kGroup = 4; // of queries
#else
constexpr int kGroup = 6;
#endif
constexpr int64_t kMaxKeys = 640; // wider keys meet unrounded queries

// One query: which positions of this chunk it sees, and its sums so far.
struct Query : Sight {
    int64_t begin, end;
    alignas(64) float sum[kMaxValueDim]; // of the present stretch
    Whole whole;
    alignas(64) float weight[kChunk]; // scores of the chunk, then e^(score - peak)
    uint16_t pairs[kMaxKeys], weight_pairs[kChunk]; // with kPairs: values and weights in bfloat16
};

// Queries go through a chunk in groups of at most kGroup, while it is in the first-level cache. The loops are functions of
// their own, so that none costs another its registers.
template <Store kStore> struct Attend {
    explicit Attend(const AttendTask& work) : task(work) {} // the rest is set where it is used: it is large
    const AttendTask& task;
    Query query[kMostQueries];
    const uint8_t *tile[kTiles], *next[kTiles]; // of this chunk and the one after it
    int tiles, next_tiles;

    const float* scales(int t) const { return reinterpret_cast<const float*>(tile[t] + task.layout.scales_at()); }

    // Scaled scores of kCount tiles; -inf where a query may not look. Fetches the next chunk meanwhile, bit by bit:
    // more requests than the core keeps open would hold up its own loads.
    template <int kQueries, int kCount> APART void score(Query* query, int t) {
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
        for (int c = 0; c < kCount; ++c) put_scores(query, t + c, sum, c);
    }

    // The same with kPairs. Only the first queries fetch the next chunk for those that come after them.
    template <int kQueries, int kCount, bool kFetch> APART void score_pairs(Query* query, int t) {
        const int64_t bytes = task.layout.head_dim * 32, values_at = task.layout.values_at();
        const uint8_t *keys[kCount], *fetched[kCount];
        f32 sum[kQueries][kCount];
        for (auto& each : sum)
            for (f32& one : each) one = splat(0.0f);
        for (int c = 0; c < kCount; ++c) {
            keys[c] = tile[t + c];
            fetched[c] = t + c < next_tiles ? next[t + c] : tile[t + c];
        }
        const uint16_t* pairs = query[0].pairs;
        constexpr int64_t kNext = sizeof(Query) / sizeof(uint16_t);
        for (int64_t at = 0; at < bytes; at += 64, pairs += 2) {
            i32 key[kCount];
            for (int c = 0; c < kCount; ++c) {
                if (kFetch) {
                    prefetch(fetched[c] + at);
                    prefetch(fetched[c] + values_at + at);
                }
                key[c] = load(reinterpret_cast<const int32_t*>(keys[c] + at));
            }
            for (int i = 0; i < kQueries; ++i) {
                const i32 value = splat_pair(pairs + i * kNext);
                for (int c = 0; c < kCount; ++c) sum[i][c] = dot_pairs(sum[i][c], key[c], value);
            }
        }
        for (int c = 0; c < kCount; ++c) put_scores(query, t + c, sum, c);
    }

    template <int kQueries, int kCount> void score_some(Query* query, int& t) {
        for (; t + kCount <= tiles; t += kCount) {
            if (!kPairs<kStore> || task.layout.head_dim > kMaxKeys)
                score<kQueries, kCount>(query, t);
            else if (task.first_query == 0 && query == this->query)
                score_pairs<kQueries, kCount, true>(query, t);
            else
                score_pairs<kQueries, kCount, false>(query, t);
        }
    }

    template <int kQueries, int kCount> void put_scores(Query* query, int t, const f32 (&sum)[kQueries][kCount], int c) {
        for (int i = 0; i < kQueries; ++i) {
            f32 value = sum[i][c] * splat(task.scale);
            if (kStore == Store::I8) value = value * load(scales(t));
            store(query[i].weight + t * 16, hide(value, t, query[i].begin, query[i].end));
        }
    }

    APART void soften(Query& each) {
        const auto put = [&](int t, f32 weights) __attribute__((always_inline)) {
            if (kStore == Store::I8) weights = weights * load(scales(t) + 16); // a value's scale goes into its weight
            if (kPairs<kStore>)
                store_bf16(each.weight_pairs + t * 16, weights); // those of what it does not see are zeros
            else
                store(each.weight + t * 16, weights);
        };
        const float shrink = headstart::HEADSTART_PATH::soften(each.weight, tiles, task.softcap, each, put);
        if (shrink != 1.0f)
            for (int64_t d = 0; d < task.layout.padded_value(); d += 16)
                store(each.sum + d, load(each.sum + d) * splat(shrink));
    }

    // sum += weight * value over positions begin .. end - 1 of the chunk, for kCount queries.
    template <int kCount, int kWidth> void gather_strips(Query* query, int64_t d, int64_t begin, int64_t end) {
        constexpr int kEach = kWays<kStore>;
        const int64_t line = task.layout.padded_value() / 16 * kLine<kStore>, at = task.layout.values_at() + d / 16 * kLine<kStore>;
        f32 sum[kCount][kWidth];
        for (int i = 0; i < kCount; ++i)
            for (int s = 0; s < kWidth; ++s) sum[i][s] = load(query[i].sum + d + s * 16);
        auto add_pair = [&](int64_t p, i32 seen) __attribute__((always_inline)) {
            const uint8_t* row = tile[p / 16] + at + p % 16 / kEach * line;
            i32 both[kWidth];
            for (int s = 0; s < kWidth; ++s)
                both[s] = load(reinterpret_cast<const int32_t*>(row + s * kLine<kStore>)) & seen;
            for (int i = 0; i < kCount; ++i) {
                const i32 w = splat_pair(query[i].weight_pairs + p);
                for (int s = 0; s < kWidth; ++s) sum[i][s] = dot_pairs(sum[i][s], both[s], w);
            }
        };
        if (kPairs<kStore>) { // anything may stand where a query does not look
            if (begin % 2) add_pair(begin - 1, splat_int((int32_t)0xffff0000));
            for (int64_t p = (begin + 1) / 2 * 2; p + 2 <= end; p += 2) add_pair(p, splat_int(-1));
            if (end % 2 && end > begin) add_pair(end - 1, splat_int(0xffff));
        }
        auto add = [&](int64_t p, int from, int to) __attribute__((always_inline)) { // those of its neighbours from .. to - 1
            const uint8_t* row = tile[p / 16] + at + p % 16 / kEach * line;
            f32 value[kWidth][kEach];
            for (int s = 0; s < kWidth; ++s) load_items<kStore>(row + s * kLine<kStore>, value[s]);
            for (int way = from; way < to; ++way)
                for (int i = 0; i < kCount; ++i) {
                    const f32 w = splat(query[i].weight[p + way]);
                    for (int s = 0; s < kWidth; ++s) sum[i][s] = fma(value[s][way], w, sum[i][s]);
                }
        };
        if (!kPairs<kStore>) {
            int64_t p = begin / kEach * kEach;
            if (p < begin) {
                add(p, 1, end < p + kEach ? (int)(end - p) : kEach);
                p += kEach;
            }
            for (; p + kEach <= end; p += kEach) add(p, 0, kEach);
            if (p < end) add(p, 0, 1);
        }
        for (int i = 0; i < kCount; ++i)
            for (int s = 0; s < kWidth; ++s) store(query[i].sum + d + s * 16, sum[i][s]);
    }

    template <int kCount> APART void gather(Query* query, int64_t begin, int64_t end) {
        const int64_t dim = task.layout.padded_value();
        int64_t d = 0;
        constexpr int kWidth = kStrips<kCount>;
        for (; d + kWidth * 16 <= dim; d += kWidth * 16) gather_strips<kCount, kWidth>(query, d, begin, end);
        for (; d < dim; d += 16) gather_strips<kCount, 1>(query, d, begin, end);
    }

    void run() {
        const int count = (int)task.num_queries;
        Extent extent;
        for (int i = 0; i < count; ++i) {
            Query& each = query[i];
            static_cast<Sight&>(each) = sight_of(task, task.first_query + i);
            each.whole.begun = false;
            extent.add(each);
            const int64_t dim = task.layout.head_dim;
            for (int64_t d = 0; kPairs<kStore> && d < dim && dim <= kMaxKeys; d += 16)
                store_bf16(each.pairs + d, load_some(each.values + d, dim - d));
            std::memset(each.sum, 0, task.layout.padded_value() * 4);
        }
        extent.cut(task.stretch);
        next_tiles = locate(task, extent.from, extent.until, next);
        for (int64_t start = extent.from; start < extent.until; start += kChunk) {
            tiles = next_tiles;
            std::memcpy(tile, next, sizeof tile);
            next_tiles = locate(task, start + kChunk, extent.until, next);
            for (int i = 0; i < count; i += kGroup) step_group(query + i, count - i, start);
            if ((start + kChunk) % kStretch != 0 && start + kChunk < extent.until) continue;
            for (int i = 0; i < count; ++i)
                close(task, task.first_query + i, start / kStretch, query[i], query[i].sum, query[i].whole);
        }
        for (int i = 0; i < count && task.stretch < 0; ++i)
            finish(task, task.first_query + i, query[i].whole);
    }

    // What single queries see of positions begin .. end - 1.
    template <int kQueries> APART void gather_apart(Query* query, int64_t begin, int64_t end) {
        for (int i = 0; i < kQueries; ++i) {
            const int64_t from = query[i].begin > begin ? query[i].begin : begin;
            const int64_t to = query[i].end < end ? query[i].end : end;
            if (from < to) gather<1>(query + i, from, to);
        }
    }

    // Each query's sum goes over its positions one after the other, some of them beside the other queries.
    template <int kQueries> void step(Query* query, int64_t start) {
        int64_t begin = 0, end = kChunk, first = kChunk, last = 0; // what all see, and any
        for (int i = 0; i < kQueries; ++i) {
            Query& each = query[i];
            each.begin = within_chunk(each.first - start);
            each.end = within_chunk(each.limit - start);
            begin = each.begin > begin ? each.begin : begin;
            end = each.end < end ? each.end : end;
            first = each.begin < first ? each.begin : first;
            last = each.end > last ? each.end : last;
        }
        if (last <= first) return;
        int t = 0;
        if (kPairs<kStore>) score_some<kQueries, 4>(query, t);
        score_some<kQueries, kAbreast<kQueries>>(query, t);
        if (kAbreast<kQueries> > 1) score_some<kQueries, 1>(query, t);
        for (int i = 0; i < kQueries; ++i)
            if (query[i].end > query[i].begin) soften(query[i]);
        if (kPairs<kStore>) { // two products are one operation, unless the query itself sees one of them only
            begin = (begin + 1) / 2 * 2;
            end = end / 2 * 2;
        }
        if (end <= begin) return gather_apart<kQueries>(query, first, last);
        if (first < begin) gather_apart<kQueries>(query, first, begin);
        gather<kQueries>(query, begin, end);
        if (end < last) gather_apart<kQueries>(query, end, last);
    }

    void step_group(Query* query, int count, int64_t start) {
        static_assert(kGroup == 4 || kGroup == 6);
        switch (count < kGroup ? count : kGroup) {
        case 1: return step<1>(query, start);
        case 2: return step<2>(query, start);
        case 3: return step<3>(query, start);
        case 4: return step<4>(query, start);
#if !HEADSTART_NEON && !HEADSTART_AVX2
        case 5: return step<5>(query, start);
        default: return step<6>(query, start);
#endif
        }
    }
};

} // namespace

void attend(const AttendTask& task) {
    switch (task.layout.store) {
    case Store::F32: return Attend<Store::F32>(task).run();
    case Store::BF16: return Attend<Store::BF16>(task).run();
    case Store::I8: return Attend<Store::I8>(task).run();
    }
}

void join(const AttendTask& task) { join_all(task); }

} // namespace headstart::HEADSTART_PATH
