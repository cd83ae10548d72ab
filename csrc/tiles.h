// Keys and values of single positions, brought to where a task finds them.
#pragma once

#include "program.h"

namespace headstart {

// The key and value of one position: lane `from` of one tile to lane `to` of another.
void copy_lane(const KVLayout& layout, const uint8_t* source, int64_t from, uint8_t* target, int64_t to);

// The pool's tiles of one kv head of the sequence of `row`, by its block table alone.
Tiles tiles_of(const KVPool& pool, const Pass& pass, int64_t span, int64_t kv_head);

// Its blocks alone, of no pool.
Tiles blocks_of(const Pass& pass, int64_t span);

// Where a position of a row lies: on its path, or in its sequence's blocks.
int64_t slot_of(const Tiles& tiles, const Pass& pass, int64_t row, int64_t position);

// The tiles of a row's last positions as if they lay where they belong, from its path and, before that, its sequence's
// blocks: bits depend on a position's place in its tile. They hold until this thread gathers the next.
void gather_path(const KVPool& pool, const Pass& pass, int64_t row, Tiles& tiles);

using Sinks = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A step of attention without its tasks, checked; its result is writes[0]. `common`: what all its tasks share.
Step attend_step(Program& program, int q, const nb::object& kv_pool, int64_t num_heads, float scale, float softcap,
                 const std::optional<Sinks>& sinks, AttendTask& common);

// Queries `part` * together .. of a task of one row, as many at a time as the path takes: they share what was gathered.
void attend_part(const Program& program, AttendTask& task, int64_t part, int64_t together);

} // namespace headstart
