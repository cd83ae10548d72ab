// Measures memory read bandwidth, the bound of a pass over a model's weights, and the cost of a barrier.
#include <nanobind/ndarray.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "bindings.h"
#include "pool.h"

namespace headstart {
namespace {

namespace nb = nanobind;
using Clock = std::chrono::steady_clock;
using Words = uint64_t __attribute__((vector_size(16))); // every instruction set has this width
using Buffer = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kLine = 64;

// Sum over [data, data + size), without the last incomplete line. One ascending stream: several are no faster, and conflict
// in the caches if their distance is a power of two.
uint64_t read(const uint8_t* data, int64_t size) {
    Words sums[kLine / sizeof(Words)] = {};
    for (int64_t at = 0; at + kLine <= size; at += kLine) {
        Words words[kLine / sizeof(Words)];
        std::memcpy(words, data + at, kLine);
        for (size_t i = 0; i < kLine / sizeof(Words); ++i) sums[i] += words[i];
    }
    const Words sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    return sum[0] + sum[1];
}

// Seconds of the fastest of `runs` reads of the buffer by all threads, each reading its own part.
double fastest_read(ThreadPool& pool, const Buffer& buffer, int runs) {
    if (runs < 1) throw std::invalid_argument("fastest_read: runs must be at least 1");
    const int64_t part = (int64_t)buffer.shape(0) / pool.size();
    std::vector<uint64_t> sums(pool.size());
    double best = std::numeric_limits<double>::infinity();
    nb::gil_scoped_release released;
    for (int run = 0; run < runs; ++run) {
        const auto begin = Clock::now();
        ThreadPool::Turn(pool).for_each(pool.size(),
                                        [&](int64_t i) { sums[i] += read(buffer.data() + i * part, part); });
        best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
    }
    volatile uint64_t wanted = sums[0]; // keeps the compiler from removing the reads
    (void)wanted;
    return best;
}

// Mean seconds of a barrier of all threads, over `count` barriers.
double barrier_seconds(ThreadPool& pool, int count) {
    if (count < 1) throw std::invalid_argument("barrier_seconds: count must be at least 1");
    nb::gil_scoped_release released;
    ThreadPool::Turn turn(pool);
    const auto begin = Clock::now();
    turn.run([&](int thread) {
        for (int i = 0; i < count; ++i) turn.barrier(thread);
    });
    return std::chrono::duration<double>(Clock::now() - begin).count() / count;
}

} // namespace

void bind_bandwidth(nb::module_& m) {
    m.def("fastest_read", &fastest_read, nb::arg("pool"), nb::arg("buffer"), nb::arg("runs"));
    m.def("barrier_seconds", &barrier_seconds, nb::arg("pool"), nb::arg("count"));
}

} // namespace headstart
