// Indexer scores over paged keys (Ops.select_positions of headstart/kernels/ops.py). Each lane is one position, so a score
// does not depend on the key's slot.
#include "attention.h"

namespace headstart::HEADSTART_PATH {
namespace {

#if HEADSTART_AVX512
constexpr int kHeads = 8; // heads summed together, to hide latency
#else
constexpr int kHeads = 4;
#endif

// total += weight * max(query . key, 0) for kCount heads from `first` on; without weights: query . key.
template <Store kStore, int kCount>
INLINE f32 add_heads(const IndexTask& task, const uint8_t* tile, int64_t first, f32 total) {
    constexpr int kEach = kWays<kStore>;
    const int64_t dim = task.layout.head_dim;
    const float* queries = task.queries + first * dim;
    f32 sum[kCount];
    for (f32& each : sum) each = splat(0.0f);
    for (int64_t d = 0; d < dim; d += kEach) {
        f32 key[kEach];
        load_items<kStore>(tile + d / kEach * kLine<kStore>, key);
        for (int way = 0; way < kEach && d + way < dim; ++way)
            for (int h = 0; h < kCount; ++h) sum[h] = fma(key[way], splat(queries[h * dim + d + way]), sum[h]);
    }
    const float* scales = reinterpret_cast<const float*>(tile + task.layout.scales_at());
    for (int h = 0; h < kCount; ++h) {
        f32 product = sum[h];
        if (is_scaled(kStore)) product = product * load(scales);
        if (!task.weights) return product;
        // NaN stays NaN (second operand of max)
        total = fma(max(splat(0.0f), product), splat(task.weights[first + h]), total);
    }
    return total;
}

template <Store kStore> void score(const IndexTask& task) {
    for (int64_t position = task.begin; position < task.end; position += 16) {
        const uint8_t* tile = task.tile_of(position);
        f32 total = splat(0.0f);
        int64_t h = 0;
        for (; h + kHeads <= task.num_heads; h += kHeads) total = add_heads<kStore, kHeads>(task, tile, h, total);
        for (; h < task.num_heads; ++h) total = add_heads<kStore, 1>(task, tile, h, total);
        const f32 never = splat(-INFINITY);
        store(task.scores + position - task.begin, select_less(never, total, total, never)); // NaN becomes -inf
    }
}

} // namespace

void index_scores(const IndexTask& task) {
    switch (task.layout.store) {
    case Store::F32: return score<Store::F32>(task);
    case Store::BF16: return score<Store::BF16>(task);
    case Store::I8: return score<Store::I8>(task);
    case Store::F8: return score<Store::F8>(task);
    }
}

} // namespace headstart::HEADSTART_PATH
