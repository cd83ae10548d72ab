// A recorded forward: steps over buffers of R rows, replayed for any R by all threads with one crossing from Python.
//
// Steps are grouped into phases; inside a phase threads take tasks freely, between phases they meet at a barrier. Steps
// on rows (norm, rope, ...) follow each other in one phase, because row r needs row r only; matrices that read the same
// input share a phase too.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels.h"
#include "matrix.h"
#include "pool.h"

namespace headstart {

namespace nb = nanobind;

// Zeroed memory that is taken from the system only as it is touched.
class Memory {
  public:
    explicit Memory(int64_t bytes);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    uint8_t* data() const { return data_; }
    int64_t size() const { return size_; }

  private:
    uint8_t* data_;
    int64_t size_;
};

// The bytes of slots first .. first + count - 1 of a pool, which lie `slot_bytes` apart, as an array of Python's that keeps
// `owner`. Slots are taken `step` at a time.
nb::ndarray<nb::numpy, uint8_t> slots_of(nb::handle owner, const Memory& memory, int64_t slot_bytes, int64_t step,
                                         int64_t first, int64_t count);

// Keys and values of one layer for num_slots token positions (a multiple of 16).
struct KVPool {
    KVPool(int64_t num_slots, int64_t num_heads, int64_t head_dim, int64_t value_dim, Store store);
    uint8_t* tile(int64_t slot, int64_t head) const {
        return memory.data() + layout.tile_at(slot, head);
    }
    int64_t slot_bytes() const { return layout.tile_bytes() * layout.num_heads / 16; } // its share of a tile
    KVLayout layout;
    int64_t num_slots;
    Memory memory;
    std::vector<bool> placed; // tiles of slots that lie on a node (place_keys); empty: none does
};

// Rows [num_slots, width] that are read one by one, as floats or rounded to bfloat16.
struct RowPool {
    RowPool(int64_t num_slots, int64_t width, bool wide)
        : width(width), num_slots(num_slots), wide(wide), memory(num_slots * width * (wide ? 4 : 2)) {}
    void put(int64_t slot, const float* row);
    void get(int64_t slot, float* row) const;
    int64_t slot_bytes() const { return width * (wide ? 4 : 2); }
    int64_t width, num_slots;
    bool wide;
    Memory memory;
};

// Hidden states [num_slots, width], float.
struct HiddenPool {
    HiddenPool(int64_t num_slots, int64_t width) : width(width), num_slots(num_slots), memory(num_slots * width * 4) {}
    float* row(int64_t slot) const { return reinterpret_cast<float*>(memory.data()) + slot * width; }
    int64_t slot_bytes() const { return width * 4; }
    int64_t width, num_slots;
    Memory memory;
};

// Recurrent states [num_slots, state_size] of one layer, and rows that sequences keep [num_owned, num_kept, row_size].
struct StatePool {
    StatePool(int64_t num_slots, int64_t num_owned, int64_t num_kept, int64_t state_size, int64_t row_size)
        : num_slots(num_slots), num_owned(num_owned), num_kept(num_kept), state_size(state_size), row_size(row_size),
          states(num_slots * state_size * 4), rows(num_owned * num_kept * row_size * 4) {}
    float* state(int64_t slot) const { return reinterpret_cast<float*>(states.data()) + slot * state_size; }
    float* kept(int64_t slot, int64_t place) const {
        return reinterpret_cast<float*>(rows.data()) + (slot * num_kept + place) * row_size;
    }
    int64_t slot_bytes() const { return state_size * 4; }
    int64_t num_slots, num_owned, num_kept, state_size, row_size;
    Memory states, rows;
};

// cos and sin by position, float from double; grown as positions come.
class RopeTable {
  public:
    RopeTable(std::vector<double> inv_freq, double scale) : inv_freq_(std::move(inv_freq)), scale_(scale) {}
    void reach(int64_t position); // not thread-safe
    int64_t half() const { return (int64_t)inv_freq_.size(); }
    const float* cosines(int64_t position) const { return table_.data() + position * 2 * half(); }
    const float* sines(int64_t position) const { return cosines(position) + half(); }

