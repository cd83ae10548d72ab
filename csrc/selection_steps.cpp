// Recorded steps of sparse attention: an indexer scores positions or blocks of them, and each row attends to its top_k.
//
// A row's selected positions are copied, in order, to scratch tiles and attended as a sequence of their own, so results do
// not depend on slots. A row that sees at most top_k positions skips this and runs dense attention.
#include <algorithm>
#include <cmath>
#include <functional>

#include "tiles.h"

namespace headstart {
namespace {

constexpr int64_t kSplit = 1024; // positions scored by one task
constexpr int64_t kTilesPerTask = 8;   // query tiles of one row per task: they share the gathered tiles

int64_t num_visible(const Pass& pass, int64_t row) { return pass.visible_end[row] + 1 - pass.first_position; }

// Scores of windows for each group of heads: scores.row(row)[group * windows + window]. With weights (-1: none) the score of
// a window is that of its last position, else the greatest of its visible positions. windows(pass, row): number of windows of
// a row. dense_limit: rows with at most this many windows attend to all of them and get no scores.
template <class Windows>
int score(Program& program, int q, int weights, nb::object kv_pool, int64_t heads, int64_t groups, int64_t dense_limit,
          int64_t window_size, Windows windows) {
    KVPool* pool = nb::cast<KVPool*>(kv_pool);
    program.limits.reach(program.limits.table_slots, pool->num_slots);
    program.scores.wanted = true;
    const int scored = program.buffer(0, false);
    const int64_t per_task = std::max<int64_t>(kSplit / window_size, 1); // windows scored by one task
    Step step;
    step.label = "attention";
    step.reads = {q};
    if (weights >= 0) step.reads.push_back(weights);
    step.writes = {scored};
    step.owners = {kv_pool};
    const auto num_parts = [&program, each = per_task * window_size] { return (program.scores.width + each - 1) / each; };
    step.num_tasks = [num_parts](const Pass& pass) { return pass.num_rows * num_parts(); };
    step.run = [&program, pool, q, weights, heads, groups, dense_limit, window_size, windows, per_task,
                num_parts](const Pass& pass, int64_t index) {
        const int64_t parts = num_parts(), row = index / parts, count = windows(pass, row);
        const int64_t begin = index % parts * per_task, end = std::min(begin + per_task, count);
        if (count <= dense_limit || begin >= end) return;
        const int64_t first = pass.first_position;
        thread_local std::vector<float> scores;
        IndexTask task{};
        static_cast<Tiles&>(task) = tiles_of(*pool, pass, pass.row_spans[row], 0);
        gather_path(*pool, pass, row, task);
        task.num_heads = heads / groups;
        task.begin = (first + begin * window_size) / 16 * 16;
        task.end = std::min<int64_t>(first + end * window_size, pass.visible_end[row] + 1);
        scores.resize((task.end - task.begin + 15) / 16 * 16);
        task.scores = scores.data();
        for (int64_t group = 0; group < groups; ++group) {
            task.queries = program.values(q, row) + group * task.num_heads * pool->layout.head_dim;
            task.weights = weights < 0 ? nullptr : program.values(weights, row) + group * task.num_heads;
            program.kernels.index_scores(task);
            float* out = program.scores.row(row) + group * count;
            for (int64_t window = begin; window < end; ++window) {
                const int64_t start = first + window * window_size, stop = std::min(start + window_size, task.end);
                const float* from = scores.data() - task.begin;
                out[window] = weights < 0 ? *std::max_element(from + start, from + stop) : from[stop - 1];
            }
        }
    };
    program.add(std::move(step));
    return scored;
}

// Indices of the top_k best scores, ascending; ties go to lower indices.
void top_indices(const float* scores, int64_t count, int64_t top_k, int32_t* indices) {
    thread_local std::vector<float> sorted;
    sorted.assign(scores, scores + count);
    std::nth_element(sorted.begin(), sorted.begin() + (top_k - 1), sorted.end(), std::greater<float>());
    const float threshold = sorted[top_k - 1];
    int64_t equal = top_k - std::count_if(sorted.begin(), sorted.begin() + top_k, [&](float each) { return each > threshold; });
    for (int64_t i = 0; i < count; ++i)
        if (scores[i] > threshold || (scores[i] == threshold && equal-- > 0)) *indices++ = (int32_t)i;
}

// The positions of the windows in `picked`, then the visible ones after the first `count` windows.
int64_t whole_windows(const std::vector<int32_t>& picked, int64_t count, int64_t window_size, int64_t first, int64_t visible,
                      int32_t* positions) {
    int64_t found = 0;
    for (int32_t window : picked)
        for (int64_t i = 0; i < window_size; ++i) positions[found++] = (int32_t)(first + window * window_size + i);
    for (int64_t i = count * window_size; i < visible; ++i) positions[found++] = (int32_t)(first + i);
    return found;
}

// Writes the number of kept blocks, then the blocks: the last one and those with the greatest scores, `blocks` in all. A
// block has `size` scores.
void top_blocks(const float* scores, int64_t count, int64_t blocks, int64_t size, int32_t* kept) {
    thread_local std::vector<float> greatest;
    greatest.clear();
    for (int64_t i = 0; i < count; i += size)
        greatest.push_back(*std::max_element(scores + i, scores + std::min(i + size, count)));
    greatest.back() = INFINITY;
    *kept = (int32_t)std::min<int64_t>(blocks, greatest.size());
    top_indices(greatest.data(), greatest.size(), *kept, kept + 1);
}

// Moves the scores of the kept blocks to the front, in order, and returns their number.
int64_t keep_scores(float* scores, int64_t count, int64_t size, const int32_t* kept) {
    float* end = scores;
    for (int64_t i = 1; i <= *kept; ++i)
        end = std::copy(scores + kept[i] * size, scores + std::min((kept[i] + 1) * size, count), end);
    return end - scores;
}

// Returns a buffer of int32 rows, one for each group of heads: number of selected positions, then the positions, which are
// left out if all are selected. A window of window_size positions is selected by the score of its last one; whole: with all
// its positions; local (IndexSpec.local): the last visible window is always selected, and no candidate. causal: positions
// after the row's own are no candidates, even if it sees them.
// blocks > 0: candidates (IndexSpec.candidates) are blocks of block_size windows. candidates: the buffer of the source, a
// selection of the same top_k, which has the number of candidate blocks, then the blocks, behind its positions; -1: this
// selection is the source.
int select_positions(Program& program, int q, int weights, nb::object kv_pool, int64_t heads, int64_t groups,
                     int64_t top_k, int64_t window_size, bool whole, bool local, bool causal, int64_t blocks,
                     int64_t block_size, int candidates) {
    const KVLayout layout = nb::cast<KVPool*>(kv_pool)->layout;
    require(heads > 0 && top_k > 0 && layout.num_heads == 1 && program.buffers[q].width == heads * layout.head_dim &&
                program.buffers[weights].width == heads && !program.buffers[q].logits,
            "select_positions: shapes differ");
    require(window_size > 0 && blocks >= 0 && block_size > 0, "select_positions: window_size and block_size must be above 0");
    require(groups > 0 && heads % groups == 0 && groups <= window_size,
            "select_positions: groups must divide the heads, and be at most window_size");
    require(blocks > 0 ? !whole && groups == 1 : candidates < 0, "select_positions: whole windows are not selected among candidates");
    require(whole || !local, "select_positions: local needs whole windows");
    require(!whole || !causal, "select_positions: whole windows may be later than the row");
    const auto windows = [window_size, local, causal](const Pass& pass, int64_t row) {
        return (causal ? pass.positions[row] + 1 - pass.first_position : num_visible(pass, row) - local) / window_size;
    };
    const int64_t dense_limit = blocks > 0 ? std::min(top_k, blocks * block_size) : top_k; // windows
    const int scored = score(program, q, weights, kv_pool, heads, groups, dense_limit, window_size, windows);
    const bool is_source = blocks > 0 && candidates < 0;
    const int64_t width = whole ? (top_k + 1) * window_size : top_k + (is_source ? blocks + 1 : 0);
    const int selected = program.buffer(width + 1, false);
    program.buffers[selected].copies = groups;
    Step step;
    step.label = "attention";
    step.reads = {scored};
    step.writes = {selected};
    if (candidates >= 0) step.reads.push_back(candidates);
    step.by_rows = true;
    step.run = [&program, selected, windows, groups, top_k, dense_limit, window_size, whole, blocks, block_size, candidates,
                is_source](const Pass& pass, int64_t row) {
        const int64_t count = windows(pass, row), first = pass.first_position, visible = num_visible(pass, row);
        for (int64_t group = 0; group < groups; ++group) {
            auto* found = reinterpret_cast<int32_t*>(program.values(selected, row * groups + group));
            *found = (int32_t)(whole && count <= top_k ? visible : std::min(count, top_k));
            if (count <= dense_limit) continue;
            float* scores = program.scores.row(row) + group * count;
            if (is_source) top_blocks(scores, count, blocks, block_size, found + 1 + top_k);
            if (whole) {
                thread_local std::vector<int32_t> picked;
                picked.resize(top_k);
                top_indices(scores, count, top_k, picked.data());
                *found = (int32_t)whole_windows(picked, count, window_size, first, visible, found + 1);
                continue;
            }
            const int32_t* from = nullptr; // number of candidate blocks, then the blocks
            if (candidates >= 0) from = reinterpret_cast<const int32_t*>(program.values(candidates, row)) + 1 + top_k;
            const int64_t num_candidates = from ? keep_scores(scores, count, block_size, from) : count;
            *found = (int32_t)std::min(num_candidates, top_k);
            top_indices(scores, num_candidates, *found, found + 1);
            for (int64_t i = 1; i <= *found; ++i) {
                const int64_t window = from ? from[1 + found[i] / block_size] * block_size + found[i] % block_size : found[i];
                found[i] = (int32_t)(first + (window + 1) * window_size - 1);
            }
        }
    };
    program.add(std::move(step));
    return selected;
}

int64_t num_blocks(const Pass& pass, int64_t row, int64_t block_size) {
    return (num_visible(pass, row) + block_size - 1) / block_size;
}

// As `select_positions`, with a selection of blocks for each head (one buffer row each); the last block is always selected.
int select_blocks(Program& program, int q, nb::object kv_pool, int64_t heads, int64_t top_k, int64_t block_size) {
    const KVLayout layout = nb::cast<KVPool*>(kv_pool)->layout;
    require(heads > 0 && top_k > 0 && layout.num_heads == 1 && program.buffers[q].width == heads * layout.head_dim &&
                !program.buffers[q].logits,
            "select_blocks: shapes differ");
    require(block_size >= 2 * heads, "select_blocks: a block must have two positions for each head or more"); // Scores::width
    const auto windows = [block_size](const Pass& pass, int64_t row) { return num_blocks(pass, row, block_size); };
    const int scored = score(program, q, -1, kv_pool, heads, heads, top_k, block_size, windows);
    const int selected = program.buffer(top_k * block_size + 1, false);
    program.buffers[selected].copies = heads;
    Step step;
    step.label = "attention";
    step.reads = {scored};
    step.writes = {selected};
    step.by_rows = true;
    step.run = [&program, selected, heads, top_k, block_size](const Pass& pass, int64_t row) {
        const int64_t visible = num_visible(pass, row), count = num_blocks(pass, row, block_size), first = pass.first_position;
        thread_local std::vector<int32_t> picked;
        picked.resize(top_k);
        for (int64_t head = 0; head < heads; ++head) {
            auto* found = reinterpret_cast<int32_t*>(program.values(selected, row * heads + head));
            *found = (int32_t)visible;
            if (count <= top_k) continue;
            float* scores = program.scores.row(row) + head * count;
            scores[count - 1] = INFINITY;
            top_indices(scores, count, top_k, picked.data());
            int32_t* positions = found + 1;
            for (int64_t block : picked)
                for (int64_t i = block * block_size; i < std::min((block + 1) * block_size, visible); ++i)
                    *positions++ = (int32_t)(first + i);
            *found = (int32_t)(positions - found - 1);
        }
    };
    program.add(std::move(step));
    return selected;
}

// Copies a row's selected positions to scratch tiles, one after another from the first position on.
void gather_selected(const KVPool& pool, const Pass& pass, int64_t row, const int32_t* positions, int64_t count, Tiles& tiles) {
    const int64_t bytes = pool.layout.tile_bytes(), first = pass.first_position;
    thread_local std::vector<uint8_t> scratch;
    scratch.resize(((first + count - 1) / 16 + 1) * bytes);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t slot = slot_of(tiles, pass, row, positions[i]), at = first + i;
        copy_lane(pool.layout, pool.tile(slot, tiles.kv_head), slot % 16, scratch.data() + at / 16 * bytes, at % 16);
    }
    tiles.scratch = scratch.data();
    tiles.scratch_from = 0;
}

int attend_selected(Program& program, int q, nb::object kv_pool, int64_t num_heads, float scale, float softcap,
                    std::optional<Sinks> sinks, int selected) {
    AttendTask common;
    Step step = attend_step(program, q, kv_pool, num_heads, scale, softcap, sinks, common);
    const KVPool* pool = nb::cast<KVPool*>(kv_pool);
    const int out = step.writes[0];
    const int64_t copies = program.buffers[selected].copies; // selections, each for equally many KV heads
    require(pool->layout.num_heads % copies == 0, "attend_selected: the selections do not divide the KV heads");
    const int64_t together = program.kernels.max_queries * kTilesPerTask;
    const int64_t parts = (common.group + together - 1) / together, each = parts * pool->layout.num_heads;
    step.reads.push_back(selected);
    step.num_tasks = [each](const Pass& pass) { return pass.num_rows * each; };
    step.run = [&program, pool, common, q, out, selected, copies, parts, each, together,
                quantizes = step.quantizes](const Pass& pass, int64_t index) {
        const int64_t row = index / each, kv_head = index % each / parts;
        const int64_t selection = row * copies + kv_head * copies / pool->layout.num_heads;
        const auto* found = reinterpret_cast<const int32_t*>(program.values(selected, selection));
        AttendTask task = common;
        static_cast<Tiles&>(task) = tiles_of(*pool, pass, pass.row_spans[row], kv_head);
        if (*found < num_visible(pass, row))
            gather_selected(*pool, pass, row, found + 1, *found, task);
        else
            gather_path(*pool, pass, row, task);
        task.first_position = pass.first_position;
        const int32_t visible_end = (int32_t)pass.first_position + *found - 1;
        attend_row(program, task, q, out, quantizes, row, visible_end, index % parts, together);
    };
    program.add(std::move(step));
    return out;
}

} // namespace

void bind_selection_steps(nb::class_<Program>& program) {
    program
        .def("select_positions", select_positions, nb::arg("q"), nb::arg("weights"), nb::arg("pool"), nb::arg("heads"),
             nb::arg("groups"), nb::arg("top_k"), nb::arg("window_size"), nb::arg("whole"), nb::arg("local"),
             nb::arg("causal"), nb::arg("blocks") = 0, nb::arg("block_size") = 1, nb::arg("candidates") = -1)
        .def("select_blocks", select_blocks)
        .def("attend_selected", attend_selected, nb::arg("q"), nb::arg("pool"), nb::arg("num_heads"), nb::arg("scale"),
             nb::arg("softcap"), nb::arg("sinks").none(), nb::arg("selected"));
}

} // namespace headstart
