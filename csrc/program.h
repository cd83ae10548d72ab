// A recorded forward pass: steps over buffers of R rows, replayed for any R by all threads with one call from Python.
//
// Steps are grouped into phases with a barrier between them. Consecutive row-wise steps (norm, rope, ...) share a phase,
// because row r depends on row r only; so do matrices with the same input.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "matrix.h"
#include "pool.h"

namespace headstart {

namespace nb = nanobind;

// Throws std::invalid_argument unless `holds`.
inline void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

// Number of tasks of a matrix product: pairs of blocks.
inline int64_t num_pairs(const Matrix& w) { return (w.num_blocks() + 1) / 2; }

// Zeroed memory; the system provides its pages at first touch.
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

// NumPy view of the bytes of slots first .. first + count - 1 of a pool; it keeps `owner` alive. first and count must be
// multiples of `step`. Used to spill KV blocks to files and to load them.
nb::ndarray<nb::numpy, uint8_t> slots_of(nb::handle owner, const Memory& memory, int64_t slot_bytes, int64_t step,
                                         int64_t first, int64_t count);

// KV cache of one layer: num_slots token positions (a multiple of 16).
struct KVPool {
    KVPool(int64_t num_slots, int64_t num_heads, int64_t head_dim, int64_t value_dim, Store store);
    uint8_t* tile(int64_t slot, int64_t head) const {
        return memory.data() + layout.tile_at(slot, head);
    }
    int64_t slot_bytes() const { return layout.tile_bytes() * layout.num_heads / 16; } // its share of the tiles of all heads
    KVLayout layout;
    int64_t num_slots;
    Memory memory;
    std::vector<bool> placed; // by groups of 16 slots: assigned to NUMA nodes (place_keys)? empty: none
};

// Rows [num_slots, width], stored as float32 (wide) or bfloat16.
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

// Hidden states [num_slots, width], float32.
struct HiddenPool {
    HiddenPool(int64_t num_slots, int64_t width) : width(width), num_slots(num_slots), memory(num_slots * width * 4) {}
    float* row(int64_t slot) const { return reinterpret_cast<float*>(memory.data()) + slot * width; }
    int64_t slot_bytes() const { return width * 4; }
    int64_t width, num_slots;
    Memory memory;
};

// Recurrent states of one layer [num_slots, state_size], and each sequence's rows kept for replay [num_owned, num_kept,
// row_size]; float32.
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

constexpr int kRopeAxes = 3; // of Pass::rope_positions
constexpr int32_t kImageRow = -1; // token id in rows of images that mark them (headstart/core.py, IMAGE_ROW)

struct Pass;

// cos and sin by position, computed in float64, stored as float32; grows with the positions in use.
class RopeTable {
  public:
    // axes: the axis of Pass::rope_positions that each frequency takes; empty: all take the row's position
    RopeTable(std::vector<double> inv_freq, double scale, std::vector<int> axes)
        : inv_freq_(std::move(inv_freq)), axes_(std::move(axes)), scale_(scale) {
        require(axes_.empty() || axes_.size() == inv_freq_.size(), "RopeTable: needs an axis for each frequency");
        for (int axis : axes_) require(axis >= 0 && axis < kRopeAxes, "RopeTable: an axis is not 0, 1 or 2");
    }
    void reach(int64_t position); // not thread-safe
    int64_t half() const { return (int64_t)inv_freq_.size(); }
    const float* cosines(int64_t position) const { return table_.data() + position * 2 * half(); }
    const float* sines(int64_t position) const { return cosines(position) + half(); }
    // cos and sin of a row, whose frequencies may take different positions. Valid until the thread's next call.
    const float* cosines(const Pass& pass, int64_t row, int64_t behind) const;