  private:
    std::vector<double> inv_freq_;
    double scale_;
    std::vector<float> table_;
};

// Which rows take which experts in a pass. A slot is one row at one expert; slots go by expert, then row.
struct Routing {
    explicit Routing(const Router& router) : router(router) {}
    void reach(int64_t num_rows); // not thread-safe
    void group(int64_t num_rows); // fills the rest from ids
    Router router;
    std::vector<int32_t> ids;     // [rows][top_k], ascending in a row
    std::vector<float> weights;   // of the same
    std::vector<int32_t> slots;   // of the same; -1 where the expert has no matrices
    std::vector<int32_t> rows;    // of each slot
    std::vector<float> factors;   // of each slot, where weights are of what experts read; `weights` are then 1
    std::vector<int32_t> experts; // that some row takes, ascending
    std::vector<int32_t> starts;  // the first slot of each of these, and the number of slots
    std::vector<int32_t> cursor;
};

// Scratch shared by the programs of a backend: it belongs to the one whose turn it is (ThreadPool::Turn).
struct Arena {
    std::unique_ptr<Memory> memory;
    uint8_t* take(int64_t bytes);
};

// StateSteps (headstart/core.py) as plain pointers.
struct States {
    const int32_t *own, *reads, *starts, *keeps, *store_starts, *store_positions, *store_slots;
    const int32_t* span_of; // each row
};

// Attention steps whose tasks are the same: queries for each kv head, kv heads, what a row sees.
struct AttendShape {
    int64_t group, heads, window, chunk;
    bool operator==(const AttendShape& other) const {
        return group == other.group && heads == other.heads && window == other.window && chunk == other.chunk;
    }
};

struct Pass;

// Tasks of a pass's attention: by unit, kv head, stretch (kStretch) where threads share long contexts, tile of queries.
struct AttendTasks {
    AttendTasks(const Pass& pass, const AttendShape& shape, int64_t most_queries, int threads);
    std::vector<int64_t> before; // tasks before each unit, and of all
    std::vector<int32_t> first, count; // stretches of each unit; empty: each task takes all
    int64_t most = 0;                  // stretches that a query has at most, from position 0 on, if they are shared

  private:
    void cut(const Pass& pass, const AttendShape& shape, int64_t most_queries);
};

// StepPlan (headstart/core.py) as plain pointers.
struct Pass {
    int64_t num_rows, num_logits, num_spans, table_width, block_size, first_position;
    const int32_t *token_ids, *positions, *slots, *sees, *row_starts, *block_tables, *logit_rows;
    const int32_t* row_spans;                 // the span of each row, where states or paths need it
    const int32_t *path_starts, *path_slots;  // or nullptr
    int64_t num_units;                        // what shares attention tasks: spans, or rows that have paths
    const int32_t *unit_starts, *unit_spans;  // rows of a unit, and its span (nullptr: units are spans)
    const int32_t* hidden_slots; // or nullptr
    const HiddenPool* hidden_pool;
    const float* hidden; // [num_rows, hidden_stride], or nullptr: rows of the pool
    int64_t hidden_stride;
    const States* states; // or nullptr
    std::vector<AttendTasks> attends; // by Program::attends
};

// Scores of positions by row, of the indexer that runs: it is chosen from before the next one scores.
struct Scores {
    void reach(const Pass& pass); // not thread-safe
    float* row(int64_t row) { return values.data() + row * width; }
    bool wanted = false;
    int64_t width = 0; // the positions that rows of the pass see, in whole tiles
    std::vector<float> values;
};

// What a program reads and writes: how far ids and slots of a plan may go.
struct Limits {
    int64_t tokens = INT64_MAX, slots = INT64_MAX, table_slots = INT64_MAX; // slots: written; table_slots: read
    int64_t states = INT64_MAX, owned = INT64_MAX, kept = INT64_MAX;
    static void reach(int64_t& limit, int64_t size) { limit = size < limit ? size : limit; }
};

class Program;

Activation activation_of(int kind); // throws std::invalid_argument

// Before slots of a pass are written for the first time: each head's tiles go to the node whose threads attend to them.
void place_keys(ThreadPool::Turn& turn, const std::vector<KVPool*>& pools, const Pass& pass); // placing.cpp

void bind_attention_steps(nb::module_& m, nb::class_<Program>& program); // attention_steps.cpp
void bind_stream_steps(nb::module_& m, nb::class_<Program>& program);    // stream_steps.cpp
void bind_choice_steps(nb::class_<Program>& program);                     // choice_steps.cpp
void bind_expert_steps(nb::class_<Program>& program);                     // expert_steps.cpp
void bind_recurrent_steps(nb::module_& m, nb::class_<Program>& program); // recurrent_steps.cpp
void bind_refine_steps(nb::class_<Program>& program);                     // refine_steps.cpp
void bind_run(nb::class_<Program>& program);                             // run.cpp

struct Buffer {
    int64_t width;
    bool logits;                        // L rows instead of R
    bool quants = false, halves = false; // kept in 8 bits, in bfloat16 as well
    int64_t copies = 1;     // rows of this buffer for each row of the pass
    int producer = -1;      // step that writes it
    int output = -1;        // index of the output it is, or scratch
    int64_t value_offset = -1, quant_offset = -1, half_offset = -1; // bytes per row of what lies before it
    int64_t stride() const { return (width + 31) / 32 * 32; }
    int64_t value_bytes() const { return stride() * 4 * copies; } // for each row of the pass
    int64_t quant_bytes() const { return QuantLayout(width).row_bytes() * copies; }
    int64_t half_stride() const { return whole_panels(width); }
    int64_t half_bytes() const { return half_stride() * 2 * copies; }
};

struct Step {
    std::string label;
    std::vector<int> reads, writes;
    bool by_rows = false;        // run(pass, row): rows do not see each other
    bool gathers = false;        // by_rows, but reads rows of others
    bool quantizes = false;      // writes the 8-bit form of its output by itself
    bool attends = false;        // may use Program::partials: alone of its kind in a phase
    std::vector<nb::object> owners; // what the pointers inside `run` point into
    std::function<int64_t(const Pass&)> num_tasks; // where not by_rows
    std::function<void(const Pass&, int64_t)> run; // a task, or a row
    int domain() const { return writes.empty() ? reads[0] : writes[0]; } // whose rows it goes over
};

struct Phase {
    int first, last; // steps first .. last - 1
    bool by_rows;
    bool logits; // rows are logit rows
    std::string label;
    double seconds = 0;
};

class Program {
  public:
    explicit Program(const std::string& path);

