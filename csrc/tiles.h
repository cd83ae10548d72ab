// Lookup and gathering of KV tiles for attention tasks; the common part of attention steps.
#pragma once

#include "program.h"

namespace headstart {

// Copies one position's key and value: lane `from` of a tile to lane `to` of another.
void copy_lane(const KVLayout& layout, const uint8_t* source, int64_t from, uint8_t* target, int64_t to);

// The tiles of a span's sequence and one KV head, from its block table.
Tiles tiles_of(const KVPool& pool, const Pass& pass, int64_t span, int64_t kv_head);

// The same without a pool: for slot_of alone.
Tiles blocks_of(const Pass& pass, int64_t span);

// Slot of a position for a row: on the row's path (tree drafts), else in its sequence's blocks.
int64_t slot_of(const Tiles& tiles, const Pass& pass, int64_t row, int64_t position);

// Copies the tiles of a tree row's last positions to scratch, each position in the lane it would have in its sequence,
// because results depend on the lane. Valid until this thread's next call.
void gather_path(const KVPool& pool, const Pass& pass, int64_t row, Tiles& tiles);

using Sinks = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A validated attention step without tasks; its output buffer is writes[0]. common: the fields equal in all its tasks.
Step attend_step(Program& program, int q, const nb::object& kv_pool, int64_t num_heads, float scale, float softcap,
                 const std::optional<Sinks>& sinks, AttendTask& common);

// Runs queries part * together .. of a one-row task, at most max_queries per kernel call; they share gathered tiles.
void attend_part(const Program& program, AttendTask& task, int64_t part, int64_t together);

// attend_part for the queries (buffer q) of one row, whose last visible position is visible_end.
void attend_row(Program& program, AttendTask& task, int q, int out, bool quantizes, int64_t row, int32_t visible_end,
                int64_t part, int64_t together);

} // namespace headstart
