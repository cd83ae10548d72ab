// The steps a forward is recorded from, and their Python side (headstart/kernels/native_program.py calls them).
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "bindings.h"
#include "packing.h"
#include "program.h"

namespace headstart {
namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

const float* data_or_null(const std::optional<Floats>& array) { return array ? array->data() : nullptr; }

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

int64_t num_pairs(const Matrix& w) { return (w.num_blocks() + 1) / 2; }

int embed(Program& program, nb::object matrix, int64_t width) {
    const Matrix* table = nb::cast<const OwnedMatrix*>(matrix);
    require(table->cols == width, "embed: the table has another width");
    const int out = program.buffer(width, false);
    Step step;
    step.label = "rows";
    step.writes = {out};
    step.by_rows = true;
    step.owners = {matrix};
    step.run = [&program, table, out](const Pass& pass, int64_t row) {
        program.kernels.embed(*table, pass.token_ids[row], program.values(out, row));
    };
    program.add(std::move(step));
    return out;
}

int hidden_input(Program& program, int64_t width) {
    const int out = program.buffer(width, false);
    program.wants_hidden = true;
    Step step;
    step.label = "rows";
    step.writes = {out};
    step.by_rows = true;
    step.run = [&program, out, width](const Pass& pass, int64_t row) {
        const float* from = pass.hidden ? pass.hidden + row * pass.hidden_stride
                                        : pass.hidden_pool->row(pass.hidden_slots[row]);
        std::copy(from, from + width, program.values(out, row));
    };
    program.add(std::move(step));
    return out;
}

int linear(Program& program, int x, nb::object matrix, std::optional<Floats> bias, const std::string& label) {
    const Matrix* w = nb::cast<const OwnedMatrix*>(matrix);
    require(program.buffers[x].width == w->cols, "linear: the input has another width than the matrix");
    require(!bias || (int64_t)bias->size() == w->rows, "linear: the bias has another width than the matrix");
    if (w->quantized()) program.want_quants(x);
    const int out = program.buffer(w->rows, program.buffers[x].logits);
    Step step;
    step.label = label;
    step.reads = {x};
    step.writes = {out};
    step.owners = {matrix, nb::cast(bias)};
    step.num_tasks = [w](const Pass&) { return num_pairs(*w); };
    step.run = [&program, w, x, out, b = data_or_null(bias)](const Pass& pass, int64_t task) {
        program.kernels.linear(*w, b, program.input(x, pass), task, program.output(out));
    };
    program.add(std::move(step));
    return out;
}

int gated(Program& program, int x, nb::object gate_matrix, nb::object up_matrix, std::optional<Floats> gate_bias,
          std::optional<Floats> up_bias, const std::string& label) {
    const Matrix* gate = nb::cast<const OwnedMatrix*>(gate_matrix);
    const Matrix* up = nb::cast<const OwnedMatrix*>(up_matrix);
    require(program.buffers[x].width == gate->cols && gate->cols == up->cols && gate->rows == up->rows,
            "gated: shapes differ");
    if (gate->quantized() || up->quantized()) program.want_quants(x);
    const int out = program.buffer(gate->rows, program.buffers[x].logits);
    Step step;
    step.label = label;
    step.reads = {x};
    step.writes = {out};
    step.owners = {gate_matrix, up_matrix, nb::cast(gate_bias), nb::cast(up_bias)};
    step.quantizes = true;
    step.num_tasks = [gate](const Pass&) { return num_pairs(*gate); };
    step.run = [&program, gate, up, x, out, g = data_or_null(gate_bias), u = data_or_null(up_bias)](const Pass& pass,
                                                                                                int64_t task) {
        program.kernels.gated(*gate, *up, g, u, program.input(x, pass), task, program.output(out));
    };
    program.add(std::move(step));
    return out;
}

// residual -1: none; then total is x itself. Returns (normed, total).
std::pair<int, int> norm(Program& program, int x, int residual, Floats weight, float eps) {
    const int64_t width = program.buffers[x].width, group = (int64_t)weight.size();
    require(group > 0 && width % group == 0, "norm: the weight does not divide the input");
    const int out = program.buffer(width, program.buffers[x].logits);
    const int total = residual < 0 ? x : program.buffer(width, program.buffers[x].logits);
    Step step;
    step.label = "rows";
    step.reads = {x};
    step.writes = {out};
    if (residual >= 0) step.reads.push_back(residual), step.writes.push_back(total);
    step.by_rows = true;
    step.owners = {nb::cast(weight)};
    step.run = [&program, x, residual, out, total, width, group, eps, w = weight.data()](const Pass&, int64_t row) {
        program.kernels.norm(program.values(x, row), residual < 0 ? nullptr : program.values(residual, row), w, eps,
                             width, group, program.values(out, row),
                             residual < 0 ? nullptr : program.values(total, row));
    };
    program.add(std::move(step));
    return {out, total};
}

int rowwise(Program& program, int a, int b, int64_t width, std::function<void(int64_t row, int out)> run) {
    const int out = program.buffer(width, program.buffers[a].logits);
    Step step;
    step.label = "rows";
    step.reads = {a};
    if (b >= 0) step.reads.push_back(b);
    step.writes = {out};
    step.by_rows = true;
    step.run = [run = std::move(run), out](const Pass&, int64_t row) { run(row, out); };
    program.add(std::move(step));
    return out;
}

int add(Program& program, int a, int b) {
    const int64_t width = program.buffers[a].width;
    require(program.buffers[b].width == width, "add: widths differ");
    return rowwise(program, a, b, width, [&program, a, b, width](int64_t row, int out) {
        program.kernels.add(program.values(a, row), program.values(b, row), width, program.values(out, row));
    });
}

int silu(Program& program, int x) {
    const int64_t width = program.buffers[x].width;
    return rowwise(program, x, -1, width, [&program, x, width](int64_t row, int out) {
        program.kernels.silu(program.values(x, row), width, program.values(out, row));
    });
}

int silu_mul(Program& program, int gate, int up) {
    const int64_t width = program.buffers[gate].width;
    require(program.buffers[up].width == width, "silu_mul: widths differ");
    return rowwise(program, gate, up, width, [&program, gate, up, width](int64_t row, int out) {
        program.kernels.silu_mul(program.values(gate, row), program.values(up, row), width, program.values(out, row));
    });
}

int concat(Program& program, int a, int b, int64_t heads) {
    const int64_t wa = program.buffers[a].width / heads, wb = program.buffers[b].width / heads;
    require(program.buffers[a].width == wa * heads && program.buffers[b].width == wb * heads, "concat: not whole heads");
    return rowwise(program, a, b, (wa + wb) * heads, [&program, a, b, wa, wb, heads](int64_t row, int out) {
        const float *from_a = program.values(a, row), *from_b = program.values(b, row);
        float* to = program.values(out, row);
        for (int64_t head = 0; head < heads; ++head) {
            to = std::copy_n(from_a + head * wa, wa, to);
            to = std::copy_n(from_b + head * wb, wb, to);
        }
    });
}

int sigmoid_mul(Program& program, int gate, int x) {
    const int64_t gates = program.buffers[gate].width, width = program.buffers[x].width;
    require(gates > 0 && width % gates == 0, "sigmoid_mul: the gates do not divide the input");
    return rowwise(program, gate, x, width, [&program, gate, x, gates, width](int64_t row, int out) {
        program.kernels.sigmoid_mul(program.values(gate, row), program.values(x, row), gates, width,
                                    program.values(out, row));
    });
}

int rope(Program& program, int x, std::shared_ptr<RopeTable> table, int64_t head_dim) {
    const int64_t width = program.buffers[x].width;
    require(width % head_dim == 0 && 2 * table->half() <= head_dim, "rope: shapes differ");
    const int out = program.buffer(width, false);
    Step step;
    step.label = "rows";
    step.reads = {x};
    step.writes = {out};
    step.by_rows = true;
    step.run = [&program, x, out, width, head_dim, rope = table.get()](const Pass& pass, int64_t row) {
        const int64_t position = pass.positions[row];
        program.kernels.rope(program.values(x, row), rope->cosines(position), rope->sines(position), width / head_dim,
                             head_dim, rope->half(), program.values(out, row));
    };
    program.add(std::move(step));
    if (std::find(program.ropes.begin(), program.ropes.end(), table) == program.ropes.end())
        program.ropes.push_back(std::move(table));
    return out;
}

size_t group_index(Program& program, int64_t group) {
    auto found = std::find(program.groups.begin(), program.groups.end(), group);
    if (found == program.groups.end()) found = program.groups.insert(found, group);
    return found - program.groups.begin();
}

int attention(Program& program, int q, int k, int v, nb::object kv_pool, int64_t num_heads, float scale) {
    KVPool* pool = nb::cast<KVPool*>(kv_pool);
    const KVLayout layout = pool->layout;
    const int64_t dim = layout.value_dim, group = num_heads / layout.num_heads;
    require(dim <= kMaxValueDim, "attention: values of more than 512 are not supported");
    require(program.buffers[q].width == num_heads * layout.head_dim &&
                program.buffers[k].width == layout.num_heads * layout.head_dim &&
                program.buffers[v].width == layout.num_heads * dim,
            "attention: shapes differ");
    Step write;
    write.label = "rows";
    write.reads = {k, v};
    write.by_rows = true;
    write.owners = {kv_pool};
    write.run = [&program, pool, layout, k, v](const Pass& pass, int64_t row) {
        program.kernels.store_kv(program.values(k, row), program.values(v, row), pool->memory.data(), layout,
                                 pass.slots[row]);
    };
    program.add(std::move(write));
    const int out = program.buffer(num_heads * dim, false);
    Step look;
    look.label = "attention";
    look.reads = {q};
    look.writes = {out};
    look.quantizes = dim % 32 == 0 && num_heads * dim % kPanel == 0;
    look.owners = {kv_pool};
    const size_t tiles_of = group_index(program, group);
    look.num_tasks = [tiles_of, layout](const Pass& pass) { return pass.tiles[tiles_of].back() * layout.num_heads; };
    look.run = [&program, pool, layout, group, tiles_of, scale, q, out, own = look.quantizes](const Pass& pass,
                                                                                              int64_t index) {
        const auto& before = pass.tiles[tiles_of]; // tasks go by span, then kv head, then tile
        const int64_t span =
            std::upper_bound(before.begin(), before.end(), index / layout.num_heads) - before.begin() - 1;
        const int64_t tiles = before[span + 1] - before[span], tile = index - before[span] * layout.num_heads;
        const int64_t queries = (pass.row_starts[span + 1] - pass.row_starts[span]) * group;
        const int64_t first = queries * (tile % tiles) / tiles, last = queries * (tile % tiles + 1) / tiles;
        AttendTask task{};
        task.pool = pool->memory.data();
        task.layout = layout;
        task.block_table = pass.block_tables + span * pass.table_width;
        task.block_size = pass.block_size;
        task.positions = pass.positions;
        task.first_row = pass.row_starts[span];
        task.kv_head = tile / tiles;
        task.group = group;
        task.first_query = first;
        task.num_queries = last - first;
        task.first_position = pass.first_position;
        task.scale = scale;
        task.queries = program.values(q, 0);
        task.query_stride = program.buffers[q].stride();
        task.out = program.output(out);
        if (!own) task.out.quants = nullptr;
        program.kernels.attend(task);
    };
    program.add(std::move(look));
    return out;
}

int take_logit_rows(Program& program, int x) {
    const int64_t width = program.buffers[x].width;
    const int out = program.buffer(width, true);
    Step step;
    step.label = "rows";
    step.reads = {x};
    step.writes = {out};
    step.by_rows = step.gathers = true;
    step.run = [&program, x, out, width](const Pass& pass, int64_t row) {
        std::copy_n(program.values(x, pass.logit_rows[row]), width, program.values(out, row));
    };
    program.add(std::move(step));
    return out;
}

int zero_where(Program& program, int x, int32_t position) {
    const int64_t width = program.buffers[x].width;
    const int out = program.buffer(width, program.buffers[x].logits);
    Step step;
    step.label = "rows";
    step.reads = {x};
    step.writes = {out};
    step.by_rows = true;
    step.run = [&program, x, out, width, position](const Pass& pass, int64_t row) {
        float* to = program.values(out, row);
        if (pass.positions[row] == position)
            std::fill_n(to, width, 0.0f);
        else
            std::copy_n(program.values(x, row), width, to);
    };
    program.add(std::move(step));
    return out;
}

void store_hidden(Program& program, int x, nb::object hidden_pool) {
    HiddenPool* pool = nb::cast<HiddenPool*>(hidden_pool);
    const int64_t width = program.buffers[x].width;
    require(pool->width == width, "store: the pool has another width");
    Step step;
    step.label = "rows";
    step.reads = {x};
    step.by_rows = true;
    step.owners = {hidden_pool};
    step.run = [&program, pool, x, width](const Pass& pass, int64_t row) {
        std::copy_n(program.values(x, row), width, pool->row(pass.slots[row]));
    };
    program.add(std::move(step));
}

States states_of(const std::vector<Ints>& arrays, const Pass& pass) {
    require(arrays.size() == 7, "run: states are seven arrays");
    for (size_t i = 0; i < 5; ++i)
        require((int64_t)arrays[i].size() == pass.num_spans + (i == 4), "run: the states' arrays differ in length");
    const int32_t* starts = arrays[4].data();
    require((int64_t)arrays[5].size() == starts[pass.num_spans] && arrays[6].size() == arrays[5].size(),
            "run: the stores' arrays differ in length");
    States told{arrays[0].data(), arrays[1].data(), arrays[2].data(), arrays[3].data(),
                starts,           arrays[5].data(), arrays[6].data(), {}};
    told.span_of.resize(pass.num_rows);
    for (int64_t s = 0; s < pass.num_spans; ++s)
        std::fill(told.span_of.begin() + pass.row_starts[s], told.span_of.begin() + pass.row_starts[s + 1], (int32_t)s);
    return told;
}

nb::dict run(Program& program, ThreadPool& threads, Arena& arena, Ints token_ids, Ints positions, Ints slots,
             Ints row_starts, Table block_tables, Ints logit_rows, int64_t block_size, int64_t first_position,
             std::optional<Ints> hidden_slots, const HiddenPool* hidden_pool, std::optional<Rows> hidden,
             const std::optional<std::vector<Ints>>& states) {
    const int64_t rows = (int64_t)token_ids.size(), spans = (int64_t)row_starts.size() - 1;
    require(rows > 0 && (int64_t)positions.size() == rows && (int64_t)slots.size() == rows && spans > 0 &&
                (int64_t)block_tables.shape(0) == spans && row_starts.data()[spans] == rows,
            "run: the plan's arrays differ in length");
    require(block_size % 16 == 0, "run: blocks must hold a multiple of 16 positions");
    require(!hidden || (int64_t)hidden->shape(0) == rows, "run: hidden has another number of rows");
    require(!program.wants_hidden || hidden || (hidden_slots && hidden_pool), "run: the program reads hidden states");
    Pass pass{};
    pass.num_rows = rows;
    pass.num_logits = (int64_t)logit_rows.size();
    pass.num_spans = spans;
    pass.table_width = (int64_t)block_tables.shape(1);
    pass.block_size = block_size;
    pass.first_position = first_position;
    pass.token_ids = token_ids.data();
    pass.positions = positions.data();
    pass.slots = slots.data();
    pass.row_starts = row_starts.data();
    pass.block_tables = block_tables.data();
    pass.logit_rows = logit_rows.data();
    pass.hidden_slots = hidden_slots ? hidden_slots->data() : nullptr;
    pass.hidden_pool = hidden_pool;
    pass.hidden = hidden ? hidden->data() : nullptr;
    pass.hidden_stride = hidden ? (int64_t)hidden->shape(1) : 0;
    require(!program.wants_states || states, "run: the program reads recurrent states");
    States told{};
    if (states) {
        told = states_of(*states, pass);
        pass.states = &told;
    }
    return program.run(threads, arena, pass);
}

} // namespace