    int buffer(int64_t width, bool logits);
    void add(Step step);
    void add_later(Step step); // behind the next step of tasks: nothing in this pass reads what it writes
    void finish(std::vector<std::pair<std::string, int>> outputs);
    nb::dict run(ThreadPool& threads, Arena& arena, Pass& pass); // not from two threads at once
    void compute(ThreadPool::Turn& turn, Arena& arena, Pass& pass); // without Python's lock
    int output(const std::string& name) const;                      // the buffer of a result; -1: there is none
    nb::dict profile(bool reset);

    const Kernels& kernels;
    Limits limits;
    bool profiling = false, wants_states = false, wants_spans = false; // spans: Pass::row_spans
    Scores scores;
    int64_t hidden_width = 0; // columns of the hidden states that it reads
    std::vector<Buffer> buffers;
    std::vector<std::shared_ptr<RopeTable>> ropes;
    std::vector<std::shared_ptr<Routing>> routings;
    std::vector<AttendShape> attends; // of the attention steps
    std::vector<KVPool*> written;     // pools that it stores keys in
    int64_t partial_floats = 0;       // of a query's stretch, at most
    float* partials() const { return reinterpret_cast<float*>(partials_->data()); }
    std::atomic<int32_t>& ended(int64_t tile) const { return ended_[tile]; } // stretches of a tile that are done

    float* values(int id, int64_t row) const {
        const Buffer& buffer = buffers[id];
        uint8_t* base = buffer.output < 0 ? scratch(buffer.value_offset) : output_data(buffer.output);
        return reinterpret_cast<float*>(base) + row * buffer.stride();
    }
    uint8_t* quants(int id) const { return buffers[id].quants ? scratch(buffers[id].quant_offset) : nullptr; }
    uint16_t* halves(int id) const {
        return buffers[id].halves ? reinterpret_cast<uint16_t*>(scratch(buffers[id].half_offset)) : nullptr;
    }
    Input input(int id, const Pass& pass) const {
        return {values(id, 0), buffers[id].stride(), quants(id), rows(id, pass), halves(id)};
    }
    Output output(int id) const { return {values(id, 0), buffers[id].stride(), quants(id), buffers[id].width}; }
    int64_t rows(int id, const Pass& pass) const { return buffers[id].logits ? pass.num_logits : pass.num_rows; }
    void want(int id, const Matrix& by); // adds a step that makes the form of a buffer that `by` multiplies, if none does

  private:
    void add_form(int id, std::function<void(const Pass&, int64_t)> run);
    uint8_t* scratch(int64_t offset) const;
    uint8_t* output_data(int index) const;
    bool joins(const Phase& phase, const Step& step) const;
    void plan_phases();
    void plan_memory();
    void allocate(Arena& arena, const Pass& pass);
    void share_contexts(Pass& pass, int threads);
    void execute(ThreadPool::Turn& turn, const Pass& pass, int thread);
    int64_t num_tasks(const Phase& phase, const Pass& pass) const;
    void run_tasks(const Phase& phase, const Pass& pass, int64_t first, int64_t last) const;

    std::vector<Step> steps_, later_;
    std::vector<Phase> phases_;
    std::vector<std::pair<std::string, int>> outputs_;
    std::vector<std::shared_ptr<Memory>> output_memory_;
    int64_t bytes_per_row_ = 0;
    uint8_t* scratch_ = nullptr;
    int64_t capacity_ = 0;
    struct alignas(64) Counter {
        std::atomic<int64_t> next;
    };
    std::unique_ptr<Counter[]> counters_; // 2 x threads
    int64_t num_counters_ = 0;
    std::unique_ptr<Memory> partials_;
    std::unique_ptr<std::atomic<int32_t>[]> ended_;
    int64_t num_ended_ = 0;
};

} // namespace headstart