  private:
    std::vector<double> inv_freq_;
    std::vector<int> axes_;
    double scale_;
    std::vector<float> table_;
};

// Expert routing of a pass. A slot is one (row, expert) pair; slots are sorted by expert, then row.
struct Routing {
    explicit Routing(const Router& router) : router(router) {}
    void reach(int64_t num_rows); // not thread-safe
    void group(int64_t num_rows); // fills all fields after `weights` from ids
    Router router;
    std::vector<int32_t> ids;     // [rows][top_k] expert ids, ascending in a row
    std::vector<float> weights;   // [rows][top_k]
    std::vector<int32_t> slots;   // [rows][top_k]; -1 if the expert has no matrices
    std::vector<int32_t> rows;    // [slots]
    std::vector<float> factors;   // [slots] input factors if the router scales inputs; `weights` are then 1
    std::vector<int32_t> experts; // the experts in use, ascending
    std::vector<int32_t> starts;  // [experts in use + 1] first slot of each, then the number of slots
    std::vector<int32_t> cursor;
};

// Scratch memory shared by a backend's programs; the holder of ThreadPool::Turn may use it.
struct Arena {
    std::unique_ptr<Memory> memory;
    uint8_t* take(int64_t bytes);
};

// StateSteps of headstart/core.py as pointers.
struct States {
    const int32_t *own, *reads, *starts, *keeps, *store_starts, *store_positions, *store_slots;
    const int32_t* span_of; // [rows] the span of each row
};

// Attention steps with equal shapes share their tasks: query heads per KV head, KV heads, window and chunk.
struct AttendShape {
    int64_t group, heads, window, chunk;
    bool block_window; // the window counts from the span's first row
    bool operator==(const AttendShape& other) const {
        return group == other.group && heads == other.heads && window == other.window && chunk == other.chunk &&
               block_window == other.block_window;
    }
};

// The attention tasks of a pass, ordered by unit (Pass::num_units), KV head, KV split if long contexts are shared between
// threads, and tile of queries.
struct AttendTasks {
    AttendTasks(const Pass& pass, const AttendShape& shape, int64_t max_queries, int threads);
    std::vector<int64_t> before; // [units + 1] number of tasks before each unit, then of all
    std::vector<int32_t> first, count; // [units] first KV split and their number; empty: a task does all splits
    int64_t max_splits = 0;            // from position 0 on, if splits are shared

