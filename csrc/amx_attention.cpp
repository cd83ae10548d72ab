// Attention with AMX tiles: 16 queries of a KV head cost as much as one. Keys and values are bfloat16, or codes of 8 bits
// that are converted to it. Queries and softmax weights are rounded to bfloat16. A row's bits depend on that row only: sums
// run over chunks of 64 absolute positions in order, and masked positions have weight 0.
#include <immintrin.h>

#include "amx.h"
#include "attention.h"

namespace headstart::HEADSTART_PATH {
namespace {

constexpr int64_t kStep = 32; // head dimensions per tile of queries or keys

// Tiles 0 to 3: scores of the chunk's four KV tiles, then sums of 64 value columns; 4: queries; 5: weights; 6: keys; 7:
// values.
void configure(int queries) {
    TileConfig config;
    for (int i = 0; i < 6; ++i) config.set(i, queries, 64);
    config.set(5, queries, 32);
    config.set(6, 16, 64);
    config.set(7, 8, 64);
    _tile_loadconfig(&config);
}

bool finite(const uint16_t* pairs, int64_t count) { // whether one member of each of `count` pairs is finite
    bool all = true;
    for (int64_t d = 0; d < count; ++d) all = all && (pairs[d * 2] & 0x7f80) != 0x7f80;
    return all;
}

template <Store kStore> struct Attend {
    static constexpr bool kScaled = is_scaled(kStore);

    explicit Attend(const AttendTask& work) : task(work), read(work.layout) { read.store = Store::BF16; }
    const AttendTask& task;
    KVLayout read; // of the tiles that products read
    int count = 0;
    int64_t first_query = 0;
    QueryState query_state[kTileQueries];
    int64_t begin[kTileQueries], end[kTileQueries]; // visible positions of this chunk
    const uint8_t *tile[kTiles], *next[kTiles];
    const float* scale[kTiles]; // kScaled: 16 key scales, then 16 value scales
    alignas(64) uint8_t wide[kScaled ? kTiles : 1][kScaled ? 64 * kMaxValueDim : 1];
    int tiles = 0, next_tiles = 0;
    alignas(64) uint16_t query[kTileQueries][kMaxValueDim], weight[kTileQueries][kChunk];
    alignas(64) float score[kTileQueries][kChunk], sum[kTileQueries * kMaxValueDim]; // sum: [count][padded_value]
    JoinedSplits whole[kTileQueries];
    alignas(64) uint16_t masked_values[2][16 * kMaxValueDim]; // copies of partly visible value tiles, masked with zeros

    int64_t value_width() const { return read.padded_value(); }
    float* sums(int i) { return sum + i * value_width(); }

    // Returns false if these queries must be processed one by one (can_share).
    bool run(int64_t from_query, int num_queries) {
        first_query = from_query;
        count = num_queries;
        Extent extent;
        for (int i = 0; i < count; ++i) {
            whole[i].started = false;
            query_state[i] = query_state_of(task, first_query + i);
            for (int64_t d = 0; d < task.layout.head_dim; d += 16)
                store_bf16(query[i] + d, load(query_state[i].values + d));
            for (int64_t d = 0; d < value_width(); d += 16) store(sums(i) + d, splat(0.0f));
            extent.add(query_state[i]);
        }
        configure(count);
        extent.cut(task.split);
        next_tiles = find_tiles(task, extent.from, extent.end_position, next);
        bool done = true;
        for (int64_t start = extent.from; start < extent.end_position && done; start += kChunk) {
            tiles = next_tiles;
            std::memcpy(tile, next, sizeof tile);
            next_tiles = find_tiles(task, start + kChunk, extent.end_position, next);
            if constexpr (kScaled) widen();
            done = step(start);
            if (!done || ((start + kChunk) % kSplit != 0 && start + kChunk < extent.end_position)) continue;
            for (int i = 0; i < count; ++i) end_split(task, first_query + i, start / kSplit, query_state[i], sums(i), whole[i]);
        }
        _tile_release();
        for (int i = 0; done && task.split < 0 && i < count; ++i)
            finish(task, first_query + i, whole[i]);
        return done;
    }

    // Converts the chunk's tiles, and prefetches the next ones.
    void widen() {
        for (int t = 0; t < tiles; ++t) {
            for (int64_t at = 0; at < task.layout.tile_bytes() && t < next_tiles; at += 64) prefetch(next[t] + at);
            scale[t] = scales_of(task.layout, tile[t]);
            widen_tile<kStore>(task.layout, tile[t], wide[t]);
            tile[t] = wide[t];
        }
    }

    bool step(int64_t start) {
        int64_t common = 0, common_end = kChunk, first = kChunk, last = 0; // visible to all queries; to any
        for (int i = 0; i < count; ++i) {
            begin[i] = within_chunk(query_state[i].first - start);
            end[i] = within_chunk(query_state[i].limit - start);
            common = begin[i] > common ? begin[i] : common;
            common_end = end[i] < common_end ? end[i] : common_end;
            first = begin[i] < first ? begin[i] : first;
            last = end[i] > last ? end[i] : last;
        }
        if (last <= first) return true;
        if (!can_share(first, common < common_end ? common : last) || !can_share(common < common_end ? common_end : last, last))
            return false;
        scores();
        for (int i = 0; i < count; ++i) softmax_row(i, start);
        add_values(first, last);
        return true;
    }

    // Whether values visible to only some queries are finite: weight 0 times infinity would be NaN.
    bool can_share(int64_t from, int64_t to) const {
        if (count == 1 || kScaled) return true; // codes are finite
        for (int64_t p = from; p < to; ++p) {
            const auto* values = reinterpret_cast<const uint16_t*>(tile[p / 16] + read.values_at());
            if (!finite(values + read.value_at(p % 16, 0), read.value_dim)) return false;
        }
        return true;
    }

    void scores() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < task.layout.head_dim; d += kStep) {
            const int64_t at = d * 32; // bytes: 16 pairs of 64 bytes per step
            fetch_next(at, at + 1024);
            _tile_loadd(4, query[0] + d, kMaxValueDim * 2);
            _tile_loadd(6, tile[0] + at, 64);
            _tile_dpbf16ps(0, 4, 6);
            if (tiles > 1) {
                _tile_loadd(6, tile[1] + at, 64);
                _tile_dpbf16ps(1, 4, 6);
            }
            if (tiles > 2) {
                _tile_loadd(6, tile[2] + at, 64);
                _tile_dpbf16ps(2, 4, 6);
            }
            if (tiles > 3) {
                _tile_loadd(6, tile[3] + at, 64);
                _tile_dpbf16ps(3, 4, 6);
            }
        }
        _tile_stored(0, score[0], kChunk * 4);
        _tile_stored(1, score[0] + 16, kChunk * 4);
        _tile_stored(2, score[0] + 32, kChunk * 4);
        _tile_stored(3, score[0] + 48, kChunk * 4);
    }

