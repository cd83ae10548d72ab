// Recorded steps of residual streams (hyper-connections), of n-gram embeddings, and of compressed attention: stored
// projections, compressed entries, attention over entries and a sliding window.
//
// A row's visible entries, then its window, are copied in order to scratch tiles and attended as a sequence of their own.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>

#include "half.h"
#include "packing.h"
#include "tiles.h"

namespace headstart {
namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Longs = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kTilesPerTask = 8; // query tiles of one row per task: they share the gathered tiles
constexpr int64_t kMaxStreams = 16;

Step row_step(std::vector<int> reads, std::vector<int> writes, nb::object owners) {
    Step step;
    step.label = "rows";
    step.reads = std::move(reads);
    step.writes = std::move(writes);
    step.by_rows = true;
    step.owners = {std::move(owners)};
    return step;
}

// iterations -1: the weights of a sum without mixing are a softmax.
int stream_weights(Program& program, int mixes, Floats base, Floats scale, int64_t count, int64_t iterations, float eps,
                   float magnitude) {
    const int64_t width = program.buffers[mixes].width;
    const bool last = width == count, mixed = width == (2 + count) * count;
    require(count > 0 && count <= kMaxStreams && (last || mixed || width == 2 * count),
            "stream_weights: mixes must have n, 2 n or (2 + n) n columns for n streams, n at most 16");
    require((int64_t)base.size() == width && (int64_t)scale.size() == (last ? 1 : mixed ? 3 : 2),
            "stream_weights: shapes differ");
    const int out = program.buffer(width, program.buffers[mixes].logits);
    Step step = row_step({mixes}, {out}, nb::make_tuple(base, scale));
    const StreamShape shape{count, iterations, eps, magnitude, last, mixed, iterations < 0};
    step.run = [&program, mixes, out, shape, b = base.data(), s = scale.data()](const Pass&, int64_t row) {
        program.kernels.stream_weights(program.values(mixes, row), b, s, shape, program.values(out, row));
    };
    program.add(std::move(step));
    return out;
}

// weights -1: the mean of the streams.
int sum_streams(Program& program, int streams, int weights, int64_t count) {
    const int64_t width = program.buffers[streams].width / count;
    require(width * count == program.buffers[streams].width, "sum_streams: shapes differ");
    const int out = program.buffer(width, program.buffers[streams].logits);
    Step step = row_step({streams}, {out}, nb::none());
    if (weights >= 0) step.reads.push_back(weights);
    step.run = [&program, streams, weights, out, count, width](const Pass&, int64_t row) {
        program.kernels.sum_streams(program.values(streams, row), weights < 0 ? nullptr : program.values(weights, row),
                                    count, width, program.values(out, row));
    };
    program.add(std::move(step));
    return out;
}

int mix_streams(Program& program, int streams, int x, int weights, int64_t count) {
    const int64_t width = program.buffers[x].width;
    const bool mixed = program.buffers[weights].width == (2 + count) * count;
    require(width * count == program.buffers[streams].width && (mixed || program.buffers[weights].width == 2 * count),
            "mix_streams: shapes differ");
    const int out = program.buffer(width * count, program.buffers[x].logits);
    Step step = row_step({streams, x, weights}, {out}, nb::none());
    step.run = [&program, streams, x, weights, out, count, width, mixed](const Pass&, int64_t row) {
        program.kernels.mix_streams(program.values(streams, row), program.values(x, row), program.values(weights, row),
                                    count, width, mixed, program.values(out, row));
    };
    program.add(std::move(step));
    return out;
}

// Token id + 1 of each row (with `numbers`: the number of the id, + 1); kImageRow stays as it is.
int token_values(Program& program, std::optional<Longs> numbers) {
    const int out = program.buffer(1, false);
    if (numbers) program.limits.reach(program.limits.tokens, (int64_t)numbers->size());
    Step step = row_step({}, {out}, nb::cast(numbers));
    step.run = [&program, out, table = numbers ? numbers->data() : nullptr](const Pass& pass, int64_t row) {
        const int64_t id = pass.token_ids[row];
        *program.values(out, row) = id == kImageRow ? (float)id : (float)(table ? table[id] : id) + 1;
    };
    program.add(std::move(step));
    return out;
}

// Rows of a table at hashes of a row's last tokens, side by side (Ops.embed_ngrams).
int embed_ngrams(Program& program, int tokens, nb::object matrix, std::vector<int64_t> factors, std::vector<int64_t> sizes,
                 int64_t end, bool cuts) {
    const OwnedMatrix* table = nb::cast<const OwnedMatrix*>(matrix);
    const int64_t longest = (int64_t)factors.size(), count = (int64_t)sizes.size(), cols = table->cols;
    int64_t total = 0;
    for (int64_t size : sizes) {
        require(size > 0, "embed_ngrams: sizes must be above 0");
        total += size;
    }
    require(longest > 1 && program.buffers[tokens].width == longest && count > 0 && count % (longest - 1) == 0 &&
                total <= table->rows,
            "embed_ngrams: shapes differ");
    const int out = program.buffer(count * cols, false);
    Step step = row_step({tokens}, {out}, matrix);
    step.run = [&program, table, tokens, out, factors, sizes, end, cuts, cols,
                each = count / (longest - 1)](const Pass&, int64_t row) {
        const float* last = program.values(tokens, row);
        float* to = program.values(out, row);
        const int64_t longest = (int64_t)factors.size();
        int64_t mixed = 0, first = 0;
        bool ended = false;
        for (int64_t i = 0; i < longest; ++i) {
            ended = ended || last[i] < 0; // at an image or an end, earlier tokens are not read
            const int64_t token = ended || last[i] == 0 ? end : (int64_t)last[i] - 1;
            ended = ended || (cuts && i > 0 && token == end);
            mixed ^= token * factors[i];
            for (int64_t head = (i - 1) * each; i > 0 && head < i * each; ++head) {
                program.kernels.embed(table->local_copy(), first + mixed % sizes[head], to + head * cols);
                first += sizes[head];
            }
        }
    };
    program.add(std::move(step));
    return out;
}

// sign(x) sqrt(max(|x|, least)), by column.
int signed_sqrt(Program& program, int x, float least) {
    const int64_t width = program.buffers[x].width;
    const int out = program.buffer(width, program.buffers[x].logits);
    Step step = row_step({x}, {out}, nb::none());
    step.run = [&program, x, out, width, least](const Pass&, int64_t row) {
        const float* from = program.values(x, row);
        float* to = program.values(out, row);
        for (int64_t i = 0; i < width; ++i)
            to[i] = from[i] == 0 ? 0.0f : std::copysign(std::sqrt(std::max(std::fabs(from[i]), least)), from[i]);
    };
    program.add(std::move(step));
    return out;
}

// Stores [values, gates + bias] at the row's slot.
void store_projections(Program& program, int values, int gates, RowPool* pool, nb::object owners, const float* bias,
                      int64_t every) {
    const int64_t width = program.buffers[values].width;
    program.limits.reach(program.limits.slots, pool->num_slots);
    Step step = row_step({values, gates}, {}, std::move(owners));
    step.run = [&program, values, gates, pool, bias, every, width](const Pass& pass, int64_t row) {
        const float *value = program.values(values, row), *gate = program.values(gates, row);
        const float* shift = bias + (pass.positions[row] - pass.first_position) % every * width;
        thread_local std::vector<float> both;
        both.resize(2 * width);
        std::copy_n(value, width, both.data());
        for (int64_t i = 0; i < width; ++i) both[width + i] = gate[i] + shift[i];
        pool->put(pass.slots[row], both.data());
    };
    program.add(std::move(step));
}

int compress(Program& program, int values, int gates, Floats bias, nb::object row_pool, int64_t every, int64_t dim,
             bool overlap) {
    RowPool* pool = nb::cast<RowPool*>(row_pool);
    const int64_t width = overlap ? 2 * dim : dim, span = overlap ? 2 * every : every;
    require(program.buffers[values].width == width && program.buffers[gates].width == width &&
                (int64_t)bias.size() == every * width && pool->width == 2 * width && !program.buffers[values].logits,
            "compress: shapes differ");
    store_projections(program, values, gates, pool, nb::make_tuple(row_pool, bias), bias.data(), every);
    program.limits.reach(program.limits.table_slots, pool->num_slots);
    program.wants_spans = true;
    const int out = program.buffer(dim, false);
    Step step = row_step({values}, {out}, row_pool);
    step.gathers = true;
    step.run = [&program, pool, out, every, span, dim, overlap](const Pass& pass, int64_t row) {
        const int64_t position = pass.positions[row], before = position - pass.first_position;
        float* to = program.values(out, row);
        if ((before + 1) % every) {
            std::fill_n(to, dim, 0.0f);
            return;
        }
        const Tiles places = blocks_of(pass, pass.row_spans[row]);
        thread_local std::vector<float> rows;
        rows.resize(span * pool->width);
        CompressTask task{rows.data(), pool->width, span, std::max<int64_t>(0, span - 1 - before), dim, overlap, to};
        for (int64_t i = task.first; i < span; ++i)
            pool->get(slot_of(places, pass, row, position - span + 1 + i), rows.data() + i * pool->width);
        program.kernels.compress(task);
    };
    program.add(std::move(step));
    return out;
}

// Visible keys of a row: selected entries or all, then the window.
struct VisibleKeys {
    const int32_t* selected; // number, then positions; nullptr: all entries
    int64_t every, window;
};

int64_t gather_visible(const KVPool& pool, const KVPool& entries, const Pass& pass, int64_t row, const VisibleKeys& visible,
                       Tiles& tiles) {
    const int64_t position = pass.positions[row], whole = (position + 1) / visible.every;
    const int64_t picked = visible.selected ? std::min<int64_t>(*visible.selected, whole) : whole;
    const int64_t oldest = std::max<int64_t>(0, std::min<int64_t>(position - visible.window + 1, pass.visible_start[row]));
    const int64_t count = picked + pass.visible_end[row] + 1 - oldest, bytes = pool.layout.tile_bytes();
    thread_local std::vector<uint8_t> scratch;
    scratch.resize((count + 15) / 16 * bytes);
    for (int64_t i = 0; i < count; ++i) {
        const bool is_entry = i < picked;
        const int64_t at = !is_entry            ? oldest + i - picked
                           : picked < whole     ? visible.selected[1 + i]
                                                : (i + 1) * visible.every - 1;
        const int64_t slot = slot_of(tiles, pass, row, at);
        copy_lane(pool.layout, (is_entry ? entries : pool).tile(slot, 0), slot % 16, scratch.data() + i / 16 * bytes, i % 16);
    }
    tiles.scratch = scratch.data();
    tiles.scratch_from = 0;
    return count;
}

int attend_compressed(Program& program, int q, nb::object kv_pool, nb::object entry_pool, int64_t num_heads, float scale,
                      float softcap, int64_t window, int64_t every, std::optional<Sinks> sinks, int selected) {
    AttendTask common;
    Step step = attend_step(program, q, kv_pool, num_heads, scale, softcap, sinks, common);
    const KVPool *pool = nb::cast<KVPool*>(kv_pool), *entries = nb::cast<KVPool*>(entry_pool);
    require(pool->layout.num_heads == 1 && window > 0 && every > 0 &&
                entries->layout.tile_bytes() == pool->layout.tile_bytes() && entries->num_slots == pool->num_slots,
            "attend_compressed: needs one KV head, a window above 0, and entries with the keys' layout");
    step.owners.push_back(entry_pool);
    program.wants_spans = true;
    if (selected >= 0) step.reads.push_back(selected);
    const int out = step.writes[0];
    const int64_t together = program.kernels.max_queries * kTilesPerTask;
    const int64_t parts = (common.group + together - 1) / together;
    step.num_tasks = [parts](const Pass& pass) { return pass.num_rows * parts; };
    step.run = [&program, pool, entries, common, q, out, selected, window, every, parts, together,
                quantizes = step.quantizes](const Pass& pass, int64_t index) {
        const int64_t row = index / parts;
        AttendTask task = common;
        static_cast<Tiles&>(task) = tiles_of(*pool, pass, pass.row_spans[row], 0);
        const auto* picks = selected < 0 ? nullptr : reinterpret_cast<const int32_t*>(program.values(selected, row));
        const int32_t last = (int32_t)gather_visible(*pool, *entries, pass, row, {picks, every, window}, task) - 1;
        attend_row(program, task, q, out, quantizes, row, last, index % parts, together);
    };
    program.add(std::move(step));
    return out;
}

// Copies rows of slots `sources` to slots `targets`; reads all before it writes.
void copy_rows(RowPool& pool, Ints sources, Ints targets) {
    require(sources.size() == targets.size(), "copy_rows: sources and targets differ in length");
    const int64_t count = (int64_t)sources.size();
    std::vector<float> rows(count * pool.width);
    for (int64_t i = 0; i < count; ++i) {
        require(sources.data()[i] >= 0 && sources.data()[i] < pool.num_slots && targets.data()[i] >= 0 &&
                    targets.data()[i] < pool.num_slots,
                "copy_rows: a slot is outside the pool");
        pool.get(sources.data()[i], rows.data() + i * pool.width);
    }
    for (int64_t i = 0; i < count; ++i) pool.put(targets.data()[i], rows.data() + i * pool.width);
}

} // namespace

