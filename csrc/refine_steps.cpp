// A product whose largest outputs alone are exact (Ops.refine of headstart/kernels/ops.py).
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

constexpr int64_t kUnit = 2 * kLanes; // neighbouring outputs, which the kernels make together

float largest(const float* x, int64_t count) {
    float lanes[8];
    std::fill_n(lanes, 8, -std::numeric_limits<float>::infinity());
    for (; count >= 8; count -= 8, x += 8)
        for (int l = 0; l < 8; ++l) lanes[l] = x[l] > lanes[l] ? x[l] : lanes[l];
    for (; count > 0; --count, ++x) lanes[0] = *x > lanes[0] ? *x : lanes[0];
    return *std::max_element(lanes, lanes + 8);
}

// Numbers of the units with the largest values of x [width], in ascending order; the lower of equal ones.
void choose(const float* x, int64_t width, int64_t count, int32_t* chosen) {
    thread_local std::vector<float> peaks, sorted;
    const int64_t units = (width + kUnit - 1) / kUnit;
    peaks.resize(units);
    for (int64_t unit = 0; unit < units; ++unit)
        peaks[unit] = largest(x + unit * kUnit, std::min(kUnit, width - unit * kUnit));
    sorted = peaks;
    std::nth_element(sorted.begin(), sorted.begin() + (count - 1), sorted.end(), std::greater<float>());
    const float least = sorted[count - 1];
    int64_t equal = count - std::count_if(sorted.begin(), sorted.begin() + count, [least](float p) { return p > least; });
    for (int64_t unit = 0; unit < units && count > 0; ++unit)
        if (peaks[unit] > least || (peaks[unit] == least && equal-- > 0)) *chosen++ = int32_t(unit), --count;
}

int refine(Program& program, int approximate, int x, nb::object matrix, int64_t count, const std::string& label) {
    const Matrix* w = nb::cast<const OwnedMatrix*>(matrix);
    const int64_t units = (w->rows + kUnit - 1) / kUnit;
    if (program.buffers[x].width != w->cols || program.buffers[approximate].width != w->rows ||
        program.buffers[x].logits != program.buffers[approximate].logits)
        throw std::invalid_argument("refine: shapes differ");
    if (count < 1) throw std::invalid_argument("refine: at least one block must be exact");
    count = std::min(count, units);
    program.want(x, *w);
    const int chosen = program.buffer(count, program.buffers[x].logits); // of integers
    Step pick;
    pick.label = "rows";
    pick.reads = {approximate};
    pick.writes = {chosen};
    pick.by_rows = true;
    pick.run = [&program, approximate, chosen, count, width = w->rows](const Pass&, int64_t row) {
        choose(program.values(approximate, row), width, count, reinterpret_cast<int32_t*>(program.values(chosen, row)));
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
        program.kernels.linear(*w, nullptr, in, unit, out);
    };
    program.add(std::move(step));
    return approximate;
}

} // namespace

void bind_refine_steps(nb::class_<Program>& program) {
    program.def("refine", refine, nb::arg("approximate"), nb::arg("x"), nb::arg("matrix"), nb::arg("count"),
                nb::arg("label"));
}

} // namespace headstart
