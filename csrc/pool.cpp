#include "pool.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "system.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif
#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace headstart {
namespace {

inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

using Clock = std::chrono::steady_clock;

constexpr int kSpinsBeforeYield = 4000;
// A worker without work spins, then yields its core to other threads, then sleeps. The second limit is longer than the
// drafts and the host's work between two passes of a running generation, so that only idle engines pay for a wake-up.
constexpr auto kSpinBeforeYield = std::chrono::microseconds(300), kSpinBeforeSleep = std::chrono::microseconds(5000);

// Spins, then yields, until done(); returns the nanoseconds since the first yield.
template <class Done> int64_t wait_until(Done&& done) {
    for (int spins = 0; spins < kSpinsBeforeYield; ++spins) {
        if (done()) return 0;
        cpu_relax();
    }
    const auto start = Clock::now();
    while (!done()) std::this_thread::yield();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

thread_local int node_of_thread = 0;

std::vector<Group> checked(int threads, std::vector<Group> groups) {
    if (groups.empty()) return {{threads, 0, {}}};
    int64_t sum = 0;
    for (const Group& each : groups) {
        if (each.threads < 1 || each.node < 0)
            throw std::invalid_argument("ThreadPool: a group needs at least one thread and a node of 0 or above");
        sum += each.threads;
    }
    if (sum != threads) throw std::invalid_argument("ThreadPool: the groups' threads do not add up to the pool's threads");
    return groups;
}

int count_nodes(const std::vector<Group>& groups) {
    std::vector<bool> has_threads(groups.size(), false);
    int count = 0;
    for (const Group& each : groups) count = std::max(count, each.node + 1);
    for (const Group& each : groups)
        if (count <= (int)groups.size()) has_threads[each.node] = true;
    for (int node = 0; node < count; ++node)
        if (count > (int)groups.size() || !has_threads[node])
            throw std::invalid_argument("ThreadPool: a NUMA node below the highest one has no threads");
    return count;
}

} // namespace

Barrier::Barrier(const std::vector<Group>& groups)
    : num_groups_((int)groups.size()), groups_(std::make_unique<Gate[]>(groups.size())) {
    for (int i = 0; i < num_groups_; ++i) groups_[i].count = groups[i].threads;
    all_.count = num_groups_;
}

bool Barrier::Gate::last(uint32_t& seen) {
    seen = round.load(std::memory_order_acquire);
    return arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == count;
}

void Barrier::Gate::open(uint32_t seen) {
    arrived.store(0, std::memory_order_relaxed);
    round.store(seen + 1, std::memory_order_release);
}

void Barrier::await(const Gate& gate, uint32_t seen) {
    const int64_t late = wait_until([&] { return gate.round.load(std::memory_order_acquire) != seen; });
    if (late) late_.fetch_add(late, std::memory_order_relaxed);
}

void Barrier::wait(int group) {
    Gate& own = groups_[group];
    uint32_t seen, seen_by_all;
    if (!own.last(seen)) return await(own, seen);
    if (num_groups_ > 1) {
        if (all_.last(seen_by_all))
            all_.open(seen_by_all);
        else
            await(all_, seen_by_all);
    }
    own.open(seen);
}

void SoloFallback::record_run(int64_t nanoseconds, int64_t late) {
    if (solo_ > 0) {
        --solo_;
        return;
    }
    waited_ += late - waited_ / kRunsRemembered;
    spent_ += nanoseconds - spent_ / kRunsRemembered;
    if (waited_ > spent_ / 2 * (2 * threads_ - 3)) { // one thread would have been faster
        solo_ = next_solo_;
        next_solo_ = std::min(2 * next_solo_, kMaxSolo);
        waited_ = 0, spent_ = kTrialCredit, together_ = 0;
    } else if (++together_ % kRunsRemembered == 0) {
        next_solo_ = std::max(next_solo_ / 2, kMinSolo);
    }
}

ThreadPool::Turn::Turn(ThreadPool& pool) : pool_(pool) {
    {
        std::unique_lock lock(pool.turns_);
        const uint64_t mine = pool.next_turn_++;
        pool.turn_over_.wait(lock, [&] { return pool.turn_ == mine; });
    }
    if (!pool.groups_[0].cpus.empty()) {
        before_ = cpu_affinity();
        bind_to_cpus(pool.groups_[0].cpus);
    }
    node_before_ = std::exchange(node_of_thread, pool.groups_[0].node);
}

ThreadPool::Turn::~Turn() {
    node_of_thread = node_before_;
    bind_to_cpus(before_);
    {
        std::lock_guard lock(pool_.turns_);
        ++pool_.turn_;
    }
    pool_.turn_over_.notify_all();
}

int ThreadPool::Turn::steal_from(int thread, int i) const {
    int begin = 0, group = 0;
    while (begin + pool_.groups_[group].threads <= thread) begin += pool_.groups_[group++].threads;
    const int own = pool_.groups_[group].threads;
    return i < own ? begin + (thread - begin + i) % own : (begin + i) % pool_.size_;
}

int ThreadPool::current_node() { return node_of_thread; }

ThreadPool::ThreadPool(int threads, std::vector<Group> groups)
    : size_(threads < 1 ? 1 : threads), groups_(checked(size_, std::move(groups))), num_nodes_(count_nodes(groups_)),
      barrier_(groups_), solo_fallback_(size_) {
    for (size_t group = 0; group < groups_.size(); ++group)
        group_of_.insert(group_of_.end(), groups_[group].threads, (int)group);
    try {
        for (int thread = 1; thread < size_; ++thread) workers_.emplace_back([this, thread] { worker_loop(thread); });
    } catch (...) { // no more threads: join those that started, or their destructors terminate
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

void ThreadPool::worker_loop(int thread) {
    const Group& group = groups_[group_of_[thread]];
    bind_to_cpus(group.cpus);
    node_of_thread = group.node;
    uint32_t seen = 0;
    for (;;) {
        const auto start = Clock::now();
        for (int spins = 1; ticket_.load(std::memory_order_acquire) == seen; ++spins) {
            cpu_relax();
            if (spins % 64 != 0) continue;
            const auto waited = Clock::now() - start;
            if (waited > kSpinBeforeSleep) {
                std::unique_lock lock(mutex_);
                ++sleeping_;
                wake_.wait(lock, [&] { return ticket_.load(std::memory_order_acquire) != seen; });
                --sleeping_;
            } else if (waited > kSpinBeforeYield) {
                std::this_thread::yield();
            }
        }
        ++seen; // run() waits for all threads, so no ticket is missed
        if (stop_) return;
        work_(context_, thread);
        running_.fetch_sub(1, std::memory_order_acq_rel);
    }
}

void bind_pool(nanobind::module_& m) {
    using Given = std::vector<std::tuple<int, int, std::vector<int>>>;
    nanobind::class_<ThreadPool>(m, "ThreadPool")
        .def("__init__",
             [](ThreadPool* self, int threads, const Given& given) {
                 std::vector<Group> groups;
                 for (const auto& [count, node, cpus] : given) groups.push_back({count, node, cpus});
                 new (self) ThreadPool(threads, std::move(groups));
             },
             nanobind::arg("threads"), nanobind::arg("groups") = Given{})
        .def_prop_ro("size", &ThreadPool::size);
    nanobind::class_<SoloFallback>(m, "SoloFallback")
        .def(nanobind::init<int>(), nanobind::arg("threads"))
        .def_prop_ro("is_solo", &SoloFallback::is_solo)
        .def("record_run", &SoloFallback::record_run, nanobind::arg("nanoseconds"), nanobind::arg("late"));
}

} // namespace headstart