void RowPool::put(int64_t slot, const float* row) {
    if (wide) {
        std::copy_n(row, width, reinterpret_cast<float*>(memory.data()) + slot * width);
        return;
    }
    uint16_t* to = reinterpret_cast<uint16_t*>(memory.data()) + slot * width;
    for (int64_t i = 0; i < width; ++i) to[i] = bfloat_from_float(row[i]);
}

void RowPool::get(int64_t slot, float* row) const {
    if (wide) {
        std::copy_n(reinterpret_cast<const float*>(memory.data()) + slot * width, width, row);
        return;
    }
    const uint16_t* from = reinterpret_cast<const uint16_t*>(memory.data()) + slot * width;
    for (int64_t i = 0; i < width; ++i) row[i] = float_from_bfloat(from[i]);
}

void bind_stream_steps(nb::module_& m, nb::class_<Program>& program) {
    nb::class_<RowPool>(m, "RowPool")
        .def(nb::init<int64_t, int64_t, bool>(), nb::arg("num_slots"), nb::arg("width"), nb::arg("wide"))
        .def("copy_rows", copy_rows)
        .def_prop_ro("slot_bytes", &RowPool::slot_bytes)
        .def("slots", [](nb::handle self, int64_t first, int64_t count) {
            const RowPool& pool = nb::cast<const RowPool&>(self);
            return slots_of(self, pool.memory, pool.slot_bytes(), 1, first, count);
        });
    program.def("stream_weights", stream_weights)
        .def("sum_streams", sum_streams)
        .def("mix_streams", mix_streams)
        .def("token_values", token_values, nb::arg("numbers").none())
        .def("embed_ngrams", embed_ngrams)
        .def("signed_sqrt", signed_sqrt)
        .def("compress", compress)
        .def("attend_compressed", attend_compressed, nb::arg("q"), nb::arg("pool"), nb::arg("entries"), nb::arg("num_heads"),
             nb::arg("scale"), nb::arg("softcap"), nb::arg("window"), nb::arg("every"), nb::arg("sinks").none(),
             nb::arg("selected"));
}

} // namespace headstart