    void softmax_row(int i, int64_t start) {
        QueryState& each = query_state[i];
        if (end[i] <= begin[i]) {
            std::memset(weight[i], 0, sizeof weight[i]);
            return;
        }
        for (int t = 0; t < tiles; ++t) {
            float* at = score[i] + t * 16;
            f32 value = load(at) * splat(task.scale);
            if (kScaled) value = value * load(scale[t]);
            if (task.bias) value = add_bias(value, each, task.extent, start + t * 16);
            store(at, mask_scores(value, t, begin[i], end[i]));
        }
        const auto put = [&](int t, f32 weights) __attribute__((always_inline)) {
            store_bf16(weight[i] + t * 16, kScaled ? scale_weights(weights, scale[t]) : weights);
        };
        const float shrink = softmax_chunk(score[i], tiles, task.softcap, each, put);
        if (shrink != 1.0f)
            for (int64_t d = 0; d < value_width(); d += 16) store(sums(i) + d, load(sums(i) + d) * splat(shrink));
    }

    // The values of tile t. Positions outside first .. last - 1 are zeros (in a copy), because unwritten slots may hold any
    // bits.
    const uint8_t* values_of(int t, int64_t first, int64_t last) {
        const uint8_t* values = tile[t] + read.values_at();
        if (kScaled) return values; // finite, and their weights are 0
        if (first <= t * 16 && t * 16 + 16 <= last) return values;
        uint16_t* to = masked_values[first > t * 16 ? 0 : 1];
        std::memcpy(to, values, 16 * value_width() * 2);
        for (int64_t p = 0; p < 16; ++p)
            if (t * 16 + p < first || t * 16 + p >= last)
                for (int64_t d = 0; d < value_width(); ++d) to[read.value_at(p, d)] = 0;
        return reinterpret_cast<const uint8_t*>(to);
    }

