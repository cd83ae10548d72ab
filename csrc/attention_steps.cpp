// Recorded steps of attention: keys and values into their pool, queries over what is there.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "program.h"

namespace headstart {
namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

// The key and value of one position: lane `from` of one tile to lane `to` of another.
void copy_lane(const KVLayout& layout, const uint8_t* source, int64_t from, uint8_t* target, int64_t to) {
    const int64_t item = layout.item(), values = layout.values_at();
    for (int64_t d = 0; d < layout.head_dim; ++d)
        std::memcpy(target + layout.key_at(d, to) * item, source + layout.key_at(d, from) * item, item);
    for (int64_t d = 0; d < layout.padded_value(); ++d)
        std::memcpy(target + values + layout.value_at(to, d) * item, source + values + layout.value_at(from, d) * item,
                    item);
    if (layout.store != Store::I8) return;
    for (const int64_t scales : {layout.scales_at(), layout.scales_at() + 64}) // of keys, of values
        std::memcpy(target + scales + to * 4, source + scales + from * 4, 4);
}

// Rows of slots `sources` to slots `targets`, as if all at once.
void copy_rows(KVPool& pool, Ints sources, Ints targets) {
    const int64_t count = (int64_t)sources.size(), bytes = pool.layout.tile_bytes();
    require((int64_t)targets.size() == count, "copy_rows: as many targets as sources");
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

void store_kv(Program& program, int k, int v, nb::object kv_pool) {
    KVPool* pool = nb::cast<KVPool*>(kv_pool);
    const KVLayout layout = pool->layout;
    require(program.buffers[k].width == layout.num_heads * layout.head_dim &&
                program.buffers[v].width == layout.num_heads * layout.value_dim,
            "store_kv: shapes differ");
    program.limits.reach(program.limits.slots, pool->num_slots);
    Step step;
    step.label = "rows";
    step.reads = {k, v};
    step.by_rows = true;
    step.owners = {kv_pool};
    step.run = [&program, pool, layout, k, v](const Pass& pass, int64_t row) {
        program.kernels.store_kv(program.values(k, row), program.values(v, row), pool->memory.data(), layout,
                                 pass.slots[row]);
    };
    program.add(std::move(step));
}

size_t group_index(Program& program, int64_t group) {
    auto found = std::find(program.groups.begin(), program.groups.end(), group);
    if (found == program.groups.end()) found = program.groups.insert(found, group);
    return found - program.groups.begin();
}

// The tiles of a row's last positions as if they lay where they belong, from its path and, before that, its sequence's
// blocks: bits depend on a position's place in its tile.
void gather_path(const KVPool& pool, const Pass& pass, int64_t row, AttendTask& task) {
    const int64_t count = pass.path_starts[row + 1] - pass.path_starts[row], bytes = pool.layout.tile_bytes();
    if (count == 0) return;
    const int32_t* path = pass.path_slots + pass.path_starts[row];
    const int64_t last = pass.positions[row], first = last - count + 1;
    task.scratch_from = first / 16 * 16;
    thread_local std::vector<uint8_t> scratch;
    scratch.resize((last / 16 - task.scratch_from / 16 + 1) * bytes);
    for (int64_t position = task.scratch_from; position <= last; ++position) {
        const int64_t slot = position >= first ? path[position - first]
                                               : (int64_t)task.block_table[position / pass.block_size] *
                                                         pass.block_size + position % pass.block_size;
        copy_lane(pool.layout, pool.tile(slot, task.kv_head), slot % 16,
                  scratch.data() + (position - task.scratch_from) / 16 * bytes, position % 16);
    }
    task.scratch = scratch.data();
}

int attend(Program& program, int q, nb::object kv_pool, int64_t num_heads, float scale, int64_t window, float softcap,
           std::optional<Floats> sinks, bool causal, bool before, int64_t chunk) {
    KVPool* pool = nb::cast<KVPool*>(kv_pool);
    const KVLayout layout = pool->layout;
    const int64_t dim = layout.value_dim, group = num_heads / layout.num_heads;
    require(dim <= kMaxValueDim, "attend: values of more than 512 are not supported");
    require(num_heads == group * layout.num_heads && program.buffers[q].width == num_heads * layout.head_dim,
            "attend: shapes differ");
    require(window >= 0 && softcap >= 0 && chunk >= 0, "attend: a window, chunk or softcap below 0");
    require(!window || !chunk, "attend: a window and chunks");
    require(!sinks || (int64_t)sinks->size() == num_heads, "attend: not one sink for each head");
    program.limits.reach(program.limits.table_slots, pool->num_slots);
    const int out = program.buffer(num_heads * dim, false);
    Step step;
    step.label = "attention";
    step.reads = {q};
    step.writes = {out};
    step.quantizes = dim % 32 == 0 && num_heads * dim % kPanel == 0;
    step.owners = {kv_pool, nb::cast(sinks)};
    const size_t tiles_of = group_index(program, group);
    step.num_tasks = [tiles_of, layout](const Pass& pass) { return pass.tiles[tiles_of].back() * layout.num_heads; };
    AttendTask common{}; // what all tasks share
    common.layout = layout;
    common.group = group;
    common.window = window;
    common.chunk = chunk;
    common.scale = scale;
    common.softcap = softcap;
    common.unseen = before;
    common.sinks = sinks ? sinks->data() : nullptr;
    common.scratch_from = INT64_MAX;
    step.run = [&program, pool, common, tiles_of, q, out, own_last = causal || before,
                own = step.quantizes](const Pass& pass, int64_t index) {
        const auto& before = pass.tiles[tiles_of]; // tasks go by unit, then kv head, then tile
        const int64_t heads = common.layout.num_heads;
        const int64_t unit = std::upper_bound(before.begin(), before.end(), index / heads) - before.begin() - 1;
        const int64_t tiles = before[unit + 1] - before[unit], tile = index - before[unit] * heads;
        const int64_t row = pass.unit_starts[unit], queries = (pass.unit_starts[unit + 1] - row) * common.group;
        AttendTask task = common;
        task.pool = pool->memory.data();
        task.block_table = pass.block_tables + (pass.unit_spans ? pass.unit_spans[unit] : unit) * pass.table_width;
        task.block_size = pass.block_size;
        task.positions = pass.positions;
        task.sees = own_last ? pass.positions : pass.sees;
        task.first_row = row;
        task.kv_head = tile / tiles;
        task.first_query = queries * (tile % tiles) / tiles;
        task.num_queries = queries * (tile % tiles + 1) / tiles - task.first_query;
        task.first_position = pass.first_position;
        task.queries = program.values(q, 0);
        task.query_stride = program.buffers[q].stride();
        task.out = program.output(out);
        if (!own) task.out.quants = nullptr;
        if (pass.path_starts) gather_path(*pool, pass, row, task);
        program.kernels.attend(task);
    };
    program.add(std::move(step));
    return out;
}

} // namespace

void bind_attention_steps(nb::module_& m, nb::class_<Program>& program) {
    nb::class_<KVPool>(m, "KVPool")
        .def("__init__",
             [](KVPool* self, int64_t num_slots, int64_t num_heads, int64_t head_dim, int64_t value_dim, int store) {
                 new (self) KVPool(num_slots, num_heads, head_dim, value_dim, static_cast<Store>(store));
             })
        .def("copy_rows", copy_rows);
    program.def("store_kv", store_kv);
    program.def("attend", attend, nb::arg("q"), nb::arg("pool"), nb::arg("num_heads"), nb::arg("scale"),
                nb::arg("window"), nb::arg("softcap"), nb::arg("sinks").none(), nb::arg("causal") = false,
                nb::arg("before") = false, nb::arg("chunk") = 0);
}

} // namespace headstart
