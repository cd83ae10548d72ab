// Attention of a few queries over paged keys and values: online softmax (Milakov, Gimelshein 2018) over chunks of 64
// positions counted from absolute position 0, so that results do not depend on prefill chunks or cache hits.
#include <cstring>

#include "attention.h"

namespace headstart::HEADSTART_PATH {
namespace {

#define NOINLINE __attribute__((noinline))

// kStrips: vectors of 16 value columns accumulated together for kQueries queries. kTilesTogether: tiles scored together, to
// hide the latency of a sum.
#if HEADSTART_AVX512
template <int kQueries> constexpr int kStrips = 4; // 6 queries x 4 strips are 24 accumulators of 32 registers
template <int kQueries> constexpr int kTilesTogether = 2;
#elif HEADSTART_NEON
template <int kQueries> constexpr int kStrips = kQueries == 1 ? 2 : 1; // 4 queries x 4 registers
template <int kQueries> constexpr int kTilesTogether = kQueries == 1 ? 2 : 1;
#elif HEADSTART_AVX2
template <int kQueries> constexpr int kStrips = kQueries == 1 ? 2 : 1; // 4 queries x 2 registers, of 16
template <int kQueries> constexpr int kTilesTogether = kQueries == 1 ? 4 : kQueries == 2 ? 2 : 1;
#else
template <int kQueries> constexpr int kStrips = 1;
template <int kQueries> constexpr int kTilesTogether = 2;
#endif

// Whether products use pairs of bfloat16: queries and weights are rounded to bfloat16.
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
constexpr int kGroup = 4; // queries processed together
#else
constexpr int kGroup = 6;
#endif
constexpr int64_t kMaxKeys = 640; // maximum head_dim for pairs of bfloat16

// One query: its visible positions of this chunk, begin .. end - 1, and its sums so far.
struct Query : QueryState {
    int64_t begin, end;
    alignas(64) float sum[kMaxValueDim]; // over the current split
    JoinedSplits whole;
    alignas(64) float weight[kChunk]; // scores of the chunk, then e^(score - peak)
    uint16_t pairs[kMaxKeys], weight_pairs[kChunk]; // kPairs: the query and its weights in bfloat16
};

// Processes a chunk for groups of at most kGroup queries while it is in the L1 cache. The loops are separate functions, so
// that each has all registers.
template <Store kStore, bool kWidened = false> struct Attend {
    static constexpr Store kRead = kWidened ? Store::BF16 : kStore; // storage that the loops read
    static constexpr bool kScaled = is_scaled(kStore);

    explicit Attend(const AttendTask& work) : task(work), read(work.layout) { read.store = kRead; } // other members are large: left uninitialized
    const AttendTask& task;
    KVLayout read;
    Query query[kMaxQueries];
    const uint8_t *tile[kTiles], *next[kTiles]; // tiles of this chunk and of the next
    int tiles, next_tiles;
    int64_t chunk_start;
    const float* scale[kTiles]; // kScaled: 16 key scales, then 16 value scales
    alignas(64) uint8_t wide[kWidened ? kTiles : 1][kWidened ? 32 * (kMaxKeys + kMaxValueDim) : 1];

    // Widens the chunk's tiles, once for all queries.
    void widen() {
        for (int t = 0; t < tiles; ++t) {
            for (int64_t at = 0; at < task.layout.scales_at() && t < next_tiles; at += 64) prefetch(next[t] + at);
            widen_tile<kStore>(task.layout, tile[t], wide[t]);
            tile[t] = wide[t];
        }
    }

    // Scaled, masked scores of kCount tiles. Also prefetches the next chunk in small steps: too many open requests would
    // delay this chunk's loads.
    template <int kQueries, int kCount> NOINLINE void score(Query* query, int t) {
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

    // The same with kPairs. Only the first group of queries prefetches the next chunk.
    template <int kQueries, int kCount, bool kFetch> NOINLINE void score_pairs(Query* query, int t) {
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
            if (task.bias) value = add_bias(value, query[i], task.extent, chunk_start + t * 16);
            store(query[i].weight + t * 16, mask_scores(value, t, query[i].begin, query[i].end));
        }
    }

    NOINLINE void softmax_chunk(Query& each) {
        const auto put = [&](int t, f32 weights) __attribute__((always_inline)) {
            if (kScaled) weights = scale_weights(weights, scale[t]);
            if (kPairs<kRead>)
                store_bf16(each.weight_pairs + t * 16, weights); // 0 for masked positions
            else
                store(each.weight + t * 16, weights);
        };
        const float shrink = headstart::HEADSTART_PATH::softmax_chunk(each.weight, tiles, task.softcap, each, put);
        if (shrink != 1.0f)
            for (int64_t d = 0; d < task.layout.padded_value(); d += 16)
                store(each.sum + d, load(each.sum + d) * splat(shrink));
    }

    // sum += weight * value over positions begin .. end - 1 of the chunk, for kCount queries, columns d and on.
    template <int kCount, int kWidth> void add_strips(Query* query, int64_t d, int64_t begin, int64_t end) {
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
        if (kPairs<kRead>) { // unwritten slots may hold any bits
            if (begin % 2) add_pair(begin - 1, splat_int((int32_t)0xffff0000));
            for (int64_t p = (begin + 1) / 2 * 2; p + 2 <= end; p += 2) add_pair(p, splat_int(-1));
            if (end % 2 && end > begin) add_pair(end - 1, splat_int(0xffff));
        }
        auto add = [&](int64_t p, int from, int to) __attribute__((always_inline)) { // positions from .. to - 1 of the pair
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

    template <int kCount> NOINLINE void add_values(Query* query, int64_t begin, int64_t end) {
        const int64_t dim = task.layout.padded_value();
        int64_t d = 0;
        constexpr int kWidth = kStrips<kCount>;
        for (; d + kWidth * 16 <= dim; d += kWidth * 16) add_strips<kCount, kWidth>(query, d, begin, end);
        for (; d < dim; d += 16) add_strips<kCount, 1>(query, d, begin, end);
    }

    void run() {
        const int count = (int)task.num_queries;
        Extent extent;
        for (int i = 0; i < count; ++i) {
            Query& each = query[i];
            static_cast<QueryState&>(each) = query_state_of(task, task.first_query + i);
            each.whole.started = false;
            extent.add(each);
            const int64_t dim = task.layout.head_dim;
            for (int64_t d = 0; kPairs<kRead> && d < dim && dim <= kMaxKeys; d += 16)
                store_bf16(each.pairs + d, load_some(each.values + d, dim - d));
            std::memset(each.sum, 0, task.layout.padded_value() * 4);
        }
        extent.cut(task.split);
        next_tiles = find_tiles(task, extent.from, extent.end_position, next);
        for (int64_t start = extent.from; start < extent.end_position; start += kChunk) {
            tiles = next_tiles;
            chunk_start = start;
            std::memcpy(tile, next, sizeof tile);
            next_tiles = find_tiles(task, start + kChunk, extent.end_position, next);
            for (int t = 0; t < tiles && kScaled; ++t) scale[t] = scales_of(task.layout, tile[t]);
            if (kWidened) widen();
            for (int i = 0; i < count; i += kGroup) step_group(query + i, count - i, start);
            if ((start + kChunk) % kSplit != 0 && start + kChunk < extent.end_position) continue;
            for (int i = 0; i < count; ++i)
                end_split(task, task.first_query + i, start / kSplit, query[i], query[i].sum, query[i].whole);
        }
        for (int i = 0; i < count && task.split < 0; ++i)
            finish(task, task.first_query + i, query[i].whole);
    }

    // Adds positions begin .. end - 1 for each query separately.
    template <int kQueries> NOINLINE void add_separately(Query* query, int64_t begin, int64_t end) {
        for (int i = 0; i < kQueries; ++i) {
            const int64_t from = query[i].begin > begin ? query[i].begin : begin;
            const int64_t to = query[i].end < end ? query[i].end : end;
            if (from < to) add_values<1>(query + i, from, to);
        }
    }

    // One chunk: positions visible to all queries are added together, others query by query, always in ascending order.
    template <int kQueries> void step(Query* query, int64_t start) {
        int64_t begin = 0, end = kChunk, first = kChunk, last = 0; // visible to all queries; to any
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
        score_some<kQueries, kTilesTogether<kQueries>>(query, t);
        if (kTilesTogether<kQueries> > 1) score_some<kQueries, 1>(query, t);
        for (int i = 0; i < kQueries; ++i)
            if (query[i].end > query[i].begin) softmax_chunk(query[i]);
        if (kPairs<kRead>) { // a pair is one operation unless the query sees only one of its positions
            begin = (begin + 1) / 2 * 2;
            end = end / 2 * 2;
        }
        if (end <= begin) return add_separately<kQueries>(query, first, last);
        if (first < begin) add_separately<kQueries>(query, first, begin);
        add_values<kQueries>(query, begin, end);
        if (end < last) add_separately<kQueries>(query, end, last);
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

// Widens codes to pairs of bfloat16 where the path multiplies these.
template <Store kStore> void attend_scaled(const AttendTask& task) {
    if constexpr (kPairs<Store::BF16>)
        if (task.layout.head_dim <= kMaxKeys) return Attend<kStore, true>(task).run();
    Attend<kStore>(task).run();
}

} // namespace

void attend(const AttendTask& task) {
    switch (task.layout.store) {
    case Store::F32: return Attend<Store::F32>(task).run();
    case Store::BF16: return Attend<Store::BF16>(task).run();
    case Store::I8: return attend_scaled<Store::I8>(task);
    case Store::F8: return attend_scaled<Store::F8>(task);
    }
}

void join(const AttendTask& task) { join_all(task); }

} // namespace headstart::HEADSTART_PATH