    void add_values(int64_t first, int64_t last) {
        const int64_t stride = value_width() * 4; // bytes between rows of sums, and of value pairs
        const int from = (int)(first / 16), to = (int)((last + 15) / 16);
        const uint8_t* values[kTiles];
        for (int t = from; t < to; ++t) values[t] = values_of(t, first, last);
        fetch_next(read.values_at(), read.tile_bytes());
        int64_t d = 0;
        for (; d + 64 <= value_width(); d += 64) {
            _tile_loadd(0, sum + d, stride);
            _tile_loadd(1, sum + d + 16, stride);
            _tile_loadd(2, sum + d + 32, stride);
            _tile_loadd(3, sum + d + 48, stride);
            for (int t = from; t < to; ++t) {
                const uint8_t* at = values[t] + d * 4;
                _tile_loadd(5, weight[0] + t * 16, kChunk * 2);
                _tile_loadd(7, at, stride);
                _tile_dpbf16ps(0, 5, 7);
                _tile_loadd(7, at + 64, stride);
                _tile_dpbf16ps(1, 5, 7);
                _tile_loadd(7, at + 128, stride);
                _tile_dpbf16ps(2, 5, 7);
                _tile_loadd(7, at + 192, stride);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, sum + d, stride);
            _tile_stored(1, sum + d + 16, stride);
            _tile_stored(2, sum + d + 32, stride);
            _tile_stored(3, sum + d + 48, stride);
        }
        for (; d < value_width(); d += 16) {
            _tile_loadd(0, sum + d, stride);
            for (int t = from; t < to; ++t) {
                _tile_loadd(5, weight[0] + t * 16, kChunk * 2);
                _tile_loadd(7, values[t] + d * 4, stride);
                _tile_dpbf16ps(0, 5, 7);
            }
            _tile_stored(0, sum + d, stride);
        }
    }

    void fetch_next(int64_t from, int64_t to) const {
        for (int t = 0; t < next_tiles && !kScaled; ++t) // widen prefetches codes
            for (int64_t at = from; at < to; at += 64) prefetch(next[t] + at);
    }
};

template <Store kStore> void attend_tiled(const AttendTask& task) {
    Attend<kStore> attention(task);
    if (attention.run(task.first_query, (int)task.num_queries)) return;
    for (int i = 0; i < task.num_queries; ++i) attention.run(task.first_query + i, 1);
}

} // namespace

void attend(const AttendTask& task) {
    const KVLayout& layout = task.layout;
    if (layout.store == Store::F32 || layout.head_dim % kStep != 0 || layout.head_dim > kMaxValueDim)
        return avx512bf16::kernels().attend(task);
    switch (layout.store) {
    case Store::I8: return attend_tiled<Store::I8>(task);
    case Store::F8: return attend_tiled<Store::F8>(task);
    default: return attend_tiled<Store::BF16>(task);
    }
}

} // namespace headstart::HEADSTART_PATH
