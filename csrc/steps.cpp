// Recorded steps of dense layers and their bindings (called by headstart/kernels/native/program.py).
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings.h"
#include "cpu.h"
#include "noise.h"
#include "packing.h"
#include "program.h"

namespace headstart {
namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const float* data_or_null(const std::optional<Floats>& array) { return array ? array->data() : nullptr; }

int embed(Program& program, nb::object matrix, int64_t width) {
    const OwnedMatrix* table = nb::cast<const OwnedMatrix*>(matrix);
    require(table->cols == width, "embed: width differs from the table's columns");
    program.limits.reach(program.limits.tokens, table->rows);
    program.limits.marks = false;
    const int out = program.buffer(width, false);
    Step step;
    step.label = "rows";
    step.writes = {out};
    step.by_rows = true;
    step.owners = {matrix};
    step.run = [&program, table, out](const Pass& pass, int64_t row) {
        program.kernels.embed(table->local_copy(), pass.token_ids[row], program.values(out, row));
    };
    program.add(std::move(step));
    return out;
}

int hidden_input(Program& program, int64_t width) {
    const int out = program.buffer(width, false);
    program.hidden_width = width;
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
    const OwnedMatrix* w = nb::cast<const OwnedMatrix*>(matrix);
    require(program.buffers[x].width == w->cols, "linear: the input width differs from the matrix columns");
    require(!bias || (int64_t)bias->size() == w->rows, "linear: the bias length differs from the matrix rows");
    program.require_input(x, *w);
    const int out = program.buffer(w->rows, program.buffers[x].logits);
    Step step;
    step.label = label;
    step.reads = {x};
    step.writes = {out};
    step.owners = {matrix, nb::cast(bias)};
    step.num_tasks = [w](const Pass&) { return num_pairs(*w); };
    step.run = [&program, w, x, out, b = data_or_null(bias)](const Pass& pass, int64_t task) {
        program.kernels.linear(w->local_copy(), b, program.input(x, pass), task, program.output(out));
    };
    program.add(std::move(step));
    return out;
}

int gated(Program& program, int x, nb::object gate_matrix, nb::object up_matrix, std::optional<Floats> gate_bias,
          std::optional<Floats> up_bias, int kind, const std::string& label) {
    const OwnedMatrix* gate = nb::cast<const OwnedMatrix*>(gate_matrix);
    const OwnedMatrix* up = nb::cast<const OwnedMatrix*>(up_matrix);
    require(program.buffers[x].width == gate->cols && gate->cols == up->cols && gate->rows == up->rows,
            "gated: shapes differ");
    program.require_input(x, *gate);
    program.require_input(x, *up);
    const int out = program.buffer(gate->rows, program.buffers[x].logits);
    Step step;
    step.label = label;
    step.reads = {x};
    step.writes = {out};
    step.owners = {gate_matrix, up_matrix, nb::cast(gate_bias), nb::cast(up_bias)};
    step.quantizes = true;
    step.num_tasks = [gate](const Pass&) { return num_pairs(*gate); };
    step.run = [&program, gate, up, x, out, g = data_or_null(gate_bias), u = data_or_null(up_bias),
                kind = activation_of(kind)](const Pass& pass, int64_t task) {
        program.kernels.gated(gate->local_copy(), up->local_copy(), g, u, kind, program.input(x, pass), task, program.output(out));
    };
    program.add(std::move(step));
    return out;
}

// RMS norm. residual -1: none, then total is x. parts: number of parts of the row, each with its own part of the weight.
// Returns the buffers (normed, total).
std::pair<int, int> norm(Program& program, int x, int residual, Floats weight, float eps, int64_t parts) {
    const int64_t full = program.buffers[x].width, group = (int64_t)weight.size() / parts, width = full / parts;
    require(group > 0 && width % group == 0 && width * parts == full && group * parts == (int64_t)weight.size(),
            "norm: the weight length does not divide the input width");
    require(parts == 1 || (residual < 0 && group == width), "norm: several parts need whole rows and no residual");
    const int out = program.buffer(full, program.buffers[x].logits);
    const int total = residual < 0 ? x : program.buffer(width, program.buffers[x].logits);
    Step step;
    step.label = "rows";
    step.reads = {x};
    step.writes = {out};
    if (residual >= 0) step.reads.push_back(residual), step.writes.push_back(total);
    step.by_rows = true;
    step.owners = {nb::cast(weight)};
    step.run = [&program, x, residual, out, total, width, group, parts, eps, w = weight.data()](const Pass&,
                                                                                               int64_t row) {
        for (int64_t part = 0; part < parts; ++part) {
            const int64_t at = part * width;
            program.kernels.norm(program.values(x, row) + at, residual < 0 ? nullptr : program.values(residual, row),
                                 w + at, eps, width, group, program.values(out, row) + at,
                                 residual < 0 ? nullptr : program.values(total, row));
        }
    };
    program.add(std::move(step));
    return {out, total};
}

// Adds a row-wise step that reads buffers a and b (-1: none); run(pass, row, to) fills a row of the result.
template <class Run>
int rowwise(Program& program, int a, int b, int64_t width, Run run, std::vector<nb::object> owners = {}) {
    const int out = program.buffer(width, program.buffers[a].logits);
    Step step;
    step.label = "rows";
    step.reads = {a};
    if (b >= 0) step.reads.push_back(b);
    step.writes = {out};
    step.by_rows = true;
    step.owners = std::move(owners);
    step.run = [&program, run, out](const Pass& pass, int64_t row) { run(pass, row, program.values(out, row)); };
    program.add(std::move(step));
    return out;
}

int add(Program& program, int a, int b) {
    const int64_t width = program.buffers[a].width;
    require(program.buffers[b].width == width, "add: widths differ");
    return rowwise(program, a, b, width, [&program, a, b, width](const Pass&, int64_t row, float* to) {
        program.kernels.add(program.values(a, row), program.values(b, row), width, to);
    });
}

int activate(Program& program, int x, int kind) {
    const int64_t width = program.buffers[x].width;
    return rowwise(program, x, -1, width,
                   [&program, x, width, kind = activation_of(kind)](const Pass&, int64_t row, float* to) {
                       program.kernels.activate(program.values(x, row), kind, width, to);
                   });
}

int activate_mul(Program& program, int gate, int up, int kind) {
    const int64_t width = program.buffers[gate].width;
    require(program.buffers[up].width == width, "activate_mul: widths differ");
    return rowwise(
        program, gate, up, width,
        [&program, gate, up, width, kind = activation_of(kind)](const Pass&, int64_t row, float* to) {
            program.kernels.activate_mul(program.values(gate, row), program.values(up, row), kind, width, to);
        });
}

int scale(Program& program, int x, float factor) {
    const int64_t width = program.buffers[x].width;
    return rowwise(program, x, -1, width, [&program, x, width, factor](const Pass&, int64_t row, float* to) {
        program.kernels.scale(program.values(x, row), factor, width, to);
    });
}

int shift(Program& program, int x, Floats bias) {
    const int64_t width = program.buffers[x].width;
    require((int64_t)bias.size() == width, "shift: the bias length differs from the input width");
    return rowwise(
        program, x, -1, width,
        [&program, x, width, b = bias.data()](const Pass&, int64_t row, float* to) {
            program.kernels.add(program.values(x, row), b, width, to);
        },
        {nb::cast(bias)});
}

int softcap(Program& program, int x, float cap) {
    const int64_t width = program.buffers[x].width;
    require(cap > 0, "softcap: the cap must be above 0");
    return rowwise(program, x, -1, width, [&program, x, width, cap](const Pass&, int64_t row, float* to) {
        program.kernels.softcap(program.values(x, row), cap, width, to);
    });
}

// x - mean(x), summed from left to right so that every path gives the same bits
int center(Program& program, int x) {
    const int64_t width = program.buffers[x].width;
    return rowwise(program, x, -1, width, [&program, x, width](const Pass&, int64_t row, float* to) {
        const float* from = program.values(x, row);
        double sum = 0;
        for (int64_t i = 0; i < width; ++i) sum += from[i];
        const float mean = (float)(sum / (double)width);
        for (int64_t i = 0; i < width; ++i) to[i] = from[i] - mean;
    });
}

// x * (1 + strength * ln(1 + floor((position + ahead) / every)))
int temper(Program& program, int x, int64_t every, double strength, int64_t ahead) {
    const int64_t width = program.buffers[x].width;
    require(every > 0 && !program.buffers[x].logits, "temper: needs a period above 0, and is not defined for logit rows");
    return rowwise(program, x, -1, width,
                   [&program, x, width, every, strength, ahead](const Pass& pass, int64_t row, float* to) {
                       const double steps = (double)((pass.positions[row] + ahead) / every);
                       program.kernels.scale(program.values(x, row), (float)(1 + strength * exact_log(1 + steps)), width,
                                             to);
                   });
}

int concat(Program& program, int a, int b, int64_t heads) {
    const int64_t wa = program.buffers[a].width / heads, wb = program.buffers[b].width / heads;
    require(program.buffers[a].width == wa * heads && program.buffers[b].width == wb * heads,
            "concat: a width is not a multiple of the number of heads");
    return rowwise(program, a, b, (wa + wb) * heads,
                   [&program, a, b, wa, wb, heads](const Pass&, int64_t row, float* to) {
                       const float *from_a = program.values(a, row), *from_b = program.values(b, row);
                       for (int64_t head = 0; head < heads; ++head) {
                           to = std::copy_n(from_a + head * wa, wa, to);
                           to = std::copy_n(from_b + head * wb, wb, to);
                       }
                   });
}

int columns(Program& program, int x, int64_t start, int64_t count) {
    require(start >= 0 && count > 0 && start + count <= program.buffers[x].width, "columns: beyond the input width");
    return rowwise(program, x, -1, count, [&program, x, start, count](const Pass&, int64_t row, float* to) {
        std::copy_n(program.values(x, row) + start, count, to);
    });
}

// Depthwise convolution along the rows of a sequence in this pass, zeros before the first. weight [taps, width], to which
// each row adds its delta [taps, groups]; the first tap is the row itself.
int grouped_conv(Program& program, int x, int delta, Floats weight, int64_t taps) {
    const int64_t width = program.buffers[x].width, groups = program.buffers[delta].width / std::max<int64_t>(taps, 1);
    require(taps > 0 && groups > 0 && width % groups == 0 && groups * taps == program.buffers[delta].width &&
                (int64_t)weight.size() == width * taps && !program.buffers[x].logits,
            "grouped_conv: shapes differ");
    const int out = program.buffer(width, false);
    Step step;
    step.label = "rows";
    step.reads = {x, delta};
    step.writes = {out};
    step.owners = {nb::cast(weight)};
    step.by_rows = step.gathers = true;
    step.run = [&program, x, delta, out, width, groups, taps, w = weight.data()](const Pass& pass, int64_t row) {
        const int32_t* next = std::upper_bound(pass.row_starts, pass.row_starts + pass.num_spans + 1, (int32_t)row);
        const int64_t known = std::min<int64_t>(taps, row - next[-1] + 1), size = width / groups;
        float* to = program.values(out, row);
        std::fill_n(to, width, 0.0f);
        for (int64_t tap = 0; tap < known; ++tap) {
            const float *from = program.values(x, row - tap), *more = program.values(delta, row) + tap * groups;
            for (int64_t i = 0; i < width; ++i) to[i] += (w[tap * width + i] + more[i / size]) * from[i];
        }
    };
    program.add(std::move(step));
    return out;
}

int sigmoid_mul(Program& program, int gate, int x) {
    const int64_t gates = program.buffers[gate].width, width = program.buffers[x].width;
    require(gates > 0 && width % gates == 0, "sigmoid_mul: the number of gates does not divide the input width");
    return rowwise(program, gate, x, width, [&program, gate, x, gates, width](const Pass&, int64_t row, float* to) {
        program.kernels.sigmoid_mul(program.values(gate, row), program.values(x, row), gates, width, to);
    });
}

// Rotary embedding of adjacent pairs in the last 2 * half features of each head; inverse: rotates back.
void rope_neighbours(const float* x, const float* cosines, const float* sines, int64_t num_heads, int64_t head_dim,
                     int64_t half, bool inverse, float* out) {
    const int64_t still = head_dim - 2 * half;
    for (int64_t head = 0; head < num_heads; ++head, x += head_dim, out += head_dim) {
        std::copy_n(x, still, out);
        for (int64_t i = 0; i < half; ++i) {
            const float a = x[still + 2 * i], b = x[still + 2 * i + 1], s = inverse ? -sines[i] : sines[i];
            out[still + 2 * i] = a * cosines[i] - b * s;
            out[still + 2 * i + 1] = b * cosines[i] + a * s;
        }
    }
}

int rope(Program& program, int x, std::shared_ptr<RopeTable> table, int64_t head_dim, bool trailing, bool inverse,
         int64_t behind) {
    const int64_t width = program.buffers[x].width;
    require(width % head_dim == 0 && 2 * table->half() <= head_dim && !program.buffers[x].logits,
            "rope: shapes differ");
    require(trailing || !inverse, "rope: inverse needs trailing");
    if (std::find(program.ropes.begin(), program.ropes.end(), table) == program.ropes.end())
        program.ropes.push_back(table);
    return rowwise(program, x, -1, width,
                   [&program, x, width, head_dim, trailing, inverse, behind,
                    rope = table.get()](const Pass& pass, int64_t row, float* to) {
                       const float *cosines = rope->cosines(pass, row, behind), *sines = cosines + rope->half();
                       if (trailing)
                           return rope_neighbours(program.values(x, row), cosines, sines, width / head_dim, head_dim,
                                                  rope->half(), inverse, to);
                       program.kernels.rope(program.values(x, row), cosines, sines, width / head_dim, head_dim,
                                            rope->half(), to);
                   });
}

int zero_where(Program& program, int x, int32_t position) {
    const int64_t width = program.buffers[x].width;
    return rowwise(program, x, -1, width, [&program, x, width, position](const Pass& pass, int64_t row, float* to) {
        if (pass.positions[row] == position)
            std::fill_n(to, width, 0.0f);
        else
            std::copy_n(program.values(x, row), width, to);
    });
}

int put_where(Program& program, int x, int32_t token, Floats values) {
    const int64_t width = program.buffers[x].width;
    require((int64_t)values.size() == width && !program.buffers[x].logits, "put_where: shapes differ");
    return rowwise(
        program, x, -1, width,
        [&program, x, width, token, given = values.data()](const Pass& pass, int64_t row, float* to) {
            std::copy_n(pass.token_ids[row] == token ? given : program.values(x, row), width, to);
        },
        {nb::cast(values)});
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

// Stores x in the hidden-state pool, from `column` on.
void store_hidden(Program& program, int x, nb::object hidden_pool, int64_t column) {
    HiddenPool* pool = nb::cast<HiddenPool*>(hidden_pool);
    const int64_t width = program.buffers[x].width;
    require(column >= 0 && column + width <= pool->width, "store_hidden: the columns do not fit the pool's width");
    program.limits.reach(program.limits.slots, pool->num_slots);
    Step step;
    step.label = "rows";
    step.reads = {x};
    step.by_rows = true;
    step.owners = {hidden_pool};
    step.run = [&program, pool, x, width, column](const Pass& pass, int64_t row) {
        std::copy_n(program.values(x, row), width, pool->row(pass.slots[row]) + column);
    };
    program.add(std::move(step));
}

} // namespace

void bind_program(nb::module_& m) {
    m.def("paths", [](bool portable_bits) {
        std::vector<std::string> names;
        for (const Path& path : paths()) // products of pairs of bfloat16 round differently
            if (!portable_bits || !path.kernels->to_bf16_row) names.push_back(path.name);
        return names;
    }, nb::arg("portable_bits") = false);
    nb::class_<HiddenPool>(m, "HiddenPool")
        .def(nb::init<int64_t, int64_t>())
        .def_ro("width", &HiddenPool::width)
        .def_prop_ro("slot_bytes", &HiddenPool::slot_bytes)
        .def("slots", [](nb::handle self, int64_t first, int64_t count) {
            const HiddenPool& pool = nb::cast<const HiddenPool&>(self);
            return slots_of(self, pool.memory, pool.slot_bytes(), 1, first, count);
        });
    nb::class_<RopeTable>(m, "RopeTable").def(nb::init<std::vector<double>, double, std::vector<int>>());
    nb::class_<Arena>(m, "Arena").def(nb::init<>());
    nb::class_<Program> program(m, "Program");
    program.def(nb::init<const std::string&>())
        .def("embed", embed)
        .def("hidden_input", hidden_input)
        .def("linear", linear, nb::arg("x"), nb::arg("matrix"), nb::arg("bias").none(), nb::arg("label"))
        .def("gated", gated, nb::arg("x"), nb::arg("gate"), nb::arg("up"), nb::arg("gate_bias").none(),
             nb::arg("up_bias").none(), nb::arg("kind"), nb::arg("label"))
        .def("norm", norm, nb::arg("x"), nb::arg("residual"), nb::arg("weight"), nb::arg("eps"), nb::arg("parts") = 1)
        .def("add", add)
        .def("activate", activate)
        .def("activate_mul", activate_mul)
        .def("scale", scale)
        .def("shift", shift)
        .def("softcap", softcap)
        .def("center", center)
        .def("temper", temper)
        .def("concat", concat, nb::arg("a"), nb::arg("b"), nb::arg("heads"))
        .def("columns", columns)
        .def("grouped_conv", grouped_conv)
        .def("sigmoid_mul", sigmoid_mul)
        .def("rope", rope)
        .def("take_logit_rows", take_logit_rows)
        .def("zero_where", zero_where)
        .def("put_where", put_where)
        .def("store_hidden", store_hidden)
        .def("width", [](const Program& program, int id) { return program.buffers.at(id).width; })
        .def("finish", &Program::finish)
        .def("want", [](Program& program, int x, const OwnedMatrix& by) { program.require_input(x, by); })
        .def_rw("reads_ahead", &Program::reads_ahead)
        .def_prop_ro("num_experts_read", &Program::num_experts_read)
        .def_rw("profiling", &Program::profiling)
        .def("profile", &Program::profile);
    bind_attention_steps(m, program);
    bind_selection_steps(program);
    bind_stream_steps(m, program);
    bind_expert_steps(program);
    bind_recurrent_steps(m, program);
    bind_lora_steps(m, program);
    bind_refine_steps(program);
    bind_run(program);
}

} // namespace headstart
