#include "tiles.h"

#include <algorithm>

namespace headstart {

namespace {

// Copies `count` items, `step` items apart, from index `from` to index `to`.
template <class Item>
void copy_every(const uint8_t* source, int64_t from, uint8_t* target, int64_t to, int64_t step, int64_t count) {
    const Item* read = reinterpret_cast<const Item*>(source) + from;
    Item* write = reinterpret_cast<Item*>(target) + to;
    for (int64_t i = 0; i < count; ++i) write[i * step] = read[i * step];
}

} // namespace

void copy_lane(const KVLayout& layout, const uint8_t* source, int64_t from, uint8_t* target, int64_t to) {
    const int64_t values = layout.values_at(), wide = layout.padded_value();
    switch (layout.store) {
    case Store::F32:
        copy_every<uint32_t>(source, from, target, to, 16, layout.head_dim);
        copy_every<uint32_t>(source + values, from * wide, target + values, to * wide, 1, wide);
        break;
    case Store::BF16: // keys in pairs of dimensions, values in pairs of lanes
        copy_every<uint32_t>(source, from, target, to, 16, (layout.head_dim + 1) / 2);
        copy_every<uint16_t>(source + values, layout.value_at(from, 0), target + values, layout.value_at(to, 0), 2, wide);
        break;
    case Store::I8:
    case Store::F8:
        copy_every<uint8_t>(source, from, target, to, 16, layout.head_dim);
        copy_every<uint8_t>(source + values, from * wide, target + values, to * wide, 1, wide);
        // key scale, value scale
        copy_every<uint32_t>(source + layout.scales_at(), from, target + layout.scales_at(), to, 16, 2);
        break;
    }
}

Tiles tiles_of(const KVPool& pool, const Pass& pass, int64_t span, int64_t kv_head) {
    return {pool.memory.data(), pool.layout, pass.block_tables + span * pass.table_width, pass.block_size, kv_head,
            nullptr,            INT64_MAX};
}

Tiles blocks_of(const Pass& pass, int64_t span) {
    Tiles blocks{};
    blocks.block_table = pass.block_tables + span * pass.table_width;
    blocks.block_size = pass.block_size;
    return blocks;
}

int64_t slot_of(const Tiles& tiles, const Pass& pass, int64_t row, int64_t position) {
    if (pass.path_starts) {
        const int64_t back = pass.positions[row] - position, end = pass.path_starts[row + 1];
        if (back >= 0 && back < end - pass.path_starts[row]) return pass.path_slots[end - 1 - back];
    }
    return tiles.slot_of(position);
}

void gather_path(const KVPool& pool, const Pass& pass, int64_t row, Tiles& tiles) {
    if (!pass.path_starts || pass.path_starts[row + 1] == pass.path_starts[row]) return;
    const int64_t bytes = pool.layout.tile_bytes(), last = pass.positions[row];
    const int64_t from = (last - (pass.path_starts[row + 1] - pass.path_starts[row]) + 1) / 16 * 16;
    thread_local std::vector<uint8_t> scratch;
    scratch.resize((last / 16 - from / 16 + 1) * bytes);
    for (int64_t position = from; position <= last; ++position) {
        const int64_t slot = slot_of(tiles, pass, row, position);
        copy_lane(pool.layout, pool.tile(slot, tiles.kv_head), slot % 16,
                  scratch.data() + (position - from) / 16 * bytes, position % 16);
    }
    tiles.scratch = scratch.data();
    tiles.scratch_from = from;
}

void attend_part(const Program& program, AttendTask& task, int64_t part, int64_t together) {
    const int64_t most = program.kernels.max_queries, end = std::min((part + 1) * together, task.group);
    for (int64_t first = part * together; first < end; first += most) {
        task.first_query = first;
        task.num_queries = std::min(most, end - first);
        program.kernels.attend(task);
    }
}

void attend_row(Program& program, AttendTask& task, int q, int out, bool quantizes, int64_t row, int32_t visible_end,
                int64_t part, int64_t together) {
    task.positions = task.visible_end = &visible_end;
    task.queries = program.values(q, row);
    task.query_stride = program.buffers[q].stride();
    task.out = program.output(out).from_row(row);
    if (!quantizes) task.out.quants = nullptr;
    attend_part(program, task, part, together);
}

} // namespace headstart
