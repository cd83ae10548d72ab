// Attention over bfloat16 keys and values in tiles (AMX): up to 16 queries of a kv head cost what one does. Queries and
// the weights of a chunk are rounded to bfloat16. A row's bits depend on that row only: its sums go over chunks of 64
// absolute positions, and over the tiles of a chunk in order; weights of positions that it does not see are zeros.
#include <immintrin.h>

#include "amx.h"
#include "attention.h"

namespace headstart::HEADSTART_PATH {
namespace {

constexpr int64_t kStep = 32; // dimensions of a tile of queries or keys

// Tiles 0 to 3: scores of the chunk's tiles, then sums of 64 dimensions; 4: queries; 5: weights; 6: keys; 7: values.
void configure(int queries) {
    TileConfig config;
    for (int i = 0; i < 6; ++i) config.set(i, queries, 64);
    config.set(5, queries, 32);
    config.set(6, 16, 64);
    config.set(7, 8, 64);
    _tile_loadconfig(&config);
}

bool finite(const uint16_t* pairs, int64_t count) { // of one place in `count` pairs
    bool all = true;
    for (int64_t d = 0; d < count; ++d) all = all && (pairs[d * 2] & 0x7f80) != 0x7f80;
    return all;
}

struct Attend {
    explicit Attend(const AttendTask& work) : task(work) {}
    const AttendTask& task;
    int count = 0;
    int64_t first_query = 0;
    Sight sight[kTileQueries];
    int64_t begin[kTileQueries], end[kTileQueries]; // what each sees of this chunk
    const uint8_t *tile[kTiles], *next[kTiles];
    int tiles = 0, next_tiles = 0;
    alignas(64) uint16_t query[kTileQueries][kMaxValueDim], weight[kTileQueries][kChunk];
    alignas(64) float score[kTileQueries][kChunk], sum[kTileQueries * kMaxValueDim]; // sum: [count][padded_value]
    Whole whole[kTileQueries];
    alignas(64) uint16_t edge[2][16 * kMaxValueDim]; // values of tiles that not all of the chunk's positions may touch

    int64_t wide() const { return task.layout.padded_value(); }
    float* sums(int i) { return sum + i * wide(); }

    // False: these queries must go one by one.
    bool run(int64_t from_query, int num_queries) {
        first_query = from_query;
        count = num_queries;
        Extent extent;
        for (int i = 0; i < count; ++i) {
            whole[i].begun = false;
            sight[i] = sight_of(task, first_query + i);
            for (int64_t d = 0; d < task.layout.head_dim; d += 16)
                store_bf16(query[i] + d, load(sight[i].values + d));
            for (int64_t d = 0; d < wide(); d += 16) store(sums(i) + d, splat(0.0f));
            extent.add(sight[i]);
        }
        configure(count);
        extent.cut(task.stretch);
        next_tiles = locate(task, extent.from, extent.until, next);
        bool done = true;
        for (int64_t start = extent.from; start < extent.until && done; start += kChunk) {
            tiles = next_tiles;
            std::memcpy(tile, next, sizeof tile);
            next_tiles = locate(task, start + kChunk, extent.until, next);
            done = step(start);
            if (!done || ((start + kChunk) % kStretch != 0 && start + kChunk < extent.until)) continue;
            for (int i = 0; i < count; ++i) close(task, first_query + i, start / kStretch, sight[i], sums(i), whole[i]);
        }
        _tile_release();
        for (int i = 0; done && task.stretch < 0 && i < count; ++i)
            finish(task, first_query + i, whole[i]);
        return done;
    }

    bool step(int64_t start) {
        int64_t common = 0, common_end = kChunk, first = kChunk, last = 0; // what all see, and any
        for (int i = 0; i < count; ++i) {
            begin[i] = within_chunk(sight[i].first - start);
            end[i] = within_chunk(sight[i].limit - start);
            common = begin[i] > common ? begin[i] : common;
            common_end = end[i] < common_end ? end[i] : common_end;
            first = begin[i] < first ? begin[i] : first;
            last = end[i] > last ? end[i] : last;
        }
        if (last <= first) return true;
        if (!shareable(first, common < common_end ? common : last) || !shareable(common < common_end ? common_end : last, last))
            return false;
        scores();
        for (int i = 0; i < count; ++i) soften_row(i);
        gather(first, last);
        return true;
    }

