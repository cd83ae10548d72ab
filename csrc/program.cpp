#include "program.h"

#include "angles.h"
#include "cpu.h"
#include "system.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>

namespace headstart {
namespace {

using Clock = std::chrono::steady_clock;

bool share(const std::vector<int>& a, const std::vector<int>& b) {
    return std::any_of(a.begin(), a.end(), [&](int each) { return std::find(b.begin(), b.end(), each) != b.end(); });
}

constexpr int kTasksPerThread = 4; // enough for threads to finish together

} // namespace

void AttendTasks::cut(const Pass& pass, const AttendShape& shape, int64_t max_queries) {
    before.resize(pass.num_units + 1);
    for (int64_t unit = 0; unit < pass.num_units; ++unit) {
        const int64_t queries = (pass.unit_starts[unit + 1] - pass.unit_starts[unit]) * shape.group;
        before[unit + 1] = before[unit] + (queries + max_queries - 1) / max_queries * shape.heads;
    }
}

AttendTasks::AttendTasks(const Pass& pass, const AttendShape& shape, int64_t max_queries, int threads) : before{0} {
    cut(pass, shape, max_queries);
    if (threads == 1 || before.back() >= threads * kTasksPerThread) return;
    for (int64_t unit = 0; unit < pass.num_units; ++unit) {
        const int32_t *begin = pass.positions + pass.unit_starts[unit], *end = pass.positions + pass.unit_starts[unit + 1];
        const int64_t least = shape.block_window ? pass.block_start(unit) : *std::min_element(begin, end);
        const int64_t started = *std::min_element(pass.visible_start + pass.unit_starts[unit],
                                                  pass.visible_start + pass.unit_starts[unit + 1]);
        const int64_t oldest = shape.window  ? std::min<int64_t>(least - shape.window + 1, started)
                               : shape.chunk ? least - least % shape.chunk
                                             : 0;
        const int64_t latest = *std::max_element(pass.visible_end + pass.unit_starts[unit], pass.visible_end + pass.unit_starts[unit + 1]);
        first.push_back((int32_t)(std::max(oldest, pass.first_position) / kSplit));
        count.push_back((int32_t)(latest / kSplit + 1 - first.back()));
        max_splits = std::max(max_splits, latest / kSplit + 1);
    }
    if (max_splits == 1) {
        count.clear();
        cut(pass, shape, std::min(max_queries, kSharedQueries));
        return;
    }
    int64_t earlier = 0;
    for (int64_t unit = 0; unit < pass.num_units; ++unit) {
        const int64_t tasks = before[unit + 1] - earlier;
        earlier = before[unit + 1];
        before[unit + 1] = before[unit] + tasks * count[unit];
    }
}

Memory::Memory(int64_t bytes) : data_(nullptr), size_(bytes) {
    if (bytes <= 0) return;
    data_ = map_pages(bytes);
}

Memory::~Memory() {
    if (data_) unmap_pages(data_, size_);
}

KVPool::KVPool(int64_t slots, int64_t num_heads, int64_t head_dim, int64_t value_dim, Store store)
    : layout{store, num_heads, head_dim, value_dim}, num_slots(slots),
      memory((slots + 15) / 16 * num_heads * layout.tile_bytes()) {}

void RopeTable::reach(int64_t position) {
    const int64_t width = 2 * half(), is_supported = (int64_t)table_.size() / width;
    if (position < is_supported) return;
    const int64_t wanted = std::max<int64_t>(256, 2 * is_supported > position ? 2 * is_supported : position + 1);
    table_.resize(wanted * width);
    for (int64_t p = is_supported; p < wanted; ++p)
        for (int64_t i = 0; i < half(); ++i) {
            const Angle angle = turned((double)p * inv_freq_[i]);
            table_[p * width + i] = (float)(angle.cosine * scale_);
            table_[p * width + half() + i] = (float)(angle.sine * scale_);
        }
}

const float* RopeTable::cosines(const Pass& pass, int64_t row, int64_t behind) const {
    const int32_t* at = pass.rope_positions && !axes_.empty() ? pass.rope_positions + row * kRopeAxes : nullptr;
    if (!at) return cosines(std::max<int64_t>(0, pass.positions[row] - behind));
    if (std::all_of(at, at + kRopeAxes, [&](int32_t each) { return each == at[0]; })) return cosines(at[0]);
    thread_local std::vector<float> mixed;
    mixed.resize(2 * half());
    for (int64_t i = 0; i < half(); ++i) {
        mixed[i] = cosines(at[axes_[i]])[i];
        mixed[half() + i] = sines(at[axes_[i]])[i];
    }
    return mixed.data();
}

void Routing::reach(int64_t num_rows) {
    const size_t count = (size_t)(num_rows * router.top_k);
    if (ids.size() >= count) return;
    ids.resize(count);
    weights.resize(count);
    slots.resize(count);
    rows.resize(count);
    if (router.scales_inputs) factors.resize(count);
}

void Routing::group(int64_t num_rows) {
    const int64_t k = router.top_k;
    cursor.assign(router.num_experts, 0);
    for (int64_t i = 0; i < num_rows * k; ++i) ++cursor[ids[i]];
    experts.clear();
    starts.clear();
    int32_t start = 0;
    for (int64_t expert = 0; expert < router.num_matrices; ++expert) {
        const int32_t count = cursor[expert];
        cursor[expert] = start;
        if (count == 0) continue;
        experts.push_back((int32_t)expert);
        starts.push_back(start);
        start += count;
    }
    starts.push_back(start);
    for (int64_t i = 0; i < num_rows * k; ++i) {
        slots[i] = ids[i] < router.num_matrices ? cursor[ids[i]]++ : -1;
        if (slots[i] < 0) continue;
        rows[slots[i]] = (int32_t)(i / k);
    }
    if (!router.scales_inputs) return;
    for (int64_t i = 0; i < num_rows * k; ++i) {
        factors[slots[i]] = weights[i];
        weights[i] = 1.0f;
    }
}

int64_t Program::num_experts_read() const {
    int64_t count = 0;
    for (const auto& routing : routings) count += (int64_t)routing->experts.size();
    return count;
}

void Scores::reach(const Pass& pass) {
    if (!wanted) return;
    width = (*std::max_element(pass.visible_end, pass.visible_end + pass.num_rows) / 16 + 1) * 16;
    if ((int64_t)values.size() < pass.num_rows * width) values.resize(pass.num_rows * width);
}

uint8_t* Arena::take(int64_t bytes) {
    if (!memory || memory->size() < bytes) memory = std::make_unique<Memory>(bytes);
    return memory->data();
}

Program::Program(const std::string& path) : kernels(*find_path(path).kernels) {}

Activation activation_of(int kind) {
    if (kind < 0 || kind > (int)Activation::SITU) throw std::invalid_argument("unknown activation");
    return static_cast<Activation>(kind);
}

int Program::buffer(int64_t width, bool logits) {
    Buffer made;
    made.width = width;
    made.logits = logits;
    buffers.push_back(made);
    return (int)buffers.size() - 1;
}

void Program::add(Step step) {
    for (int id : step.writes) buffers[id].producer = (int)steps_.size();
    const bool has_tasks = !step.by_rows;
    steps_.push_back(std::move(step));
    if (!has_tasks) return;
    for (Step& each : deferred_) steps_.push_back(std::move(each));
    deferred_.clear();
}

void Program::add_deferred(Step step) { deferred_.push_back(std::move(step)); }

void Program::add_form(int id, std::function<void(const Pass&, int64_t)> run) {
    Step step;
    step.label = "rows";
    step.reads = {id};
    step.by_rows = true;
    step.run = std::move(run);
    steps_.push_back(std::move(step));
}

void Program::require_input(int id, const Matrix& by) {
    Buffer& buffer = buffers[id];
    if (by.quantized() && !buffer.quants) {
        buffer.quants = true;
        if (buffer.producer >= 0 && steps_[buffer.producer].quantizes) return;
        add_form(id, [this, id](const Pass&, int64_t row) {
            const Buffer& found = buffers[id];
            const int64_t size = QuantLayout(found.width).row_bytes();
            for (int64_t r = row * found.copies; r < (row + 1) * found.copies; ++r)
                kernels.quantize(values(id, r), found.width, quants(id) + r * size);
        });
    }
    if ((by.kind == Kind::BF16 || by.kind == Kind::F8) && kernels.to_bf16_row && !buffer.halves) {
        buffer.halves = true;
        add_form(id, [this, id](const Pass&, int64_t row) {
            const Buffer& found = buffers[id];
            for (int64_t r = row * found.copies; r < (row + 1) * found.copies; ++r)
                kernels.to_bf16_row(values(id, r), found.width, halves(id) + r * found.half_stride());
        });
    }
}

void Program::finish(std::vector<std::pair<std::string, int>> outputs) {
    for (Step& each : deferred_) steps_.push_back(std::move(each));
    deferred_.clear();
    outputs_ = std::move(outputs);
    output_memory_.resize(outputs_.size());
    for (size_t i = 0; i < outputs_.size(); ++i) buffers[outputs_[i].second].output = (int)i;
    plan_phases();
    plan_memory();
}

bool Program::joins(const Phase& phase, const Step& step) const {
    if (step.by_rows != phase.by_rows || step.gathers) return false;
    if (step.by_rows) return buffers[step.domain()].logits == phase.logits;
    for (int i = phase.first; i < phase.last; ++i)
        if (share(step.reads, steps_[i].writes) || (step.attends && steps_[i].attends)) return false;
    return true;
}

void Program::plan_phases() {
    for (int i = 0; i < (int)steps_.size(); ++i) {
        const Step& step = steps_[i];
        if (!phases_.empty() && joins(phases_.back(), step)) {
            phases_.back().last = i + 1;
            continue;
        }
        phases_.push_back({i, i + 1, step.by_rows, step.by_rows && buffers[step.domain()].logits, step.label});
    }
}

void Program::plan_memory() {
    // Scratch is reused by buffers of equal size after the last phase that reads the earlier one.
    std::vector<int> last_phase(buffers.size(), -1), first_phase(buffers.size(), -1);
    for (int p = 0; p < (int)phases_.size(); ++p)
        for (int i = phases_[p].first; i < phases_[p].last; ++i) {
            for (int id : steps_[i].reads) last_phase[id] = p;
            for (int id : steps_[i].writes) {
                last_phase[id] = std::max(last_phase[id], p);
                if (first_phase[id] < 0) first_phase[id] = p;
            }
        }
    std::vector<std::pair<int64_t, int64_t>> free; // bytes per row, offset
    auto place = [&](int64_t bytes) {
        for (auto each = free.begin(); each != free.end(); ++each)
            if (each->first == bytes) {
                const int64_t found = each->second;
                free.erase(each);
                return found;
            }
        const int64_t end = bytes_per_row_;
        bytes_per_row_ += bytes;
        return end;
    };
    for (int p = 0; p < (int)phases_.size(); ++p) {
        for (size_t id = 0; id < buffers.size(); ++id) {
            Buffer& buffer = buffers[id];
            if (first_phase[id] != p) continue;
            if (buffer.output < 0) buffer.value_offset = place(buffer.value_bytes());
            if (buffer.quants) buffer.quant_offset = place(buffer.quant_bytes());
            if (buffer.halves) buffer.half_offset = place(buffer.half_bytes());
        }
        for (size_t id = 0; id < buffers.size(); ++id) {
            const Buffer& buffer = buffers[id];
            if (last_phase[id] != p) continue;
            if (buffer.output < 0) free.push_back({buffer.value_bytes(), buffer.value_offset});
            if (buffer.quants) free.push_back({buffer.quant_bytes(), buffer.quant_offset});
            if (buffer.halves) free.push_back({buffer.half_bytes(), buffer.half_offset});
        }
    }
}

uint8_t* Program::scratch(int64_t offset) const { return scratch_ + offset * capacity_; }

uint8_t* Program::output_data(int index) const { return output_memory_[index]->data(); }

void Program::allocate(Arena& arena, const Pass& pass) {
    capacity_ = (std::max(pass.num_rows, pass.num_logits) + 15) / 16 * 16; // aligns every buffer to 64 bytes
    scratch_ = arena.take(bytes_per_row_ * capacity_);
    for (size_t i = 0; i < outputs_.size(); ++i) {
        const Buffer& buffer = buffers[outputs_[i].second];
        if (buffer.output != (int)i) continue; // the buffer has a later name, too
        const int64_t rows = buffer.logits ? pass.num_logits : pass.num_rows, bytes = rows * buffer.stride() * 4;
        if (!output_memory_[i] || output_memory_[i]->size() < bytes)
            output_memory_[i] = std::make_shared<Memory>(bytes);
    }
}

void Program::share_contexts(Pass& pass, int threads) {
    pass.attends.clear();
    int64_t queries = 0, max_splits = 0;
    for (const AttendShape& shape : attends) {
        pass.attends.emplace_back(pass, shape, kernels.max_queries, threads);
        if (pass.attends.back().count.empty()) continue;
        queries = std::max(queries, pass.num_rows * shape.heads * shape.group);
        max_splits = std::max(max_splits, pass.attends.back().max_splits);
    }
    if (max_splits < 2) return;
    const int64_t bytes = queries * max_splits * partial_floats * 4;
    if (!partials_ || partials_->size() < bytes) partials_ = std::make_unique<Memory>(bytes);
    if (num_ended_ >= queries) return;
    ended_ = std::make_unique<std::atomic<int32_t>[]>(queries);
    for (int64_t i = 0; i < queries; ++i) ended_[i].store(0, std::memory_order_relaxed);
    num_ended_ = queries;
}

int64_t Program::num_tasks(const Phase& phase, const Pass& pass) const {
    if (phase.by_rows) return phase.logits ? pass.num_logits : pass.num_rows;
    int64_t count = 0;
    for (int i = phase.first; i < phase.last; ++i) count += steps_[i].num_tasks(pass);
    return count;
}

void Program::run_tasks(const Phase& phase, const Pass& pass, int64_t first, int64_t last) const {
    if (phase.by_rows) {
        for (int64_t row = first; row < last; ++row)
            for (int i = phase.first; i < phase.last; ++i) steps_[i].run(pass, row);
        return;
    }
    for (int i = phase.first; i < phase.last && first < last; ++i) {
        const int64_t count = steps_[i].num_tasks(pass);
        for (int64_t task = first; task < std::min(last, count); ++task) steps_[i].run(pass, task);
        first = std::max<int64_t>(first - count, 0);
        last -= count;
    }
}

void Program::execute(ThreadPool::Turn& turn, const Pass& pass, int thread) {
    const int count = turn.active();
    auto start = profiling ? Clock::now() : Clock::time_point();
    for (size_t p = 0; p < phases_.size(); ++p) {
        Phase& phase = phases_[p];
        const int64_t total = num_tasks(phase, pass);
        const int64_t step = std::max<int64_t>(1, total / (count * 8));
        // Each thread streams its own contiguous share of tasks, then steals from others. Two sets of counters alternate:
        // after a barrier no thread reads the previous phase's.
        Counter* counters = counters_.get() + p % 2 * count;
        for (int i = 0; i < count; ++i) {
            const int owner = turn.steal_from(thread, i);
            const int64_t begin = total * owner / count, end = total * (owner + 1) / count;
            if (begin == end) continue;
            auto& next = counters[owner].next;
            for (;;) {
                if (begin + next.load(std::memory_order_relaxed) >= end) break;
                const int64_t first = begin + next.fetch_add(step, std::memory_order_relaxed);
                if (first >= end) break;
                run_tasks(phase, pass, first, std::min(first + step, end));
            }
        }
        counters_[(p + 1) % 2 * count + thread].next.store(0, std::memory_order_relaxed);
        turn.barrier(thread);
        if (profiling && thread == 0) {
            const auto now = Clock::now();
            phase.seconds += std::chrono::duration<double>(now - start).count();
            start = now;
        }
    }
}

void Program::compute(ThreadPool::Turn& turn, Arena& arena, Pass& pass) {
    allocate(arena, pass);
    const int64_t wanted = 2 * turn.size();
    if (num_counters_ != wanted) {
        counters_ = std::make_unique<Counter[]>(wanted);
        num_counters_ = wanted;
    }
    for (int64_t i = 0; i < wanted; ++i) counters_[i].next.store(0, std::memory_order_relaxed);
    int32_t furthest = *std::max_element(pass.positions, pass.positions + pass.num_rows);
    if (const int32_t* at = pass.rope_positions)
        furthest = std::max(furthest, *std::max_element(at, at + pass.num_rows * kRopeAxes));
    for (auto& rope : ropes) rope->reach(furthest);
    for (auto& routing : routings) routing->reach(pass.num_rows);
    scores.reach(pass);
    share_contexts(pass, turn.active());
    if (turn.pool().num_nodes() > 1) place_keys(turn, written, pass);
    const auto start = Clock::now();
    turn.run([&](int thread) { execute(turn, pass, thread); });
    turn.record_run(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count());
}

int Program::output(const std::string& name) const {
    for (const auto& each : outputs_)
        if (each.first == name) return each.second;
    return -1;
}

nb::dict Program::run(ThreadPool& threads, Arena& arena, Pass& pass) {
    {
        nb::gil_scoped_release released;
        ThreadPool::Turn turn(threads);
        compute(turn, arena, pass);
    }
    nb::dict found;
    for (size_t i = 0; i < outputs_.size(); ++i) {
        const Buffer& buffer = buffers[outputs_[i].second];
        auto* keep = new std::shared_ptr<Memory>(output_memory_[buffer.output]);
        nb::capsule owner(keep, [](void* p) noexcept { delete static_cast<std::shared_ptr<Memory>*>(p); });
        const size_t shape[2] = {(size_t)(buffer.logits ? pass.num_logits : pass.num_rows), (size_t)buffer.width};
        const int64_t strides[2] = {buffer.stride(), 1};
        found[outputs_[i].first.c_str()] =
            nb::ndarray<nb::numpy, float>(output_memory_[buffer.output]->data(), 2, shape, owner, strides);
    }
    return found;
}

nb::dict Program::profile(bool reset) {
    nb::dict found;
    for (Phase& phase : phases_) {
        const char* label = phase.label.c_str();
        found[label] = (found.contains(label) ? nb::cast<double>(found[label]) : 0.0) + phase.seconds;
        if (reset) phase.seconds = 0;
    }
    return found;
}

} // namespace headstart
