#include "pool.h"

#include "bindings.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif
#include <algorithm>
#include <chrono>

namespace headstart {
namespace {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

using Clock = std::chrono::steady_clock;

constexpr int kSpinsBeforeYield = 4000;
constexpr auto kSpinBeforeSleep = std::chrono::microseconds(300); // spans the host's work inside one step
constexpr int64_t kLateAtLeast = 1000000;                         // nanoseconds: less is no lost core

// Spins, then yields, until `done`; returns the nanoseconds after it began to yield.
template <class Done> int64_t wait_until(Done&& done) {
    for (int spins = 0; spins < kSpinsBeforeYield; ++spins) {
        if (done()) return 0;
        relax();
    }
    const auto start = Clock::now();
    while (!done()) std::this_thread::yield();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

} // namespace

void Barrier::wait(int count) {
    if (count == 1) return;
    const uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
        arrived_.store(0, std::memory_order_relaxed);
        round_.store(round + 1, std::memory_order_release);
        return;
    }
    const int64_t late = wait_until([&] { return round_.load(std::memory_order_acquire) != round; });
    if (late) late_.fetch_add(late, std::memory_order_relaxed);
}

ThreadPool::Turn::Turn(ThreadPool& pool) : pool_(pool) {
    std::unique_lock lock(pool.turns_);
    const uint64_t mine = pool.next_turn_++;
    pool.turn_over_.wait(lock, [&] { return pool.turn_ == mine; });
}

ThreadPool::Turn::~Turn() {
    {
        std::lock_guard lock(pool_.turns_);
        ++pool_.turn_;
    }
    pool_.turn_over_.notify_all();
}

void ThreadPool::Turn::settle(int64_t nanoseconds) {
    const int64_t late = pool_.barrier_.take_late();
    int &solo = pool_.solo_, &next = pool_.next_solo_;
    if (solo > 0) {
        --solo;
    } else if (late > kLateAtLeast && late > nanoseconds / 2) {
        solo = next;
        next = std::min(2 * next, kMostSolo);
    } else {
        next = std::max(next / 2, kFewestSolo);
    }
}

ThreadPool::ThreadPool(int threads) : size_(threads < 1 ? 1 : threads) {
    try {
        for (int thread = 1; thread < size_; ++thread) workers_.emplace_back([this, thread] { serve(thread); });
    } catch (...) { // the system gives no more; those that run would end the process
        end();
        throw;
    }
}

ThreadPool::~ThreadPool() { end(); }

void ThreadPool::end() {
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
        ticket_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void ThreadPool::run_raw(Raw work, void* context) {
    if (active() == 1) {
        work(context, 0);
        return;
    }
    work_ = work;
    context_ = context;
    running_.store(size_ - 1, std::memory_order_relaxed);
    bool asleep;
    {
        std::lock_guard lock(mutex_);
        ticket_.fetch_add(1, std::memory_order_release);
        asleep = sleeping_ > 0;
    }
    if (asleep) wake_.notify_all();
    work(context, 0);
    wait_until([&] { return running_.load(std::memory_order_acquire) == 0; });
}

void ThreadPool::serve(int thread) {
    uint32_t seen = 0;
    for (;;) {
        auto limit = Clock::now() + kSpinBeforeSleep;
        for (int spins = 1; ticket_.load(std::memory_order_acquire) == seen; ++spins) {
            relax();
            if (spins % 64 == 0 && Clock::now() > limit) {
                std::unique_lock lock(mutex_);
                ++sleeping_;
                wake_.wait(lock, [&] { return ticket_.load(std::memory_order_acquire) != seen; });
                --sleeping_;
            }
        }
        ++seen; // run() waits for everybody, so tickets cannot be missed
        if (stop_) return;
        work_(context_, thread);
        running_.fetch_sub(1, std::memory_order_acq_rel);
    }
}

void bind_pool(nanobind::module_& m) {
    nanobind::class_<ThreadPool>(m, "ThreadPool")
        .def(nanobind::init<int>(), nanobind::arg("threads"))
        .def_prop_ro("size", &ThreadPool::size);
}

} // namespace headstart
