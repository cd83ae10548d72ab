// Recorded steps of partial logits: exact products for the blocks with the largest approximate logits (Ops.refine), and
// logits of the best groups of tokens only (Ops.keep_groups of headstart/kernels/ops.py).
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <vector>

#include "packing.h"
#include "program.h"

namespace headstart {
namespace {

constexpr int64_t kUnit = 2 * kLanes; // outputs computed together by a kernel call
constexpr float kExcludedLogit = -1e30f;       // logit of an excluded token; logits must be finite

using Groups = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

float largest(const float* x, int64_t count) {
    float lanes[8];
    std::fill_n(lanes, 8, -std::numeric_limits<float>::infinity());
    for (; count >= 8; count -= 8, x += 8)
        for (int l = 0; l < 8; ++l) lanes[l] = x[l] > lanes[l] ? x[l] : lanes[l];
    for (; count > 0; --count, ++x) lanes[0] = *x > lanes[0] ? *x : lanes[0];
    return *std::max_element(lanes, lanes + 8);
}

// Indices of the `count` largest values, ascending; ties go to lower indices.
void top_indices(const float* values, int64_t width, int64_t count, int32_t* chosen) {
    thread_local std::vector<float> sorted;
    sorted.assign(values, values + width);
    std::nth_element(sorted.begin(), sorted.begin() + (count - 1), sorted.end(), std::greater<float>());
    const float least = sorted[count - 1];
    int64_t equal = count - std::count_if(sorted.begin(), sorted.begin() + count, [least](float p) { return p > least; });
    for (int64_t i = 0; i < width && count > 0; ++i)
        if (values[i] > least || (values[i] == least && equal-- > 0)) *chosen++ = int32_t(i), --count;
    while (count-- > 0) *chosen++ = 0; // fewer than `count` found: values are NaN
}

// Indices of the `count` units with the largest maxima of x [width], ascending; ties go to lower units.
void top_units(const float* x, int64_t width, int64_t count, int32_t* chosen) {
    thread_local std::vector<float> peaks;
    const int64_t units = (width + kUnit - 1) / kUnit;
    peaks.resize(units);
    for (int64_t unit = 0; unit < units; ++unit)
        peaks[unit] = largest(x + unit * kUnit, std::min(kUnit, width - unit * kUnit));
    top_indices(peaks.data(), units, count, chosen);
}

int refine(Program& program, int approximate, int x, nb::object matrix, int64_t count, const std::string& label) {
    const OwnedMatrix* w = nb::cast<const OwnedMatrix*>(matrix);
    const int64_t units = (w->rows + kUnit - 1) / kUnit;
    if (program.buffers[x].width != w->cols || program.buffers[approximate].width != w->rows ||
        program.buffers[x].logits != program.buffers[approximate].logits)
        throw std::invalid_argument("refine: shapes differ");
    if (count < 1) throw std::invalid_argument("refine: at least one block must be exact");
    count = std::min(count, units);
    program.require_input(x, *w);
    const int chosen = program.buffer(count, program.buffers[x].logits); // holds int32
    Step pick;
    pick.label = "rows";
    pick.reads = {approximate};
    pick.writes = {chosen};
    pick.by_rows = true;
    pick.run = [&program, approximate, chosen, count, width = w->rows](const Pass&, int64_t row) {
        top_units(program.values(approximate, row), width, count, reinterpret_cast<int32_t*>(program.values(chosen, row)));
    };
    program.add(std::move(pick));
    Step step;
    step.label = label;
    step.reads = {approximate, x, chosen};
    step.writes = {approximate};
    step.owners = {matrix};
    step.num_tasks = [&program, x, count](const Pass& pass) { return program.rows(x, pass) * count; };
    step.run = [&program, w, x, approximate, chosen, count](const Pass& pass, int64_t task) {
        const int64_t row = task / count;
        Input in = program.input(x, pass);
        in.values += row * in.stride;
        if (in.quants) in.quants += row * QuantLayout(w->cols).row_bytes();
        if (in.halves) in.halves += row * w->padded();
        in.rows = 1;
        Output out = program.output(approximate);
        out.values += row * out.stride;
        const int32_t unit = reinterpret_cast<const int32_t*>(program.values(chosen, row))[task % count];
        program.kernels.linear(w->local_copy(), nullptr, in, unit, out);
    };
    program.add(std::move(step));
    return approximate;
}

// Sets the logits of tokens outside the `count` groups with the largest scores to kExcludedLogit.
int keep_groups(Program& program, int logits, int scores, Groups groups, int64_t count) {
    const int64_t width = program.buffers[logits].width, num_groups = program.buffers[scores].width;
    const bool is_supported = std::all_of(groups.data(), groups.data() + groups.size(),
                                   [num_groups](int64_t group) { return group >= 0 && group < num_groups; });
    if ((int64_t)groups.size() != width || !is_supported || program.buffers[logits].logits != program.buffers[scores].logits)
        throw std::invalid_argument("keep_groups: shapes differ, or a group has no score");
    if (count < 1 || count > num_groups)
        throw std::invalid_argument("keep_groups: count must be from 1 to the number of groups");
    Step step;
    step.label = "rows";
    step.reads = {logits, scores};
    step.writes = {logits};
    step.by_rows = true;
    step.owners = {nb::cast(groups)};
    step.run = [&program, logits, scores, of = groups.data(), width, num_groups, count](const Pass&, int64_t row) {
        thread_local std::vector<int32_t> chosen;
        thread_local std::vector<uint8_t> kept;
        chosen.resize(count);
        kept.assign(num_groups, 0);
        top_indices(program.values(scores, row), num_groups, count, chosen.data());
        for (const int32_t group : chosen) kept[group] = 1;
        float* x = program.values(logits, row);
        for (int64_t token = 0; token < width; ++token)
            if (!kept[of[token]]) x[token] = kExcludedLogit;
    };
    program.add(std::move(step));
    return logits;
}

} // namespace

void bind_refine_steps(nb::class_<Program>& program) {
    program.def("refine", refine, nb::arg("approximate"), nb::arg("x"), nb::arg("matrix"), nb::arg("count"),
                nb::arg("label"));
    program.def("keep_groups", keep_groups, nb::arg("logits"), nb::arg("scores"), nb::arg("groups"), nb::arg("count"));
}

} // namespace headstart
