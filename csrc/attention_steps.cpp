// Recorded steps of dense attention: store_kv and attend.
#include <algorithm>

#include "program.h"
#include "tiles.h"

namespace headstart {
namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Copies keys and values of slots `sources` to slots `targets`; reads all before it writes.
void copy_rows(KVPool& pool, Ints sources, Ints targets) {
    const int64_t count = (int64_t)sources.size(), bytes = pool.layout.tile_bytes();
    require((int64_t)targets.size() == count, "copy_rows: sources and targets differ in length");
    for (const Ints& slots : {sources, targets})
        for (int64_t i = 0; i < count; ++i)
            require(slots.data()[i] >= 0 && slots.data()[i] < pool.num_slots, "copy_rows: a slot is outside the pool");
    std::vector<uint8_t> kept((count + 15) / 16 * bytes);
    for (int64_t head = 0; head < pool.layout.num_heads; ++head) {
        for (int64_t i = 0; i < count; ++i) {
            const int64_t slot = sources.data()[i];
            copy_lane(pool.layout, pool.tile(slot, head), slot % 16, kept.data() + i / 16 * bytes, i % 16);
        }
        for (int64_t i = 0; i < count; ++i) {
            const int64_t slot = targets.data()[i];
            copy_lane(pool.layout, kept.data() + i / 16 * bytes, i % 16, pool.tile(slot, head), slot % 16);
        }
    }
}

// v -1: the pool stores no values.
void store_kv(Program& program, int k, int v, nb::object kv_pool) {
    KVPool* pool = nb::cast<KVPool*>(kv_pool);
    const KVLayout layout = pool->layout;
    require(program.buffers[k].width == layout.num_heads * layout.head_dim &&
                (v < 0 ? layout.value_dim == 0 : program.buffers[v].width == layout.num_heads * layout.value_dim),
            "store_kv: shapes differ");
    program.limits.reach(program.limits.slots, pool->num_slots);
    program.written.push_back(pool);
    Step step;
    step.label = "rows";
    step.reads = {k};
    if (v >= 0) step.reads.push_back(v);
    step.by_rows = true;
    step.owners = {kv_pool};
    step.run = [&program, pool, layout, k, v](const Pass& pass, int64_t row) {
        program.kernels.store_kv(program.values(k, row), program.values(v < 0 ? k : v, row), pool->memory.data(),
                                 layout, pass.slots[row]);
    };
    program.add(std::move(step));
}

size_t shape_index(Program& program, const AttendShape& shape) {
    auto found = std::find(program.attends.begin(), program.attends.end(), shape);
    if (found == program.attends.end()) found = program.attends.insert(found, shape);
    return found - program.attends.begin();
}

int attend(Program& program, int q, nb::object kv_pool, int64_t num_heads, float scale, int64_t window, float softcap,
           std::optional<Sinks> sinks, bool causal, bool before, int64_t chunk, int bias, bool block_window) {
    require(window >= 0 && chunk >= 0, "attend: window and chunk must be 0 or above");
    require(!window || !chunk, "attend: window and chunk cannot be combined");
    require(window || !block_window, "attend: block_window needs a window");
    AttendTask common;
    Step step = attend_step(program, q, kv_pool, num_heads, scale, softcap, sinks, common);
    common.window = block_window ? 0 : window;
    common.chunk = chunk;
    common.num_masked = before;
    if (bias >= 0) {
        common.extent = program.buffers[bias].width / num_heads;
        require(common.extent * num_heads == program.buffers[bias].width, "attend: needs equally many biases per head");
        step.reads.push_back(bias);
    }
    const KVPool* pool = nb::cast<KVPool*>(kv_pool);
    const int out = step.writes[0];
    const size_t shape = shape_index(program, {common.group, pool->layout.num_heads, window, chunk, block_window});
    program.partial_floats = std::max(program.partial_floats, pool->layout.padded_value() + 16);
    step.attends = true;
    step.num_tasks = [shape](const Pass& pass) { return pass.attends[shape].before.back(); };
    step.run = [&program, pool, common, shape, q, bias, out, sees_itself = causal || before, quantizes = step.quantizes,
                block = block_window ? window : 0](const Pass& pass, int64_t index) {
        const AttendTasks& tasks = pass.attends[shape];
        const auto& before = tasks.before;
        const int64_t heads = pool->layout.num_heads;
        const int64_t unit = std::upper_bound(before.begin(), before.end(), index) - before.begin() - 1;
        const int64_t splits = tasks.count.empty() ? 1 : tasks.count[unit];
        const int64_t tiles = (before[unit + 1] - before[unit]) / splits / heads;
        const int64_t of_head = (index - before[unit]) % (splits * tiles), split = of_head / tiles;
        const int64_t tile = of_head % tiles, head = (index - before[unit]) / (splits * tiles);
        const int64_t row = pass.unit_starts[unit], queries = (pass.unit_starts[unit + 1] - row) * common.group;
        AttendTask task = common;
        static_cast<Tiles&>(task) = tiles_of(*pool, pass, pass.span_of(unit), head);
        task.positions = pass.positions;
        task.visible_start = pass.visible_start;
        task.visible_end = sees_itself ? pass.positions : pass.visible_end;
        task.first_row = row;
        task.first_query = queries * tile / tiles;
        task.num_queries = queries * (tile + 1) / tiles - task.first_query;
        task.first_position =
            block ? std::max(pass.first_position, pass.block_start(unit) - block + 1) : pass.first_position;
        task.queries = program.values(q, 0);
        task.query_stride = program.buffers[q].stride();
        if (bias >= 0) {
            task.bias = program.values(bias, 0);
            task.bias_stride = program.buffers[bias].stride();
        }
        task.out = program.output(out);
        if (!quantizes) task.out.quants = nullptr;
        gather_path(*pool, pass, row, task);
        if (splits == 1) return program.kernels.attend(task);
        task.split = tasks.first[unit] + split;
        task.partials = program.partials();
        task.num_splits = tasks.max_splits;
        program.kernels.attend(task);
        std::atomic<int32_t>& ended = program.ended(row * heads * common.group + head * tiles + tile);
        if (ended.fetch_add(1, std::memory_order_acq_rel) + 1 < splits) return;
        ended.store(0, std::memory_order_relaxed); // for the next layer, which runs after a barrier
        program.kernels.join(task);
    };
    program.add(std::move(step));
    return out;
}

} // namespace

