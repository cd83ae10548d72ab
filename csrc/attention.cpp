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
template <Store kStore, bool kWidened = false> struct Attend {
    static constexpr Store kRead = kWidened ? Store::BF16 : kStore; // what the loops read
    static constexpr bool kScaled = kStore == Store::I8;

    explicit Attend(const AttendTask& work) : task(work), read(work.layout) { read.store = kRead; } // the rest is large
    const AttendTask& task;
    KVLayout read;
    Query query[kMostQueries];
    const uint8_t *tile[kTiles], *next[kTiles]; // of this chunk and the one after it
    int tiles, next_tiles;
    const float* scale[kTiles]; // kScaled: of keys, then of values
    alignas(64) uint8_t wide[kWidened ? kTiles : 1][kWidened ? 32 * (kMaxKeys + kMaxValueDim) : 1];

    // The tiles of 8 bits as BF16 has them, which holds these numbers exactly, once for all queries.
    void widen() {
        const int64_t dim = task.layout.head_dim, width = task.layout.padded_value(), bytes = task.layout.scales_at();
        for (int t = 0; t < tiles; ++t) {
            const auto* from = reinterpret_cast<const int8_t*>(tile[t]);
            for (int64_t at = 0; at < bytes && t < next_tiles; at += 64) prefetch(next[t] + at);
            uint8_t* to = wide[t];
            for (int64_t d = 0; d < dim; d += 2, to += 64)
                pair(load_i8(from + d * 16), d + 1 < dim ? load_i8(from + d * 16 + 16) : splat(0.0f), to);
            from += dim * 16;
            for (int64_t p = 0; p < 16; p += 2, from += 2 * width)
                for (int64_t d = 0; d < width; d += 16, to += 64) pair(load_i8(from + d), load_i8(from + width + d), to);
            tile[t] = wide[t];
        }
    }

    static void pair(f32 even, f32 odd, uint8_t* to) {
        const i32 high = splat_int((int32_t)0xffff0000);
        store(reinterpret_cast<int32_t*>(to), shift_right<16>(as_int(even)) | (as_int(odd) & high));
    }

    // Scaled scores of kCount tiles; -inf where a query may not look. Fetches the next chunk meanwhile, bit by bit:
    // more requests than the core keeps open would hold up its own loads.
    template <int kQueries, int kCount> APART void score(Query* query, int t) {
        constexpr int kEach = kWays<kRead>;
        const int64_t dim = task.layout.head_dim, values_at = read.values_at();
        f32 sum[kQueries][kCount];
        for (auto& each : sum)
            for (f32& one : each) one = splat(0.0f);
        for (int64_t d = 0; d < dim; d += kEach) {
            const int64_t line = d / kEach * kLine<kRead>;
            f32 key[kCount][kEach];
            for (int c = 0; c < kCount; ++c) {
                if (t + c < next_tiles) {
                    prefetch(next[t + c] + line);
                    prefetch(next[t + c] + values_at + line);
                }
                load_items<kRead>(tile[t + c] + line, key[c]);
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
        const int64_t bytes = task.layout.head_dim * 32, values_at = read.values_at();
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
            if (!kPairs<kRead> || task.layout.head_dim > kMaxKeys)
                score<kQueries, kCount>(query, t);
            else if (!kWidened && task.first_query == 0 && query == this->query)
                score_pairs<kQueries, kCount, true>(query, t);
            else
                score_pairs<kQueries, kCount, false>(query, t);
        }
    }

    template <int kQueries, int kCount> void put_scores(Query* query, int t, const f32 (&sum)[kQueries][kCount], int c) {
        for (int i = 0; i < kQueries; ++i) {
            f32 value = sum[i][c] * splat(task.scale);
            if (kScaled) value = value * load(scale[t]);
            store(query[i].weight + t * 16, hide(value, t, query[i].begin, query[i].end));
        }
    }

    APART void soften(Query& each) {
        const auto put = [&](int t, f32 weights) __attribute__((always_inline)) {
            const f32 bare = weights;
            if (kScaled) weights = weights * load(scale[t] + 16); // a value's scale goes into its weight
            if (kWidened) weights = select_less(splat(0.0f), bare, weights, splat(0.0f)); // what nobody wrote may be NaN
            if (kPairs<kRead>)
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
        constexpr int kEach = kWays<kRead>;
        const int64_t line = task.layout.padded_value() / 16 * kLine<kRead>, at = read.values_at() + d / 16 * kLine<kRead>;
        f32 sum[kCount][kWidth];
        for (int i = 0; i < kCount; ++i)
            for (int s = 0; s < kWidth; ++s) sum[i][s] = load(query[i].sum + d + s * 16);
        auto add_pair = [&](int64_t p, i32 seen) __attribute__((always_inline)) {
            const uint8_t* row = tile[p / 16] + at + p % 16 / kEach * line;
            i32 both[kWidth];
            for (int s = 0; s < kWidth; ++s)
                both[s] = load(reinterpret_cast<const int32_t*>(row + s * kLine<kRead>)) & seen;
            for (int i = 0; i < kCount; ++i) {
                const i32 w = splat_pair(query[i].weight_pairs + p);
                for (int s = 0; s < kWidth; ++s) sum[i][s] = dot_pairs(sum[i][s], both[s], w);
            }
        };
        if (kPairs<kRead>) { // anything may stand where a query does not look
            if (begin % 2) add_pair(begin - 1, splat_int((int32_t)0xffff0000));
            for (int64_t p = (begin + 1) / 2 * 2; p + 2 <= end; p += 2) add_pair(p, splat_int(-1));
            if (end % 2 && end > begin) add_pair(end - 1, splat_int(0xffff));
        }
        auto add = [&](int64_t p, int from, int to) __attribute__((always_inline)) { // those of its neighbours from .. to - 1
            const uint8_t* row = tile[p / 16] + at + p % 16 / kEach * line;
            f32 value[kWidth][kEach];
            for (int s = 0; s < kWidth; ++s) load_items<kRead>(row + s * kLine<kRead>, value[s]);
            for (int way = from; way < to; ++way)
                for (int i = 0; i < kCount; ++i) {
                    const f32 w = splat(query[i].weight[p + way]);
                    for (int s = 0; s < kWidth; ++s) sum[i][s] = fma(value[s][way], w, sum[i][s]);
                }
        };
        if (!kPairs<kRead>) {
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
            for (int64_t d = 0; kPairs<kRead> && d < dim && dim <= kMaxKeys; d += 16)
                store_bf16(each.pairs + d, load_some(each.values + d, dim - d));
            std::memset(each.sum, 0, task.layout.padded_value() * 4);
        }
        extent.cut(task.stretch);
        next_tiles = locate(task, extent.from, extent.until, next);
        for (int64_t start = extent.from; start < extent.until; start += kChunk) {
            tiles = next_tiles;
            std::memcpy(tile, next, sizeof tile);
            next_tiles = locate(task, start + kChunk, extent.until, next);
            for (int t = 0; t < tiles && kScaled; ++t)
                scale[t] = reinterpret_cast<const float*>(tile[t] + task.layout.scales_at());
            if (kWidened) widen();
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
        if (kPairs<kRead>) score_some<kQueries, 4>(query, t);
        score_some<kQueries, kAbreast<kQueries>>(query, t);
        if (kAbreast<kQueries> > 1) score_some<kQueries, 1>(query, t);
        for (int i = 0; i < kQueries; ++i)
            if (query[i].end > query[i].begin) soften(query[i]);
        if (kPairs<kRead>) { // two products are one operation, unless the query itself sees one of them only
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
    case Store::I8:
        if constexpr (kPairs<Store::BF16>)
            if (task.layout.head_dim <= kMaxKeys) return Attend<Store::I8, true>(task).run();
        return Attend<Store::I8>(task).run();
    }
}

void join(const AttendTask& task) { join_all(task); }

} // namespace headstart::HEADSTART_PATH
