// Recorded steps of sparse attention: an indexer scores positions, and each row attends to its top_k.
//
// A row's selected positions are copied, in order, to scratch tiles and attended as a sequence of their own, so results do
// not depend on slots. A row that sees at most top_k positions skips this and runs dense attention.
#include <algorithm>
#include <functional>

#include "tiles.h"

namespace headstart {
namespace {

constexpr int64_t kSplit = 1024; // positions scored by one task
constexpr int64_t kTilesPerTask = 8;   // query tiles of one row per task: they share the gathered tiles

int64_t num_visible(const Pass& pass, int64_t row) { return pass.sees[row] + 1 - pass.first_position; }

int score(Program& program, int q, int weights, nb::object kv_pool, int64_t heads, int64_t top_k, int64_t every) {
    KVPool* pool = nb::cast<KVPool*>(kv_pool);
    program.limits.reach(program.limits.table_slots, pool->num_slots);
    program.scores.wanted = true;
    const int scored = program.buffer(0, false);
    Step step;
    step.label = "attention";
    step.reads = {q, weights};
    step.writes = {scored};
    step.owners = {kv_pool};
    step.num_tasks = [&program](const Pass& pass) {
        return pass.num_rows * ((program.scores.width + kSplit - 1) / kSplit);
    };
    step.run = [&program, pool, q, weights, heads, top_k, every](const Pass& pass, int64_t index) {
        const int64_t parts = (program.scores.width + kSplit - 1) / kSplit, row = index / parts;
        if (num_visible(pass, row) / every <= top_k) return;
        IndexTask task{};
        static_cast<Tiles&>(task) = tiles_of(*pool, pass, pass.row_spans[row], 0);
        gather_path(*pool, pass, row, task);
        task.num_heads = heads;
        task.begin = index % parts * kSplit;
        task.end = std::min<int64_t>(task.begin + kSplit, pass.sees[row] + 1);
        task.queries = program.values(q, row);
        task.weights = program.values(weights, row);
        task.scores = program.scores.row(row);
        program.kernels.index_scores(task);
    };
    program.add(std::move(step));
    return scored;
}

// Indices of the top_k best scores + `first`, ascending; ties go to lower indices.
void top_indices(const float* scores, int64_t count, int64_t top_k, int32_t first, int32_t* places) {
    thread_local std::vector<float> sorted;
    sorted.assign(scores, scores + count);
    std::nth_element(sorted.begin(), sorted.begin() + (top_k - 1), sorted.end(), std::greater<float>());
    const float least = sorted[top_k - 1];
    int64_t equal = top_k - std::count_if(sorted.begin(), sorted.begin() + top_k, [&](float each) { return each > least; });
    for (int64_t i = 0; i < count; ++i)
        if (scores[i] > least || (scores[i] == least && equal-- > 0)) *places++ = first + (int32_t)i;
}

// The positions of `count` windows, given by their indices in `picked`, then those behind the last whole window.
int64_t whole_windows(const std::vector<int32_t>& picked, int64_t every, int64_t first, int64_t visible, int32_t* places) {
    int64_t found = 0;
    for (int32_t window : picked)
        for (int64_t i = 0; i < every; ++i) places[found++] = (int32_t)(first + window * every + i);
    for (int64_t i = visible / every * every; i < visible; ++i) places[found++] = (int32_t)(first + i);
    return found;
}

// Returns a buffer of int32 rows: number of selected positions, then the positions, which are left out if all are selected.
// Windows of `every` positions are selected by the scores of their last ones; whole: with all their positions.
int choose(Program& program, int q, int weights, nb::object kv_pool, int64_t heads, int64_t top_k, int64_t every,
           bool whole) {
    const KVLayout layout = nb::cast<KVPool*>(kv_pool)->layout;
    require(heads > 0 && top_k > 0 && layout.num_heads == 1 && program.buffers[q].width == heads * layout.head_dim &&
                program.buffers[weights].width == heads && !program.buffers[q].logits,
            "choose: shapes differ");
    require(every > 0, "choose: every must be above 0");
    const int scored = score(program, q, weights, kv_pool, heads, top_k, every);
    const int chosen = program.buffer(whole ? (top_k + 1) * every : top_k + 1, false);
    Step step;
    step.label = "attention";
    step.reads = {scored};
    step.writes = {chosen};
    step.by_rows = true;
    step.run = [&program, chosen, top_k, every, whole](const Pass& pass, int64_t row) {
        auto* found = reinterpret_cast<int32_t*>(program.values(chosen, row));
        const int64_t count = num_visible(pass, row) / every, first = pass.first_position;
        *found = (int32_t)(whole && count <= top_k ? num_visible(pass, row) : std::min(count, top_k));
        if (count <= top_k) return;
        float* scores = program.scores.row(row) + first;
        for (int64_t i = 0; every > 1 && i < count; ++i) scores[i] = scores[(i + 1) * every - 1];
        if (whole) {
            thread_local std::vector<int32_t> picked;
            picked.resize(top_k);
            top_indices(scores, count, top_k, 0, picked.data());
            *found = (int32_t)whole_windows(picked, every, first, num_visible(pass, row), found + 1);
            return;
        }
        top_indices(scores, count, top_k, (int32_t)first, found + 1);
        for (int64_t i = 1; every > 1 && i <= top_k; ++i) found[i] = (int32_t)((found[i] + 1) * every - 1);
    };
    program.add(std::move(step));
    return chosen;
}

// Copies a row's selected positions to scratch tiles, one after another from the first position on.
void gather_chosen(const KVPool& pool, const Pass& pass, int64_t row, const int32_t* places, int64_t count, Tiles& tiles) {
    const int64_t bytes = pool.layout.tile_bytes(), first = pass.first_position;
    thread_local std::vector<uint8_t> scratch;
    scratch.resize(((first + count - 1) / 16 + 1) * bytes);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t slot = slot_of(tiles, pass, row, places[i]), at = first + i;
        copy_lane(pool.layout, pool.tile(slot, tiles.kv_head), slot % 16, scratch.data() + at / 16 * bytes, at % 16);
    }
    tiles.scratch = scratch.data();
    tiles.scratch_from = 0;
}

int attend_chosen(Program& program, int q, nb::object kv_pool, int64_t num_heads, float scale, float softcap,
                  std::optional<Sinks> sinks, int chosen) {
    AttendTask common;
    Step step = attend_step(program, q, kv_pool, num_heads, scale, softcap, sinks, common);
    const KVPool* pool = nb::cast<KVPool*>(kv_pool);
    const int out = step.writes[0];
    const int64_t together = program.kernels.max_queries * kTilesPerTask;
    const int64_t parts = (common.group + together - 1) / together, each = parts * pool->layout.num_heads;
    step.reads.push_back(chosen);
    step.num_tasks = [each](const Pass& pass) { return pass.num_rows * each; };
    step.run = [&program, pool, common, q, out, chosen, parts, each, together,
                own = step.quantizes](const Pass& pass, int64_t index) {
        const int64_t row = index / each;
        const auto* found = reinterpret_cast<const int32_t*>(program.values(chosen, row));
        AttendTask task = common;
        static_cast<Tiles&>(task) = tiles_of(*pool, pass, pass.row_spans[row], index % each / parts);
        if (*found < num_visible(pass, row))
            gather_chosen(*pool, pass, row, found + 1, *found, task);
        else
            gather_path(*pool, pass, row, task);
        const int32_t sees = (int32_t)pass.first_position + *found - 1;
        task.positions = task.sees = &sees; // the task has one row
        task.first_position = pass.first_position;
        task.queries = program.values(q, row);
        task.query_stride = program.buffers[q].stride();
        task.out = program.output(out).from_row(row);
        if (!own) task.out.quants = nullptr;
        attend_part(program, task, index % parts, together);
    };
    program.add(std::move(step));
    return out;
}

} // namespace

void bind_choice_steps(nb::class_<Program>& program) {
    program.def("choose", choose)
        .def("attend_chosen", attend_chosen, nb::arg("q"), nb::arg("pool"), nb::arg("num_heads"), nb::arg("scale"),
             nb::arg("softcap"), nb::arg("sinks").none(), nb::arg("chosen"));
}

} // namespace headstart