Step attend_step(Program& program, int q, const nb::object& kv_pool, int64_t num_heads, float scale, float softcap,
                 const std::optional<Sinks>& sinks, AttendTask& common) {
    KVPool* pool = nb::cast<KVPool*>(kv_pool);
    const int64_t dim = pool->layout.value_dim, group = num_heads / pool->layout.num_heads;
    require(dim <= kMaxValueDim, "attend: value dimensions above 512 are not supported");
    require(num_heads == group * pool->layout.num_heads &&
                program.buffers[q].width == num_heads * pool->layout.head_dim,
            "attend: shapes differ");
    require(softcap >= 0, "attend: softcap must be 0 or above");
    require(!sinks || (int64_t)sinks->size() == num_heads, "attend: needs one sink per query head");
    program.limits.reach(program.limits.table_slots, pool->num_slots);
    common = AttendTask{};
    common.group = group;
    common.scale = scale;
    common.softcap = softcap;
    common.sinks = sinks ? sinks->data() : nullptr;
    Step step;
    step.label = "attention";
    step.reads = {q};
    step.writes = {program.buffer(num_heads * dim, false)};
    step.quantizes = dim % 32 == 0 && num_heads * dim % kPanel == 0;
    step.owners = {kv_pool, nb::cast(sinks)};
    return step;
}

void bind_attention_steps(nb::module_& m, nb::class_<Program>& program) {
    nb::class_<KVPool>(m, "KVPool")
        .def("__init__",
             [](KVPool* self, int64_t num_slots, int64_t num_heads, int64_t head_dim, int64_t value_dim, int store) {
                 new (self) KVPool(num_slots, num_heads, head_dim, value_dim, static_cast<Store>(store));
             })
        .def("copy_rows", copy_rows)
        .def_prop_ro("slot_bytes", &KVPool::slot_bytes)
        .def("slots", [](nb::handle self, int64_t first, int64_t count) {
            const KVPool& pool = nb::cast<const KVPool&>(self);
            return slots_of(self, pool.memory, pool.slot_bytes(), 16, first, count);
        });
    program.def("store_kv", store_kv);
    program.def("attend", attend, nb::arg("q"), nb::arg("pool"), nb::arg("num_heads"), nb::arg("scale"),
                nb::arg("window"), nb::arg("softcap"), nb::arg("sinks").none(), nb::arg("causal") = false,
                nb::arg("before") = false, nb::arg("chunk") = 0, nb::arg("bias") = -1,
                nb::arg("block_window") = false);
}

} // namespace headstart
