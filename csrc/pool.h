// Thread pool: all threads run one function together, spin briefly for the next one, then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace headstart {

// Threads that share a last-level cache or a NUMA node, and the CPUs they are bound to (none: not bound).
struct Group {
    int threads, node;
    std::vector<int> cpus;
};

// Spinning barrier in two levels: threads of a group, then the last thread of each group. So a cache line moves between
// caches only once per group. Yields when a thread is late (more threads than free cores), and counts that time.
class Barrier {
  public:
    explicit Barrier(const std::vector<Group>& groups);
    void wait(int group);
    int64_t take_late() { return late_.exchange(0, std::memory_order_relaxed); } // nanoseconds, summed over threads; resets it

  private:
    struct Gate {
        int count = 0;
        alignas(64) std::atomic<int> arrived{0};
        alignas(64) std::atomic<uint32_t> round{0};
        bool last(uint32_t& seen); // arrives; true for the last thread. seen: the round to wait for
        void open(uint32_t seen);
    };
    void await(const Gate& gate, uint32_t seen);

    const int num_groups_;
    std::unique_ptr<Gate[]> groups_;
    Gate all_;
    alignas(64) std::atomic<int64_t> late_{0};
};

// Decides whether a pool runs on all threads or on one. A thread that has lost its core to another process delays all
// others at a barrier. If most of the recent parallel time was waiting, one thread runs alone for a while; then all try
// again, with exponential backoff. A few late runs among many do not switch.
class SoloFallback {
  public:
    explicit SoloFallback(int threads) : threads_(threads) {}
    bool is_solo() const { return solo_ > 0; } // whether the next run uses one thread
    void record_run(int64_t nanoseconds, int64_t late); // records a run, and the barrier wait summed over threads

  private:
    static constexpr int kMinSolo = 16, kMaxSolo = 1024, kRunsRemembered = 16;
    static constexpr int64_t kTrialCredit = 50000000; // nanoseconds without waiting credited to a new trial

    const int threads_;
    int solo_ = 0, next_solo_ = kMinSolo; // single-threaded runs left; their number the next time
    int together_ = 0;                       // parallel runs since the last switch
    int64_t waited_ = 0, spent_ = kTrialCredit;      // nanoseconds waited and run in parallel; exponentially decayed
};

class ThreadPool {
  public:
    class Turn;

    // The caller of run() is thread 0. groups, if given, contain all threads in order; threads are bound to the CPUs of
    // their group, the caller while it holds a Turn. Throws std::system_error.
    explicit ThreadPool(int threads, std::vector<Group> groups = {});
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return size_; }
    const std::vector<Group>& groups() const { return groups_; }
    int num_nodes() const { return num_nodes_; }
    int node_of(int thread) const { return groups_[group_of_[thread]].node; }
    static int current_node(); // NUMA node of the calling thread; 0 outside pools

  private:
    using Raw = void (*)(void*, int);
    int active() const { return solo_fallback_.is_solo() ? 1 : size_; }
    void run_raw(Raw work, void* context);
    void worker_loop(int thread);
    void end();

    const int size_;
    const std::vector<Group> groups_;
    const int num_nodes_;
    std::vector<int> group_of_; // [threads]
    Barrier barrier_;
    SoloFallback solo_fallback_;
    Raw work_ = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<uint32_t> ticket_{0};
    alignas(64) std::atomic<int> running_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    int sleeping_ = 0;
    std::vector<std::thread> workers_;

    std::mutex turns_;
    std::condition_variable turn_over_;
    uint64_t next_turn_ = 0, turn_ = 0; // next ticket, and the ticket being served
};

// Exclusive use of the pool, first come, first served (engines that share a model). Release the GIL before waiting.
class ThreadPool::Turn {
  public:
    explicit Turn(ThreadPool& pool);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    const ThreadPool& pool() const { return pool_; }
    int size() const { return pool_.size(); }
    int active() const { return pool_.active(); } // threads in the next run()
    void barrier(int thread) {
        if (active() > 1) pool_.barrier_.wait(pool_.group_of_[thread]);
    }
    // The i-th thread whose tasks `thread` takes: itself, then its group, then the others (work stealing).
    int steal_from(int thread, int i) const;

    // Records the duration of a run() with barriers.
    void record_run(int64_t nanoseconds) { pool_.solo_fallback_.record_run(nanoseconds, pool_.barrier_.take_late()); }

    // Calls work(thread) once on each of active() threads and waits for all. `work` must not throw.
    template <class Work> void run(Work&& work) {
        pool_.run_raw(
            [](void* context, int thread) { (*static_cast<std::remove_reference_t<Work>*>(context))(thread); }, &work);
    }

    // Calls work(index) for 0 <= index < count; threads take indices one by one.
    template <class Work> void for_each(int64_t count, Work&& work) {
        if (active() == 1 || count == 1) {
            for (int64_t i = 0; i < count; ++i) work(i);
            return;
        }
        std::atomic<int64_t> next{0};
        run([&](int) {
            for (int64_t i; (i = next.fetch_add(1)) < count;) work(i);
        });
    }

  private:
    ThreadPool& pool_;
    std::vector<int> before_; // the caller's CPU affinity, restored at the end
    int node_before_ = 0;
};

} // namespace headstart