std::vector<std::string> paths() {
    std::vector<std::string> found;
#ifdef HEADSTART_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        found.push_back("avx512");
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back("avx2");
#endif
    found.push_back("portable");
    return found;
}

void bind_program(nb::module_& m) {
    m.def("paths", &paths);
    nb::class_<KVPool>(m, "KVPool")
        .def("__init__", [](KVPool* self, int64_t num_slots, int64_t num_heads, int64_t head_dim, int64_t value_dim,
                            int store) {
            new (self) KVPool(num_slots, num_heads, head_dim, value_dim, static_cast<Store>(store));
        });
    nb::class_<HiddenPool>(m, "HiddenPool").def(nb::init<int64_t, int64_t>()).def_ro("width", &HiddenPool::width);
    nb::class_<RopeTable>(m, "RopeTable").def(nb::init<std::vector<double>, double>());
    nb::class_<Arena>(m, "Arena").def(nb::init<>());
    nb::class_<Program> program(m, "Program");
    program.def(nb::init<const std::string&>())
        .def("embed", embed)
        .def("hidden_input", hidden_input)
        .def("linear", linear, nb::arg("x"), nb::arg("matrix"), nb::arg("bias").none(), nb::arg("label"))
        .def("gated", gated, nb::arg("x"), nb::arg("gate"), nb::arg("up"), nb::arg("gate_bias").none(),
             nb::arg("up_bias").none(), nb::arg("label"))
        .def("norm", norm)
        .def("add", add)
        .def("silu", silu)
        .def("silu_mul", silu_mul)
        .def("concat", concat, nb::arg("a"), nb::arg("b"), nb::arg("heads"))
        .def("sigmoid_mul", sigmoid_mul)
        .def("rope", rope)
        .def("attention", attention)
        .def("take_logit_rows", take_logit_rows)
        .def("zero_where", zero_where)
        .def("store_hidden", store_hidden)
        .def("width", [](const Program& program, int id) { return program.buffers.at(id).width; })
        .def("finish", &Program::finish)
        .def("run", run, nb::arg("threads"), nb::arg("arena"), nb::arg("token_ids"), nb::arg("positions"),
             nb::arg("slots"), nb::arg("row_starts"), nb::arg("block_tables"), nb::arg("logit_rows"),
             nb::arg("block_size"), nb::arg("first_position"), nb::arg("hidden_slots").none(),
             nb::arg("hidden_pool").none(), nb::arg("hidden").none(), nb::arg("states").none())
        .def("want_quants", &Program::want_quants)
        .def_rw("profiling", &Program::profiling)
        .def("profile", &Program::profile);
    bind_expert_steps(program);
    bind_recurrent_steps(m, program);
}

} // namespace headstart
