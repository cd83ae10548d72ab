// NUMA placement of weights and KV tiles: a page is allocated on the node of the thread that touches it first.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings.h"
#include "packing.h"
#include "program.h"
#include "system.h"

namespace headstart {
namespace {

constexpr int64_t kGrain = 2 << 20; // bytes per node when interleaving: a huge page

// Rank of each pool thread among the threads of its node.
struct Ranks {
    explicit Ranks(const ThreadPool& pool) : counts(pool.num_nodes(), 0) {
        for (int thread = 0; thread < pool.size(); ++thread) of.push_back(counts[pool.node_of(thread)]++);
    }
    std::vector<int64_t> of, counts;
};

// Calls work(thread) for each thread; the caller does all if the pool is single-threaded for now.
template <class Work> void for_all_threads(ThreadPool::Turn& turn, Work&& work) {
    turn.run([&](int first) {
        for (int thread = first; thread < turn.size(); thread += turn.active()) work(thread);
    });
}

void copy_range(const Matrix& from, uint8_t* to, int64_t begin, int64_t end) {
    end = std::min(end, from.num_bytes());
    if (begin < end) std::memcpy(to + begin, from.data + begin, (size_t)(end - begin));
}

// Copies each thread's share of the blocks, as Program::execute divides them.
void share(ThreadPool& pool, const Matrix& from, uint8_t* to) {
    const int64_t pairs = (from.num_blocks() + 1) / 2, bytes = 2 * from.block_bytes(), threads = pool.size();
    ThreadPool::Turn turn(pool);
    for_all_threads(turn, [&](int thread) {
        copy_range(from, to, pairs * thread / threads * bytes, pairs * (thread + 1) / threads * bytes);
    });
}

void interleave(ThreadPool& pool, const Matrix& from, uint8_t* to) {
    const Ranks ranks(pool);
    const int64_t nodes = pool.num_nodes(), before = (int64_t)(reinterpret_cast<uintptr_t>(to) % kGrain);
    ThreadPool::Turn turn(pool);
    for_all_threads(turn, [&](int thread) {
        const int64_t node = pool.node_of(thread), step = nodes * ranks.counts[node];
        for (int64_t grain = node + nodes * ranks.of[thread]; grain * kGrain < before + from.num_bytes(); grain += step)
            copy_range(from, to, std::max<int64_t>(grain * kGrain - before, 0), (grain + 1) * kGrain - before);
    });
}

void replicate(ThreadPool& pool, const Matrix& from, const std::vector<std::shared_ptr<Memory>>& to) {
    const Ranks ranks(pool);
    const int64_t blocks = from.num_blocks(), bytes = from.block_bytes();
    ThreadPool::Turn turn(pool);
    for_all_threads(turn, [&](int thread) {
        const int64_t node = pool.node_of(thread), count = ranks.counts[node], rank = ranks.of[thread];
        copy_range(from, to[node]->data(), blocks * rank / count * bytes, blocks * (rank + 1) / count * bytes);
    });
}

// Copies a matrix to new memory on the pool's nodes. how: "share", "interleave" or "replicate".
OwnedMatrix place(ThreadPool& pool, const Matrix& matrix, const std::string& how) {
    if (how != "share" && how != "interleave" && how != "replicate")
        throw std::invalid_argument("place: unknown placement " + how);
    std::vector<std::shared_ptr<Memory>> memories;
    for (int node = 0; node < (how == "replicate" ? pool.num_nodes() : 1); ++node)
        memories.push_back(std::make_shared<Memory>(matrix.num_bytes()));
    {
        nb::gil_scoped_release released;
        if (how == "share") share(pool, matrix, memories[0]->data());
        if (how == "interleave") interleave(pool, matrix, memories[0]->data());
        if (how == "replicate") replicate(pool, matrix, memories);
    }
    OwnedMatrix placed{matrix, {}, {}};
    for (const auto& memory : memories) {
        placed.copies.push_back(matrix);
        placed.copies.back().data = memory->data();
    }
    placed.data = memories[0]->data();
    auto* keep = new std::vector<std::shared_ptr<Memory>>(memories);
    nb::capsule owner(keep, [](void* p) noexcept { delete static_cast<std::vector<std::shared_ptr<Memory>>*>(p); });
    const size_t shape[1] = {(size_t)matrix.num_bytes()};
    placed.owner = nb::cast(nb::ndarray<nb::numpy, uint8_t>(memories[0]->data(), 1, shape, owner));
    return placed;
}

constexpr int64_t kPage = 4096;

// Touches each page by rewriting one byte.
void touch(uint8_t* data, int64_t size) {
    for (int64_t at = 0; at < size; at += kPage - (int64_t)(reinterpret_cast<uintptr_t>(data + at) % kPage)) {
        volatile uint8_t* byte = data + at;
        *byte = *byte;
    }
}

} // namespace

void place_keys(ThreadPool::Turn& turn, const std::vector<KVPool*>& pools, const Pass& pass) {
    std::vector<std::pair<KVPool*, int64_t>> fresh; // pools, and tile groups to place
    for (KVPool* pool : pools) {
        if (pool->placed.empty()) {
            pool->placed.resize((pool->num_slots + 15) / 16);
            // a huge page would hold tiles of heads on several nodes
            avoid_huge_pages(pool->memory.data(), pool->memory.size());
        }
        for (int64_t row = 0; row < pass.num_rows; ++row) {
            const int64_t tile = pass.slots[row] / 16;
            if (pool->placed[tile]) continue;
            pool->placed[tile] = true;
            fresh.push_back({pool, tile});
        }
    }
    if (fresh.empty()) return;
    const Ranks ranks(turn.pool());
    const int64_t nodes = turn.pool().num_nodes();
    for_all_threads(turn, [&](int thread) {
        const int64_t node = turn.pool().node_of(thread);
        int64_t number = 0;
        for (const auto& [pool, tile] : fresh)
            for (int64_t head = 0, heads = pool->layout.num_heads; head < heads; ++head) {
                const int64_t wanted = heads < nodes ? tile % nodes : head * nodes / heads;
                if (wanted == node && number++ % ranks.counts[node] == ranks.of[thread])
                    touch(pool->tile(tile * 16, head), pool->layout.tile_bytes());
            }
    });
}

void bind_placing(nb::module_& m) {
    m.def("place", place, nb::arg("pool"), nb::arg("matrix"), nb::arg("how"));
}

} // namespace headstart
