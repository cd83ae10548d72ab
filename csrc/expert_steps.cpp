// Recorded steps of mixtures of experts, and of matrices that each head has for itself.
//
// A mixture is five steps: rows choose (by rows), slots are dealt out (one task), gate and up, down (an expert's 32
// outputs for all the rows that take it are one task: they share the load of its weights), the sum (by rows).
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "packing.h"
#include "program.h"

namespace headstart {
namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Longs = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrices = std::vector<const OwnedMatrix*>;

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

Matrices matrices_of(const nb::list& given) {
    Matrices found;
    for (nb::handle each : given) found.push_back(nb::cast<const OwnedMatrix*>(each));
    require(!found.empty(), "no matrices");
    for (const OwnedMatrix* each : found)
        require(each->rows == found[0]->rows && each->cols == found[0]->cols, "matrices of several shapes");
    return found;
}

// A bias for each expert, or nothing.
std::vector<const float*> biases_of(const nb::list& given, const Matrices& matrices) {
    require(given.size() == 0 || given.size() == matrices.size(), "experts: not a bias for each");
    std::vector<const float*> found(matrices.size(), nullptr);
    for (size_t i = 0; i < given.size(); ++i) {
        const Floats bias = nb::cast<Floats>(given[i]);
        require((int64_t)bias.size() == matrices[i]->rows, "experts: a bias has another width");
        found[i] = bias.data();
    }
    return found;
}

int64_t num_pairs(const Matrix& w) { return (w.num_blocks() + 1) / 2; }

bool any_quantized(const Matrices& matrices) {
    for (const OwnedMatrix* each : matrices)
        if (each->quantized()) return true;
    return false;
}

// What the tasks of one expert's step work on: slots first .. first + count - 1, outputs of one pair of blocks.
struct Share {
    int32_t expert;
    int64_t first, count, pair;
};

Share share_of(const Routing& routing, int64_t task, int64_t pairs) {
    const int64_t i = task / pairs;
    return {routing.experts[i], routing.starts[i], routing.starts[i + 1] - routing.starts[i], task % pairs};
}

Step step_over(const Routing* routing, int64_t pairs, std::vector<int> reads, int writes, nb::object owners) {
    Step step;
    step.label = "experts";
    step.reads = std::move(reads);
    step.writes = {writes};
    step.owners = {std::move(owners)};
    step.num_tasks = [routing, pairs](const Pass&) { return (int64_t)routing->experts.size() * pairs; };
    return step;
}

// Records the choice; returns the number of the routing and the buffer that stands for it.
std::pair<int, int> route(Program& program, int logits, std::optional<Floats> bias, int64_t top_k, int64_t num_groups,
                          int64_t top_groups, int scoring, bool normalize, float scale, int64_t num_identity,
                          bool scales_inputs, std::optional<Longs> told) {
    const int64_t count = program.buffers[logits].width;
    require(count <= kMaxExperts && top_k > 0 && num_groups > 0 && count % num_groups == 0 && top_groups > 0 &&
                top_groups <= num_groups && top_k <= count / num_groups * top_groups && num_identity >= 0 &&
                num_identity < count,
            "route: the numbers of experts do not fit");
    require(!bias || (int64_t)bias->size() == count, "route: the bias has another width");
    require(scoring >= 0 && scoring <= (int)Scoring::SOFTPLUS, "route: no such scores");
    require(!told || (int64_t)told->size() % top_k == 0, "route: the table has not top_k experts for each token");
    for (size_t i = 0; told && i < told->size(); ++i)
        require(told->data()[i] >= 0 && told->data()[i] < count, "route: the table names an expert that is not there");
    if (told) program.limits.reach(program.limits.tokens, (int64_t)told->size() / top_k);
    require(!program.buffers[logits].logits, "route: rows of logits take no experts");
    require(!scales_inputs || num_identity == 0, "route: experts that give back a row read it as it is");
    auto routing = std::make_shared<Routing>(Router{count, top_k, num_groups, top_groups, count - num_identity,
                                                    static_cast<Scoring>(scoring), normalize, scale, scales_inputs});
    const int chosen = program.buffer(0, false);
    Step step;
    step.label = "rows";
    step.reads = {logits};
    step.writes = {chosen};
    step.by_rows = true;
    step.owners = {nb::cast(bias), nb::cast(told)};
    step.run = [&program, logits, top_k, routing = routing.get(), b = bias ? bias->data() : nullptr,
                table = told ? told->data() : nullptr](const Pass& pass, int64_t row) {
        const int64_t* own = table ? table + pass.token_ids[row] * top_k : nullptr;
        program.kernels.route(program.values(logits, row), b, own, routing->router, routing->ids.data() + row * top_k,
                              routing->weights.data() + row * top_k);
    };
    program.add(std::move(step));
    program.routings.push_back(std::move(routing));
    return {(int)program.routings.size() - 1, chosen};
}

int deal(Program& program, Routing* routing, int chosen) {
    const int dealt = program.buffer(0, false);
    Step step;
    step.label = "experts";
    step.reads = {chosen};
    step.writes = {dealt};
    step.num_tasks = [](const Pass&) { return 1; };
    step.run = [routing](const Pass& pass, int64_t) { routing->group(pass.num_rows); };
    program.add(std::move(step));
    return dealt;
}

int sum(Program& program, const Routing* routing, int x, int spoken) {
    const int64_t width = program.buffers[spoken].width, top_k = routing->router.top_k;
    const int out = program.buffer(width, false);
    Step step;
    step.label = "rows";
    step.reads = {x, spoken};
    step.writes = {out};
    step.by_rows = true;
    step.run = [&program, routing, x, spoken, width, top_k, out](const Pass&, int64_t row) {
        program.kernels.weigh(program.values(spoken, 0), program.buffers[spoken].stride(),
                              routing->slots.data() + row * top_k, routing->weights.data() + row * top_k, top_k,
                              program.values(x, row), width, program.values(out, row));
    };
    program.add(std::move(step));
    return out;
}

// The first matrices of all experts, and the activation behind them: [inner] of each slot.
struct Widening {
    Matrices gates, ups; // no gates: activate(up)
    std::vector<const float*> gate_bias, up_bias;
    Activation kind;
};

int widen(Program& program, const Routing* routing, int x, int dealt, Widening all, nb::object owners) {
    for (const Matrices* each : {&all.gates, &all.ups})
        for (const OwnedMatrix* matrix : *each) program.want(x, *matrix);
    const int64_t width = all.ups[0]->rows, pairs = num_pairs(*all.ups[0]);
    const int inner = program.buffer(width, false);
    program.buffers[inner].copies = routing->router.top_k;
    Step step = step_over(routing, pairs, {x, dealt}, inner, std::move(owners));
    step.quantizes = !all.gates.empty();
    step.run = [&program, routing, all = std::move(all), x, inner, width, pairs](const Pass& pass, int64_t task) {
        const Share share = share_of(*routing, task, pairs);
        Input in = program.input(x, pass);
        in.index = routing->rows.data() + share.first;
        in.rows = share.count;
        if (routing->router.scales_inputs) in.factors = routing->factors.data() + share.first;
        const Output out = program.output(inner).from_row(share.first);
        const Matrix& up = all.ups[share.expert]->here();
        if (!all.gates.empty()) {
            program.kernels.gated(all.gates[share.expert]->here(), up, all.gate_bias[share.expert], all.up_bias[share.expert],
                                  all.kind, in, share.pair, out);
            return;
        }
        program.kernels.linear(up, all.up_bias[share.expert], in, share.pair, out);
        const int64_t at = share.pair * 32, count = std::min<int64_t>(32, width - at);
        for (int64_t row = 0; row < share.count; ++row) {
            float* values = out.values + row * out.stride + at;
            program.kernels.activate(values, all.kind, count, values);
        }
    };
    program.add(std::move(step));
    return inner;
}

int experts(Program& program, int x, std::pair<int, int> chosen, nb::list gate_list, nb::list up_list,
            nb::list down_list, int kind, nb::list gate_biases, nb::list up_biases, nb::list down_biases) {
    const Matrices gates = gate_list.size() ? matrices_of(gate_list) : Matrices{};
    const Matrices ups = matrices_of(up_list), downs = matrices_of(down_list);
    Routing* routing = program.routings.at(chosen.first).get();
    const int64_t count = routing->router.num_matrices, top_k = routing->router.top_k;
    require((gates.empty() || (int64_t)gates.size() == count) && (int64_t)ups.size() == count &&
                (int64_t)downs.size() == count,
            "experts: their number differs from the router's");
    require(ups[0]->cols == program.buffers[x].width && downs[0]->cols == ups[0]->rows &&
                (gates.empty() || (gates[0]->rows == ups[0]->rows && gates[0]->cols == ups[0]->cols)),
            "experts: shapes differ");
    require(!gates.empty() || !routing->router.scales_inputs, "experts: scaled rows are read by a gate");
    require(count == routing->router.num_experts || downs[0]->rows == ups[0]->cols,
            "experts: those that give back the row have its width");
    const std::vector<const float*> down_bias = biases_of(down_biases, downs);
    Widening all{gates, ups, biases_of(gate_biases, gates), biases_of(up_biases, ups), activation_of(kind)};
    const int dealt = deal(program, routing, chosen.second);
    const int inner = widen(program, routing, x, dealt, std::move(all),
                            nb::make_tuple(gate_list, up_list, gate_biases, up_biases));

    for (const OwnedMatrix* each : downs) program.want(inner, *each);
    const int spoken = program.buffer(downs[0]->rows, false);
    program.buffers[spoken].copies = top_k;
    const int64_t out_pairs = num_pairs(*downs[0]);
    Step narrow = step_over(routing, out_pairs, {inner, dealt}, spoken, nb::make_tuple(down_list, down_biases));
    narrow.run = [&program, routing, downs, inner, spoken, out_pairs, down_bias](const Pass&, int64_t task) {
        const Share share = share_of(*routing, task, out_pairs);
        const Output all = program.output(inner).from_row(share.first);
        Input in{all.values, all.stride, all.quants, share.count, program.halves(inner)};
        if (in.halves) in.halves += share.first * program.buffers[inner].half_stride();
        program.kernels.linear(downs[share.expert]->here(), down_bias[share.expert], in, share.pair,
                               program.output(spoken).from_row(share.first));
    };
    program.add(std::move(narrow));
    return sum(program, routing, x, spoken);
}

// [R, heads * in] -> [R, heads * out] by a float matrix [out, in] of each head.
int head_linear(Program& program, int x, nb::list matrices) {
    const Matrices heads = matrices_of(matrices);
    const int64_t count = (int64_t)heads.size(), in = heads[0]->cols, out = heads[0]->rows;
    require(program.buffers[x].width == count * in, "head_linear: the input has another width than the matrices");
    require(!any_quantized(heads), "head_linear: matrices of heads must be floats");
    const int made = program.buffer(count * out, program.buffers[x].logits);
    const int64_t pairs = num_pairs(*heads[0]);
    Step step;
    step.label = "matrices";
    step.reads = {x};
    step.writes = {made};
    step.owners = {matrices};
    step.num_tasks = [count, pairs](const Pass&) { return count * pairs; };
    step.run = [&program, heads, x, made, in, out, pairs](const Pass& pass, int64_t task) {
        const int64_t head = task / pairs;
        Input part = program.input(x, pass);
        part.values += head * in;
        part.halves = nullptr; // heads are no whole panels
        Output to = program.output(made);
        to.values += head * out;
        program.kernels.linear(heads[head]->here(), nullptr, part, task % pairs, to);
    };
    program.add(std::move(step));
    return made;
}

} // namespace

void bind_expert_steps(nb::class_<Program>& program) {
    program.def("route", route, nb::arg("logits"), nb::arg("bias").none(), nb::arg("top_k"), nb::arg("num_groups"),
                nb::arg("top_groups"), nb::arg("scoring"), nb::arg("normalize"), nb::arg("scale"), nb::arg("num_identity"),
                nb::arg("scales_inputs"), nb::arg("told").none());
    program.def("experts", experts);
    program.def("head_linear", head_linear);
}

} // namespace headstart
