// The process's own threads: they run one function together, spin a moment for the next one, then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace headstart {

// Threads beside each other: they share a cache, or a node of memory, and may run on these CPUs (none: on any).
struct Group {
    int threads, node;
    std::vector<int> cpus;
};

// A spinning barrier; it yields when a thread is late (more threads than free cores), and counts that time. Threads meet
// in their group, then the groups' last ones: lines of memory go to few cores each, and between caches only once a group.
class Barrier {
  public:
    explicit Barrier(const std::vector<Group>& groups);
    void wait(int group);
    int64_t take_late() { return late_.exchange(0, std::memory_order_relaxed); } // nanoseconds of all threads

  private:
    struct Gate {
        int count = 0;
        alignas(64) std::atomic<int> arrived{0};
        alignas(64) std::atomic<uint32_t> round{0};
        bool last(uint32_t& seen); // arrives; `seen` is the round that ends with the last one
        void open(uint32_t seen);
    };
    void await(const Gate& gate, uint32_t seen);

    const int num_groups_;
    std::unique_ptr<Gate[]> groups_;
    Gate all_;
    alignas(64) std::atomic<int64_t> late_{0};
};

// Whether a pool's threads work together or one of them alone. A thread that has lost its core to somebody else keeps all
// others at a barrier: where most of the last runs together was waiting, one works alone for a while, then all try again,
// ever more seldom as long as that goes on. A late run among many (a server's event loop, a client) is cheaper than being
// alone behind it.
class Company {
  public:
    explicit Company(int threads) : threads_(threads) {}
    bool alone() const { return solo_ > 0; } // in the next run
    void ran(int64_t nanoseconds, int64_t late); // one more run, and what all threads together waited in it

  private:
    static constexpr int kFewestSolo = 16, kMostSolo = 1024, kRunsRemembered = 16;
    static constexpr int64_t kGrace = 50000000; // nanoseconds without a loss that a new trial begins with

    const int threads_;
    int solo_ = 0, next_solo_ = kFewestSolo; // runs left alone, and how many the next time
    int together_ = 0;                       // runs since then
    int64_t lost_ = 0, spent_ = kGrace;      // of the last runs together, nanoseconds waited, and all; older ones fade
};

class ThreadPool {
  public:
    class Turn;

    // The caller of run() is one of the threads. Groups, where given, have them all, in order; threads keep to the CPUs
    // of theirs, the caller while it has its turn. Throws std::system_error.
    explicit ThreadPool(int threads, std::vector<Group> groups = {});
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return size_; }
    const std::vector<Group>& groups() const { return groups_; }
    int num_nodes() const { return num_nodes_; }
    int node_of(int thread) const { return groups_[group_of_[thread]].node; }
    static int own_node(); // of the thread that asks: 0 for who is none of a pool's

  private:
    using Raw = void (*)(void*, int);
    int active() const { return company_.alone() ? 1 : size_; }
    void run_raw(Raw work, void* context);
    void serve(int thread);
    void end();

    const int size_;
    const std::vector<Group> groups_;
    const int num_nodes_;
    std::vector<int> group_of_; // each thread
    Barrier barrier_;
    Company company_;
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
    uint64_t next_turn_ = 0, turn_ = 0; // the next to be given out, and the one that goes on
};

// Threads of the caller's (engines on one model) use the pool one after the other, in order of arrival. Who waits must
// not hold Python's lock.
class ThreadPool::Turn {
  public:
    explicit Turn(ThreadPool& pool);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    const ThreadPool& pool() const { return pool_; }
    int size() const { return pool_.size(); }
    int active() const { return pool_.active(); } // threads that the next run() uses
    void meet(int thread) {
        if (active() > 1) pool_.barrier_.wait(pool_.group_of_[thread]);
    }
    // The thread that `thread` helps as the i-th: itself, those of its group, then the others.
    int helped(int thread, int i) const;

    // After a run() with barriers that took so long.
    void settle(int64_t nanoseconds) { pool_.company_.ran(nanoseconds, pool_.barrier_.take_late()); }

    // Calls work(thread) once on each of active() threads, and returns when all have. `work` must not throw.
    template <class Work> void run(Work&& work) {
        pool_.run_raw(
            [](void* context, int thread) { (*static_cast<std::remove_reference_t<Work>*>(context))(thread); }, &work);
    }

    // Calls work(index) for 0 <= index < count, shared out one by one.
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
    std::vector<int> before_; // CPUs of the caller, given back at the end
    int node_before_ = 0;
};

} // namespace headstart
