// Recorded steps of recurrent layers. A convolution or recurrence reads each sequence's state, replays accepted rows kept
// from the last pass, and runs this pass's rows; then it stores states and keeps drafted rows (Pass::states).
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>

#include "program.h"

namespace headstart {
namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kColumns = 64; // columns of a head per task

void read_states(Program& program, const StatePool& pool) {
    program.wants_states = true;
    program.limits.reach(program.limits.states, pool.num_slots);
    program.limits.reach(program.limits.owned, pool.num_owned);
    program.limits.reach(program.limits.kept, pool.num_kept);
}

int64_t span_start(const Pass& pass, int64_t span) { return pass.positions[pass.row_starts[span]]; }

// Number of kept rows whose drafts were accepted; they are replayed before this pass's rows.
int64_t num_replayed(const Pass& pass, int64_t span) { return span_start(pass, span) - pass.states->starts[span]; }

const float* state_read(const StatePool& pool, const Pass& pass, int64_t span) {
    const int32_t slot = pass.states->reads[span];
    return slot < 0 ? nullptr : pool.state(slot);
}

// Concatenates the buffers `parts` of a drafted row into the sequence's kept rows.
void keep_row(const Program& program, const StatePool& pool, const Pass& pass, const std::vector<int>& parts,
              int64_t row) {
    const int64_t span = pass.states->span_of[row], place = pass.positions[row] - pass.states->keeps[span];
    if (place < 0) return;
    float* to = pool.kept(pass.states->own[span], place);
    for (int part : parts) to = std::copy_n(program.values(part, row), program.buffers[part].width, to);
}

// Input of a convolution at row `at` of a span, relative to the span's first row in the pass (negative: earlier rows);
// nullptr before the sequence's first row.
const float* input_before(const Program& program, const StatePool& pool, const Pass& pass, int x, int64_t width,
                          int64_t span, int64_t at) {
    if (at >= 0) return program.values(x, pass.row_starts[span] + at);
    at += num_replayed(pass, span);
    if (at >= 0) return pool.kept(pass.states->own[span], at);
    const float* state = state_read(pool, pass, span);
    return state ? state + (at + width - 1) * program.buffers[x].width : nullptr;
}

void convolve(const Program& program, const StatePool& pool, const Pass& pass, int x, int out, const float* taps,
              const float* bias, int64_t width, int64_t row) {
    const int64_t span = pass.states->span_of[row], at = row - pass.row_starts[span];
    const float* rows[kMaxTaps];
    for (int64_t j = 0; j < width; ++j)
        rows[j] = input_before(program, pool, pass, x, width, span, at - (width - 1 - j));
    program.kernels.conv(rows, taps, bias, width, program.buffers[x].width, program.values(out, row));
}

// Stores the last width - 1 inputs before each stored position, then keeps drafted rows. A store may overwrite the state
// that is read, so all windows are computed first.
void store_windows(const Program& program, const StatePool& pool, const Pass& pass, int x, int64_t width,
                   int64_t span) {
    const States& states = *pass.states;
    const int64_t channels = program.buffers[x].width, first = states.store_starts[span];
    const int64_t count = states.store_starts[span + 1] - first, size = (width - 1) * channels;
    std::vector<float> windows(count * size, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t end = states.store_positions[first + i] - span_start(pass, span);
        for (int64_t j = 0; j < width - 1; ++j)
            if (const float* from = input_before(program, pool, pass, x, width, span, end - (width - 1) + j))
                std::copy_n(from, channels, windows.data() + i * size + j * channels);
    }
    for (int64_t i = 0; i < count; ++i)
        std::copy_n(windows.data() + i * size, size, pool.state(states.store_slots[first + i]));
    for (int64_t row = pass.row_starts[span]; row < pass.row_starts[span + 1]; ++row)
        keep_row(program, pool, pass, {x}, row);
}

int causal_conv(Program& program, int x, Floats taps, nb::object state_pool, int64_t width,
                std::optional<Floats> bias) {
    StatePool* pool = nb::cast<StatePool*>(state_pool);
    const int64_t channels = program.buffers[x].width;
    require(width >= 2 && width <= kMaxTaps, "causal_conv: 2 to 16 taps are supported");
    require((int64_t)taps.size() == width * channels && pool->state_size == (width - 1) * channels &&
                pool->row_size == channels && (!bias || (int64_t)bias->size() == channels),
            "causal_conv: shapes differ");
    const int out = program.buffer(channels, false);
    read_states(program, *pool);
    Step step;
    step.label = "recurrent";
    step.reads = {x};
    step.writes = {out};
    step.by_rows = step.gathers = true;
    step.owners = {state_pool, nb::cast(taps), nb::cast(bias)};
    step.run = [&program, pool, x, out, width, w = taps.data(),
                b = bias ? bias->data() : nullptr](const Pass& pass, int64_t row) {
        convolve(program, *pool, pass, x, out, w, b, width, row);
    };
    program.add(std::move(step));
    Step keep;
    keep.label = "recurrent";
    keep.reads = {x};
    keep.owners = {state_pool};
    keep.num_tasks = [](const Pass& pass) { return pass.num_spans; };
    keep.run = [&program, pool, x, width](const Pass& pass, int64_t span) {
        store_windows(program, *pool, pass, x, width, span);
    };
    program.add_deferred(std::move(keep));
    return out;
}

int softplus(Program& program, int x, std::optional<Floats> rate, Floats bias) {
    const int64_t width = program.buffers[x].width;
    require((!rate || (int64_t)rate->size() == width) && (int64_t)bias.size() == width, "softplus: widths differ");
    const int out = program.buffer(width, program.buffers[x].logits);
    Step step;
    step.label = "rows";
    step.reads = {x};
    step.writes = {out};
    step.by_rows = true;
    step.owners = {nb::cast(rate), nb::cast(bias)};
    step.run = [&program, x, out, width, r = rate ? rate->data() : nullptr, b = bias.data()](const Pass&, int64_t row) {
        program.kernels.softplus(program.values(x, row), r, b, width, program.values(out, row));
    };
    program.add(std::move(step));
    return out;
}

int bounded_decay(Program& program, int x, Floats rate, Floats bias, float bound) {
    const int64_t width = program.buffers[x].width;
    require((int64_t)rate.size() == width && (int64_t)bias.size() == width, "bounded_decay: widths differ");
    const int out = program.buffer(width, program.buffers[x].logits);
    Step step;
    step.label = "rows";
    step.reads = {x};
    step.writes = {out};
    step.by_rows = true;
    step.owners = {nb::cast(rate), nb::cast(bias)};
    step.run = [&program, x, out, width, bound, r = rate.data(), b = bias.data()](const Pass&, int64_t row) {
        program.kernels.bounded_decay(program.values(x, row), r, b, bound, width, program.values(out, row));
    };
    program.add(std::move(step));
    return out;
}

// One recurrence of a layer. `task` has the fields equal in all tasks; `fit` sets those of a head.
struct Recurrence {
    int64_t num_heads;
    std::vector<int> inputs; // rows, then per-head inputs: log decay and strength, or the time step
    RecurrenceTask task;
    std::function<void(RecurrenceTask&)> fit;
    int64_t strips() const { return (task.value_dim + kColumns - 1) / kColumns; }
};

// Tasks are ordered by span, head, strip of columns.
RecurrenceTask task_of(const Program& program, const StatePool& pool, const Pass& pass, const Recurrence& all, int out,
                       int64_t index) {
    const States& states = *pass.states;
    const int64_t strips = all.strips(), span = index / (all.num_heads * strips), strip = index % strips;
    const int64_t row = pass.row_starts[span], store = states.store_starts[span];
    const int rows = all.inputs.front(), last = all.inputs.back();
    const int64_t channels = program.buffers[rows].width;
    RecurrenceTask task = all.task;
    task.head = index / strips % all.num_heads;
    all.fit(task);
    task.first_column = strip * kColumns;
    task.num_columns = std::min(kColumns, task.value_dim - task.first_column);
    task.from = state_read(pool, pass, span);
    task.start = states.starts[span];
    task.num_kept = num_replayed(pass, span);
    task.kept = task.num_kept ? pool.kept(states.own[span], 0) : nullptr;
    task.kept_stride = pool.row_size;
    task.num_rows = pass.row_starts[span + 1] - row;
    task.rows = program.values(rows, row), task.row_stride = program.buffers[rows].stride();
    const Buffer& decays = program.buffers[all.inputs[1]];
    const int64_t decay_at = task.head * (decays.width / all.num_heads);
    task.decay = program.values(all.inputs[1], row) + decay_at, task.decay_stride = decays.stride();
    task.strength = program.values(last, row) + task.head;
    task.decay_at = channels + decay_at;
    task.strength_at = pool.row_size - all.num_heads + task.head;
    task.gate_stride = program.buffers[last].stride();
    task.out = program.values(out, row), task.out_stride = program.buffers[out].stride();
    task.num_stores = states.store_starts[span + 1] - store;
    task.store_positions = states.store_positions + store, task.store_slots = states.store_slots + store;
    task.states = pool.state(0), task.state_size = pool.state_size;
    return task;
}

int recurrence(Program& program, Recurrence all, nb::object state_pool, std::vector<nb::object> owners) {
    StatePool* pool = nb::cast<StatePool*>(state_pool);
    const RecurrenceTask& task = all.task;
    require(task.key_dim <= kMaxKeyDim, "recurrence: key dimensions above 256 are not supported");
    int64_t width = 0;
    for (int each : all.inputs) width += program.buffers[each].width;
    require(pool->state_size == all.num_heads * task.key_dim * task.value_dim && pool->row_size == width,
            "recurrence: shapes differ");
    for (size_t i = 1; i < all.inputs.size(); ++i)
        require(program.buffers[all.inputs[i]].width == all.num_heads * (i == 1 && task.by_channel ? task.key_dim : 1),
                "recurrence: needs one number per head, or a decay per key feature");
    const int out = program.buffer(all.num_heads * task.value_dim, false);
    const std::vector<int> inputs = all.inputs;
    read_states(program, *pool);
    Step step;
    step.label = "recurrent";
    step.reads = inputs;
    step.writes = {out};
    step.owners = std::move(owners);
    step.owners.push_back(state_pool);
    step.num_tasks = [count = all.num_heads * all.strips()](const Pass& pass) { return pass.num_spans * count; };
    step.run = [&program, pool, all = std::move(all), out](const Pass& pass, int64_t index) {
        program.kernels.recur(task_of(program, *pool, pass, all, out, index));
    };
    program.add(std::move(step));
    Step keep;
    keep.label = "recurrent";
    keep.reads = inputs;
    keep.by_rows = true;
    keep.owners = {state_pool};
    keep.run = [&program, pool, inputs](const Pass& pass, int64_t row) {
        keep_row(program, *pool, pass, inputs, row);
    };
    program.add(std::move(keep));
    return out;
}

int gated_delta(Program& program, int qkv, int log_decay, int strength, nb::object state_pool, int64_t num_key_heads,
                int64_t num_heads, int64_t key_dim, int64_t value_dim, bool tiled, bool by_channel) {
    const int64_t keys = num_key_heads * key_dim;
    require(num_key_heads > 0 && num_heads % num_key_heads == 0 &&
                program.buffers[qkv].width == 2 * keys + num_heads * value_dim,
            "gated_delta: shapes differ");
    Recurrence all{num_heads, {qkv, log_decay, strength}, {}, {}};
    all.task.key_dim = key_dim, all.task.value_dim = value_dim, all.task.delta = true;
    all.task.by_channel = by_channel;
    all.fit = [=](RecurrenceTask& task) {
        const int64_t key = tiled ? task.head % num_key_heads : task.head / (num_heads / num_key_heads);
        task.query_at = key * key_dim, task.key_at = keys + key * key_dim;
        task.value_at = 2 * keys + task.head * value_dim;
    };
    return recurrence(program, std::move(all), state_pool, {});
}

int selective_scan(Program& program, int xbc, int step, Floats rate, Floats skip, nb::object state_pool,
                   int64_t num_groups, int64_t num_heads, int64_t state_dim, int64_t head_dim) {
    const int64_t inner = num_heads * head_dim, keys = num_groups * state_dim;
    require(num_groups > 0 && num_heads % num_groups == 0 && program.buffers[xbc].width == inner + 2 * keys &&
                (int64_t)rate.size() == num_heads && (int64_t)skip.size() == num_heads,
            "selective_scan: shapes differ");
    Recurrence all{num_heads, {xbc, step}, {}, {}};
    all.task.key_dim = state_dim, all.task.value_dim = head_dim, all.task.delta = false;
    all.fit = [=, rates = rate.data(), skips = skip.data()](RecurrenceTask& task) {
        const int64_t group = task.head / (num_heads / num_groups);
        task.value_at = task.head * head_dim, task.key_at = inner + group * state_dim;
        task.query_at = inner + keys + group * state_dim;
        task.rate = rates[task.head], task.skip = skips[task.head];
    };
    return recurrence(program, std::move(all), state_pool, {nb::cast(rate), nb::cast(skip)});
}

nb::ndarray<nb::numpy, float> state_of(StatePool& pool, int64_t slot) {
    require(slot >= 0 && slot < pool.num_slots, "no such slot");
    float* copy = new float[pool.state_size];
    std::copy_n(pool.state(slot), pool.state_size, copy);
    nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    const size_t shape[1] = {(size_t)pool.state_size};
    return {copy, 1, shape, owner};
}

} // namespace

void bind_recurrent_steps(nb::module_& m, nb::class_<Program>& program) {
    nb::class_<StatePool>(m, "StatePool")
        .def(nb::init<int64_t, int64_t, int64_t, int64_t, int64_t>())
        .def("state", state_of)
        .def_prop_ro("slot_bytes", &StatePool::slot_bytes)
        .def("slots", [](nb::handle self, int64_t first, int64_t count) {
            const StatePool& pool = nb::cast<const StatePool&>(self);
            return slots_of(self, pool.states, pool.slot_bytes(), 1, first, count);
        });
    program
        .def("causal_conv", causal_conv, nb::arg("x"), nb::arg("taps"), nb::arg("pool"), nb::arg("width"),
             nb::arg("bias").none())
        .def("softplus", softplus, nb::arg("x"), nb::arg("rate").none(), nb::arg("bias"))
        .def("bounded_decay", bounded_decay)
        .def("gated_delta", gated_delta)
        .def("selective_scan", selective_scan);
}

} // namespace headstart