  private:
    void cut(const Pass& pass, const AttendShape& shape, int64_t max_queries);
};

// StepPlan of headstart/core.py as pointers.
struct Pass {
    int64_t num_rows, num_logits, num_spans, table_width, block_size, first_position;
    const int32_t *token_ids, *positions, *slots, *visible_start, *visible_end, *row_starts, *block_tables, *logit_rows;
    const int32_t* row_spans;                 // [rows] span of each row, if states or paths need it
    const int32_t *path_starts, *path_slots;  // tree drafts: slots of each row's own ancestors (CSR), or nullptr
    int64_t num_units;                        // a unit shares attention tasks: a span, or a row with a path
    const int32_t *unit_starts, *unit_spans;  // first row and span of each unit (nullptr: units are spans)
    const int32_t* hidden_slots; // or nullptr
    const HiddenPool* hidden_pool;
    const float* hidden; // [num_rows, hidden_stride], or nullptr: rows of the pool
    int64_t hidden_stride;
    const States* states; // or nullptr
    const int32_t* rope_positions; // [num_rows, kRopeAxes] for ropes with axes, or nullptr: `positions` on each
    const int32_t* adapter_slots; // [num_rows] slot of the row's adapter, -1: none; or nullptr: no row has one
    std::vector<AttendTasks> attends; // one for each of Program::attends
    int64_t span_of(int64_t unit) const { return unit_spans ? unit_spans[unit] : unit; }
    // Position of the first row of a unit's span.
    int64_t block_start(int64_t unit) const { return positions[row_starts[span_of(unit)]]; }
};

// Indexer scores [rows][width]; each indexer's selection runs before the next indexer overwrites them.
struct Scores {
    void reach(const Pass& pass); // not thread-safe
    float* row(int64_t row) { return values.data() + row * width; }
    bool wanted = false;
    int64_t width = 0; // visible positions, rounded up to whole tiles
    std::vector<float> values;
};

// Upper bounds of the ids and slots in a plan, from what the program's steps read and write.
struct Limits {
    int64_t tokens = INT64_MAX, slots = INT64_MAX, table_slots = INT64_MAX; // slots are written, table_slots read
    int64_t states = INT64_MAX, owned = INT64_MAX, kept = INT64_MAX;
    bool marks = true; // token ids may be kImageRow
    static void reach(int64_t& limit, int64_t size) { limit = size < limit ? size : limit; }
};

class Program;

Activation activation_of(int kind); // throws std::invalid_argument

// Assigns KV tiles to the NUMA node whose threads read that head, before their slots are written for the first time.
void place_keys(ThreadPool::Turn& turn, const std::vector<KVPool*>& pools, const Pass& pass); // placing.cpp

void bind_attention_steps(nb::module_& m, nb::class_<Program>& program); // attention_steps.cpp
void bind_stream_steps(nb::module_& m, nb::class_<Program>& program);    // stream_steps.cpp
void bind_selection_steps(nb::class_<Program>& program);                     // selection_steps.cpp
void bind_expert_steps(nb::class_<Program>& program);                     // expert_steps.cpp
void bind_recurrent_steps(nb::module_& m, nb::class_<Program>& program); // recurrent_steps.cpp
void bind_lora_steps(nb::module_& m, nb::class_<Program>& program);      // lora_steps.cpp
void bind_refine_steps(nb::class_<Program>& program);                     // refine_steps.cpp
void bind_run(nb::class_<Program>& program);                             // run.cpp

struct Buffer {
    int64_t width;
    bool logits;                        // has one row per logit row, instead of per row of the pass
    bool quants = false, halves = false; // is also stored as int8, as bfloat16
    int64_t copies = 1;     // buffer rows for each row of the pass
    int producer = -1;      // index of the step that writes it
    int output = -1;        // index in the program's outputs; -1: scratch
    int64_t value_offset = -1, quant_offset = -1, half_offset = -1; // offsets in scratch, in bytes per row
    int64_t stride() const { return (width + 31) / 32 * 32; }
    int64_t value_bytes() const { return stride() * 4 * copies; } // per row of the pass
    int64_t quant_bytes() const { return QuantLayout(width).row_bytes() * copies; }
    int64_t half_stride() const { return whole_panels(width); }
    int64_t half_bytes() const { return half_stride() * 2 * copies; }
};

struct Step {
    std::string label;
    std::vector<int> reads, writes;
    bool by_rows = false;        // run(pass, row) reads only its own row
    bool gathers = false;        // by_rows, but reads other rows: starts a phase
    bool quantizes = false;      // writes the int8 form of its output itself
    bool attends = false;        // may use Program::partials, so a phase has one of these at most
    std::vector<nb::object> owners; // keeps alive what `run` points into
    std::function<int64_t(const Pass&)> num_tasks; // if not by_rows
    std::function<void(const Pass&, int64_t)> run; // (pass, row or task index)
    int domain() const { return writes.empty() ? reads[0] : writes[0]; } // the buffer whose rows it iterates over
};

struct Phase {
    int first, last; // steps first .. last - 1
    bool by_rows;
    bool logits; // iterates over logit rows
    std::string label;
    double seconds = 0;
};

class Program {
  public:
    explicit Program(const std::string& path);

    int buffer(int64_t width, bool logits);
    void add(Step step);
    void add_deferred(Step step); // added after the next step with tasks: nothing in this pass reads its result
    void finish(std::vector<std::pair<std::string, int>> outputs);
    nb::dict run(ThreadPool& threads, Arena& arena, Pass& pass); // not thread-safe
    void compute(ThreadPool::Turn& turn, Arena& arena, Pass& pass); // called without the GIL
    int output(const std::string& name) const;                      // buffer id of an output; -1: no such output
    nb::dict profile(bool reset);

    const Kernels& kernels;
    Limits limits;
    bool profiling = false, wants_states = false, wants_spans = false; // whether steps read Pass::states, Pass::row_spans
    Scores scores;
    int64_t hidden_width = 0; // width of the hidden states it reads, 0: none
    std::vector<Buffer> buffers;
    std::vector<std::shared_ptr<RopeTable>> ropes;
    std::vector<std::shared_ptr<Routing>> routings;
    bool reads_ahead = false; // weights are in a mapped file that exceeds the memory
    int64_t num_experts_read() const; // distinct experts of the last pass, all layers together
    std::vector<AttendShape> attends; // distinct shapes of the attention steps
    std::vector<KVPool*> written;     // pools that store_kv steps write
    int64_t partial_floats = 0;       // maximum AttendTask::partial_size()
    float* partials() const { return reinterpret_cast<float*>(partials_->data()); }
    std::atomic<int32_t>& ended(int64_t tile) const { return ended_[tile]; } // finished splits of a tile

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
    // adds the step that converts a buffer to the input type of `by`, if missing
    void require_input(int id, const Matrix& by);

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

    std::vector<Step> steps_, deferred_;
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
