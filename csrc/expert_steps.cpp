// Recorded steps of mixtures of experts (MoE), and of per-head matrices.
//
// A MoE layer has five steps: route (row-wise), group slots by expert (one task), gate and up, down, weighted sum
// (row-wise). A task of a matrix is 32 outputs of one expert for all its rows, which share the loaded weights.
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <utility>

#include "packing.h"
#include "program.h"
#include "system.h"

namespace headstart {
namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Longs = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrices = std::vector<const OwnedMatrix*>;

Matrices matrices_of(const nb::list& given) {
    Matrices found;
    for (nb::handle each : given) found.push_back(nb::cast<const OwnedMatrix*>(each));
    require(!found.empty(), "experts: no matrices");
    for (const OwnedMatrix* each : found)
        require(each->rows == found[0]->rows && each->cols == found[0]->cols, "experts: the matrices differ in shape");
    return found;
}

// One bias per expert, or all nullptr.
std::vector<const float*> biases_of(const nb::list& given, const Matrices& matrices) {
    require(given.size() == 0 || given.size() == matrices.size(), "experts: needs no bias, or one per expert");
    std::vector<const float*> found(matrices.size(), nullptr);
    for (size_t i = 0; i < given.size(); ++i) {
        const Floats bias = nb::cast<Floats>(given[i]);
        require((int64_t)bias.size() == matrices[i]->rows, "experts: a bias length differs from its matrix rows");
        found[i] = bias.data();
    }
    return found;
}

bool any_quantized(const Matrices& matrices) {
    for (const OwnedMatrix* each : matrices)
        if (each->quantized()) return true;
    return false;
}

// A task: slots first .. first + count - 1 of one expert, outputs of one pair of blocks.
struct Slice {
    int32_t expert;
    int64_t first, count, pair;
};

Slice slice_of(const Routing& routing, int64_t task, int64_t pairs) {
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

// Records the routing of rows; returns the index in Program::routings and a buffer that orders the steps.
std::pair<int, int> route(Program& program, int logits, std::optional<Floats> bias, int64_t top_k, int64_t num_groups,
                          int64_t top_groups, int scoring, bool normalize, float scale, int64_t num_identity,
                          bool scales_inputs, std::optional<Longs> token_experts, std::optional<Floats> image_bias) {
    const int64_t count = program.buffers[logits].width;
    require(count <= kMaxExperts && top_k > 0 && num_groups > 0 && count % num_groups == 0 && top_groups > 0 &&
                top_groups <= num_groups && top_k <= count / num_groups * top_groups && num_identity >= 0 &&
                num_identity < count,
            "route: top_k, the groups or num_identity do not fit the number of experts");
    for (const auto* each : {&bias, &image_bias})
        require(!*each || (int64_t)(*each)->size() == count, "route: the bias length differs from the number of experts");
    require(scoring >= 0 && scoring <= (int)Scoring::SOFTPLUS, "route: unknown scoring");
    require(!token_experts || (int64_t)token_experts->size() % top_k == 0, "route: the table needs top_k experts per token");
    for (size_t i = 0; token_experts && i < token_experts->size(); ++i)
        require(token_experts->data()[i] >= 0 && token_experts->data()[i] < count,
                "route: the table has an expert id out of range");
    if (token_experts) program.limits.reach(program.limits.tokens, (int64_t)token_experts->size() / top_k);
    program.limits.marks &= image_bias || !token_experts;
    require(!program.buffers[logits].logits, "route: not defined for logit rows");
    require(!scales_inputs || num_identity == 0, "route: scales_inputs does not support identity experts");
    auto routing = std::make_shared<Routing>(Router{count, top_k, num_groups, top_groups, count - num_identity,
                                                    static_cast<Scoring>(scoring), normalize, scale, scales_inputs});
    const int chosen = program.buffer(0, false);
    Step step;
    step.label = "rows";
    step.reads = {logits};
    step.writes = {chosen};
    step.by_rows = true;
    step.owners = {nb::cast(bias), nb::cast(token_experts), nb::cast(image_bias)};
    step.run = [&program, logits, top_k, routing = routing.get(), text = bias ? bias->data() : nullptr,
                image = image_bias ? image_bias->data() : nullptr,
                table = token_experts ? token_experts->data() : nullptr](const Pass& pass, int64_t row) {
        const int32_t id = pass.token_ids[row];
        const bool is_image = image && id == kImageRow;
        const int64_t* fixed = table && !is_image ? table + id * top_k : nullptr;
        program.kernels.route(program.values(logits, row), is_image ? image : text, fixed, routing->router,
                              routing->ids.data() + row * top_k, routing->weights.data() + row * top_k);
    };
    program.add(std::move(step));
    program.routings.push_back(std::move(routing));
    return {(int)program.routings.size() - 1, chosen};
}

// Groups slots by expert. Experts that are not in memory are requested at once: the disk reads them in parallel.
int group_slots(Program& program, Routing* routing, int chosen, std::vector<Matrices> matrices) {
    const int grouped = program.buffer(0, false);
    Step step;
    step.label = "experts";
    step.reads = {chosen};
    step.writes = {grouped};
    step.num_tasks = [](const Pass&) { return 1; };
    step.run = [&program, routing, matrices = std::move(matrices)](const Pass& pass, int64_t) {
        routing->group(pass.num_rows);
        if (!program.reads_ahead) return;
        for (const Matrices& each : matrices)
            for (const int32_t expert : routing->experts) read_ahead(each[expert]->data, each[expert]->num_bytes());
    };
    program.add(std::move(step));
    return grouped;
}

int sum(Program& program, const Routing* routing, int x, int expert_outputs) {
    const int64_t width = program.buffers[expert_outputs].width, top_k = routing->router.top_k;
    const int out = program.buffer(width, false);
    Step step;
    step.label = "rows";
    step.reads = {x, expert_outputs};
    step.writes = {out};
    step.by_rows = true;
    step.run = [&program, routing, x, expert_outputs, width, top_k, out](const Pass&, int64_t row) {
        program.kernels.weighted_sum(program.values(expert_outputs, 0), program.buffers[expert_outputs].stride(),
                              routing->slots.data() + row * top_k, routing->weights.data() + row * top_k, top_k,
                              program.values(x, row), width, program.values(out, row));
    };
    program.add(std::move(step));
    return out;
}

// Gate and up matrices of all experts, with biases and activation: [cols] -> [inner] for each slot.
struct UpProjection {
    Matrices gates, ups; // no gates: activate(up)
    std::vector<const float*> gate_bias, up_bias;
    Activation kind;
};

int up_projection(Program& program, const Routing* routing, int x, int grouped, UpProjection all, nb::object owners) {
    for (const Matrices* each : {&all.gates, &all.ups})
        for (const OwnedMatrix* matrix : *each) program.require_input(x, *matrix);
    const int64_t width = all.ups[0]->rows, pairs = num_pairs(*all.ups[0]);
    const int inner = program.buffer(width, false);
    program.buffers[inner].copies = routing->router.top_k;
    Step step = step_over(routing, pairs, {x, grouped}, inner, std::move(owners));
    step.quantizes = !all.gates.empty();
    step.run = [&program, routing, all = std::move(all), x, inner, width, pairs](const Pass& pass, int64_t task) {
        const Slice slice = slice_of(*routing, task, pairs);
        Input in = program.input(x, pass);
        in.index = routing->rows.data() + slice.first;
        in.rows = slice.count;
        if (routing->router.scales_inputs) in.factors = routing->factors.data() + slice.first;
        const Output out = program.output(inner).from_row(slice.first);
        const Matrix& up = all.ups[slice.expert]->local_copy();
        if (!all.gates.empty()) {
            program.kernels.gated(all.gates[slice.expert]->local_copy(), up, all.gate_bias[slice.expert],
                                  all.up_bias[slice.expert], all.kind, in, slice.pair, out);
            return;
        }
        program.kernels.linear(up, all.up_bias[slice.expert], in, slice.pair, out);
        const int64_t at = slice.pair * 32, count = std::min<int64_t>(32, width - at);
        for (int64_t row = 0; row < slice.count; ++row) {
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
            "experts: the number of matrices differs from the router's");
    require(ups[0]->cols == program.buffers[x].width && downs[0]->cols == ups[0]->rows &&
                (gates.empty() || (gates[0]->rows == ups[0]->rows && gates[0]->cols == ups[0]->cols)),
            "experts: shapes differ");
    require(!gates.empty() || !routing->router.scales_inputs, "experts: scales_inputs needs gate matrices");
    require(count == routing->router.num_experts || downs[0]->rows == ups[0]->cols,
            "experts: identity experts need equal input and output widths");
    const std::vector<const float*> down_bias = biases_of(down_biases, downs);
    UpProjection all{gates, ups, biases_of(gate_biases, gates), biases_of(up_biases, ups), activation_of(kind)};
    std::vector<Matrices> matrices{ups, downs};
    if (!gates.empty()) matrices.insert(matrices.begin(), gates);
    const int grouped = group_slots(program, routing, chosen.second, std::move(matrices));
    const int inner = up_projection(program, routing, x, grouped, std::move(all),
                            nb::make_tuple(gate_list, up_list, gate_biases, up_biases));

    for (const OwnedMatrix* each : downs) program.require_input(inner, *each);
    const int expert_outputs = program.buffer(downs[0]->rows, false);
    program.buffers[expert_outputs].copies = top_k;
    const int64_t out_pairs = num_pairs(*downs[0]);
    Step down = step_over(routing, out_pairs, {inner, grouped}, expert_outputs, nb::make_tuple(down_list, down_biases));
    down.run = [&program, routing, downs, inner, expert_outputs, out_pairs, down_bias](const Pass&, int64_t task) {
        const Slice slice = slice_of(*routing, task, out_pairs);
        const Output all = program.output(inner).from_row(slice.first);
        Input in{all.values, all.stride, all.quants, slice.count, program.halves(inner)};
        if (in.halves) in.halves += slice.first * program.buffers[inner].half_stride();
        program.kernels.linear(downs[slice.expert]->local_copy(), down_bias[slice.expert], in, slice.pair,
                               program.output(expert_outputs).from_row(slice.first));
    };
    program.add(std::move(down));
    return sum(program, routing, x, expert_outputs);
}

// [R, heads * in] -> [R, heads * out]: each head has its own float matrix [out, in].
int head_linear(Program& program, int x, nb::list matrices) {
    const Matrices heads = matrices_of(matrices);
    const int64_t count = (int64_t)heads.size(), in = heads[0]->cols, out = heads[0]->rows;
    require(program.buffers[x].width == count * in, "head_linear: the input width differs from the matrices' columns");
    require(!any_quantized(heads), "head_linear: quantized matrices are not supported");
    const int out_buffer = program.buffer(count * out, program.buffers[x].logits);
    const int64_t pairs = num_pairs(*heads[0]);
    Step step;
    step.label = "matrices";
    step.reads = {x};
    step.writes = {out_buffer};
    step.owners = {matrices};
    step.num_tasks = [count, pairs](const Pass&) { return count * pairs; };
    step.run = [&program, heads, x, out_buffer, in, out, pairs](const Pass& pass, int64_t task) {
        const int64_t head = task / pairs;
        Input part = program.input(x, pass);
        part.values += head * in;
        part.halves = nullptr; // a head's columns are not whole panels
        Output to = program.output(out_buffer);
        to.values += head * out;
        program.kernels.linear(heads[head]->local_copy(), nullptr, part, task % pairs, to);
    };
    program.add(std::move(step));
    return out_buffer;
}

} // namespace

void bind_expert_steps(nb::class_<Program>& program) {
    program.def("route", route, nb::arg("logits"), nb::arg("bias").none(), nb::arg("top_k"), nb::arg("num_groups"),
                nb::arg("top_groups"), nb::arg("scoring"), nb::arg("normalize"), nb::arg("scale"), nb::arg("num_identity"),
                nb::arg("scales_inputs"), nb::arg("token_experts").none(), nb::arg("image_bias").none());
    program.def("experts", experts);
    program.def("head_linear", head_linear);
}

} // namespace headstart