    // Whether values that only some queries see are finite: 0 x infinity is no 0.
    bool shareable(int64_t from, int64_t to) const {
        if (count == 1) return true;
        for (int64_t p = from; p < to; ++p) {
            const auto* values = reinterpret_cast<const uint16_t*>(tile[p / 16] + task.layout.values_at());
            if (!finite(values + task.layout.value_at(p % 16, 0), task.layout.value_dim)) return false;
        }
        return true;
    }

    void scores() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < task.layout.head_dim; d += kStep) {
            const int64_t at = d * 32; // 16 pairs of 64 bytes for each step
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

    void soften_row(int i) {
        Sight& each = sight[i];
        if (end[i] <= begin[i]) {
            std::memset(weight[i], 0, sizeof weight[i]);
            return;
        }
        for (int t = 0; t < tiles; ++t) {
            float* at = score[i] + t * 16;
            store(at, hide(load(at) * splat(task.scale), t, begin[i], end[i]));
        }
        const auto put = [&](int t, f32 weights) __attribute__((always_inline)) { store_bf16(weight[i] + t * 16, weights); };
        const float shrink = soften(score[i], tiles, task.softcap, each, put);
        if (shrink != 1.0f)
            for (int64_t d = 0; d < wide(); d += 16) store(sums(i) + d, load(sums(i) + d) * splat(shrink));
    }

    // The values of a tile; of one with positions outside first .. last - 1 a copy with zeros there, for anything may
    // stand in those.
    const uint8_t* values_of(int t, int64_t first, int64_t last) {
        const uint8_t* values = tile[t] + task.layout.values_at();
        if (first <= t * 16 && t * 16 + 16 <= last) return values;
        uint16_t* to = edge[first > t * 16 ? 0 : 1];
        std::memcpy(to, values, 16 * wide() * 2);
        for (int64_t p = 0; p < 16; ++p)
            if (t * 16 + p < first || t * 16 + p >= last)
                for (int64_t d = 0; d < wide(); ++d) to[task.layout.value_at(p, d)] = 0;
        return reinterpret_cast<const uint8_t*>(to);
    }

    void gather(int64_t first, int64_t last) {
        const int64_t stride = wide() * 4; // of sums, and of pairs of values
        const int from = (int)(first / 16), to = (int)((last + 15) / 16);
        const uint8_t* values[kTiles];
        for (int t = from; t < to; ++t) values[t] = values_of(t, first, last);
        fetch_next(task.layout.values_at(), task.layout.tile_bytes());
        int64_t d = 0;
        for (; d + 64 <= wide(); d += 64) {
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
        for (; d < wide(); d += 16) {
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
        for (int t = 0; t < next_tiles; ++t)
            for (int64_t at = from; at < to; at += 64) prefetch(next[t] + at);
    }
};

} // namespace

void attend(const AttendTask& task) {
    const KVLayout& layout = task.layout;
    const bool tiled = layout.store == Store::BF16 && layout.head_dim % kStep == 0 && layout.head_dim <= kMaxValueDim;
    const int64_t most = tiled ? (int64_t)kTileQueries : kMostQueries, end = task.first_query + task.num_queries;
    for (int64_t first = task.first_query; first < end; first += most) {
        const int queries = (int)(end - first < most ? end - first : most);
        if (tiled) {
            Attend attention(task);
            if (attention.run(first, queries)) continue;
            for (int i = 0; i < queries; ++i) attention.run(first + i, 1);
            continue;
        }
        AttendTask part = task;
        part.first_query = first;
        part.num_queries = queries;
        avx512bf16::kernels().attend(part);
    }
}

} // namespace headstart::HEADSTART_PATH
