// From the arrays of a StepPlan (headstart/core.py) to a pass: nothing in it may point outside what a program reads.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "program.h"

namespace headstart {
namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kMostPath = 17;

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

bool within(const int32_t* values, int64_t count, int64_t limit) {
    int32_t least = 0, most = -1;
    for (int64_t i = 0; i < count; ++i) {
        least = std::min(least, values[i]);
        most = std::max(most, values[i]);
    }
    return least >= 0 && most < limit;
}

bool ascends(const int32_t* starts, int64_t count) {
    return starts[0] == 0 && std::is_sorted(starts, starts + count + 1);
}

States states_of(const std::vector<Ints>& arrays, const Pass& pass) {
    require(arrays.size() == 7, "run: states are seven arrays");
    for (size_t i = 0; i < 5; ++i)
        require((int64_t)arrays[i].size() == pass.num_spans + (i == 4), "run: the states' arrays differ in length");
    const int32_t* starts = arrays[4].data();
    require(ascends(starts, pass.num_spans) && (int64_t)arrays[5].size() == starts[pass.num_spans] &&
                arrays[6].size() == arrays[5].size(),
            "run: the stores' arrays differ in length");
    return {arrays[0].data(), arrays[1].data(), arrays[2].data(), arrays[3].data(),
            starts,           arrays[5].data(), arrays[6].data(), pass.row_spans};
}

void check_states(const Limits& limits, const Pass& pass) {
    const States& states = *pass.states;
    const int64_t stores = states.store_starts[pass.num_spans];
    require(within(states.store_slots, stores, limits.states), "run: a stored state is outside the pool");
    for (int64_t s = 0; s < pass.num_spans; ++s) {
        const int64_t first = pass.positions[pass.row_starts[s]], end = first + pass.row_starts[s + 1] - pass.row_starts[s];
        require(states.reads[s] >= -1 && states.reads[s] < limits.states, "run: a state is outside the pool");
        const int64_t kept = std::max<int64_t>(first - states.starts[s], end - states.keeps[s]);
        require(states.starts[s] <= first && kept <= limits.kept, "run: more rows than a sequence keeps");
        require(kept <= 0 || (states.own[s] >= 0 && states.own[s] < limits.owned), "run: kept rows of no sequence");
    }
}

void check_paths(const Program& program, const Pass& pass, int64_t num_slots) {
    require(ascends(pass.path_starts, pass.num_rows) && pass.path_starts[pass.num_rows] == num_slots,
            "run: the paths' arrays differ in length");
    require(within(pass.path_slots, num_slots, program.limits.table_slots), "run: a path leaves the pool");
    for (int64_t row = 0; row < pass.num_rows; ++row) {
        const int64_t count = pass.path_starts[row + 1] - pass.path_starts[row];
        require(count <= std::min<int64_t>(kMostPath, pass.positions[row] + 1), "run: a path is too long");
        require(count == 0 || pass.sees[row] == pass.positions[row], "run: a row with a path sees beyond itself");
    }
}

void check_blocks(const Program& program, const Pass& pass) {
    const int64_t blocks = program.limits.table_slots / pass.block_size;
    for (int64_t s = 0; s < pass.num_spans; ++s) {
        const int32_t last = *std::max_element(pass.sees + pass.row_starts[s], pass.sees + pass.row_starts[s + 1]);
        const int64_t used = last / pass.block_size + 1;
        require(used <= pass.table_width && within(pass.block_tables + s * pass.table_width, used, blocks),
                "run: a row sees a position outside its blocks or the pool");
    }
}

void check(const Program& program, const Pass& pass) {
    const Limits& limits = program.limits;
    require(ascends(pass.row_starts, pass.num_spans), "run: the rows' starts do not ascend");
    require(within(pass.token_ids, pass.num_rows, limits.tokens), "run: a token id is outside the embedding");
    require(within(pass.positions, pass.num_rows, INT64_MAX) && within(pass.sees, pass.num_rows, INT64_MAX),
            "run: a position is below 0");
    require(within(pass.slots, pass.num_rows, limits.slots), "run: a slot is outside the pool");
    require(within(pass.logit_rows, pass.num_logits, pass.num_rows), "run: a logit row is not in the pass");
    if (program.wants_hidden && !pass.hidden)
        require(within(pass.hidden_slots, pass.num_rows, pass.hidden_pool->num_slots),
                "run: a hidden state's slot is outside the pool");
    if (!program.groups.empty()) check_blocks(program, pass);
    if (program.wants_states) check_states(limits, pass);
}

nb::dict run(Program& program, ThreadPool& threads, Arena& arena, Ints token_ids, Ints positions, Ints slots,
             Ints row_starts, Table block_tables, Ints logit_rows, int64_t block_size, int64_t first_position,
             std::optional<Ints> sees, std::optional<Ints> path_starts, std::optional<Ints> path_slots,
             std::optional<Ints> hidden_slots, const HiddenPool* hidden_pool, std::optional<Rows> hidden,
             const std::optional<std::vector<Ints>>& states) {
    const int64_t rows = (int64_t)token_ids.size(), spans = (int64_t)row_starts.size() - 1;
    require(rows > 0 && (int64_t)positions.size() == rows && (int64_t)slots.size() == rows && spans > 0 &&
                (int64_t)block_tables.shape(0) == spans && row_starts.data()[spans] == rows &&
                (!sees || (int64_t)sees->size() == rows) && (!hidden_slots || (int64_t)hidden_slots->size() == rows) &&
                !path_starts == !path_slots && (!path_starts || (int64_t)path_starts->size() == rows + 1),
            "run: the plan's arrays differ in length");
    require(block_size > 0 && block_size % 16 == 0, "run: blocks must hold a multiple of 16 positions");
    require(!hidden || (int64_t)hidden->shape(0) == rows, "run: hidden has another number of rows");
    require(!program.wants_hidden || hidden || (hidden_slots && hidden_pool), "run: the program reads hidden states");
    require(!program.wants_states || states, "run: the program reads recurrent states");
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
    pass.sees = sees ? sees->data() : positions.data();
    pass.row_starts = row_starts.data();
    pass.block_tables = block_tables.data();
    pass.logit_rows = logit_rows.data();
    pass.hidden_slots = hidden_slots ? hidden_slots->data() : nullptr;
    pass.hidden_pool = hidden_pool;
    pass.hidden = hidden ? hidden->data() : nullptr;
    pass.hidden_stride = hidden ? (int64_t)hidden->shape(1) : 0;
    std::vector<int32_t> row_spans, each_row;
    States told{};
    if (states || path_starts) {
        require(ascends(row_starts.data(), spans), "run: the rows' starts do not ascend");
        row_spans.resize(rows);
        for (int64_t s = 0; s < spans; ++s)
            std::fill(row_spans.begin() + pass.row_starts[s], row_spans.begin() + pass.row_starts[s + 1], (int32_t)s);
        pass.row_spans = row_spans.data();
    }
    if (states) {
        told = states_of(*states, pass);
        pass.states = &told;
    }
    check(program, pass);
    pass.num_units = spans;
    pass.unit_starts = pass.row_starts;
    if (path_starts) { // rows that see different keys cannot share a task
        pass.path_starts = path_starts->data();
        pass.path_slots = path_slots->data();
        check_paths(program, pass, (int64_t)path_slots->size());
        each_row.resize(rows + 1);
        std::iota(each_row.begin(), each_row.end(), 0);
        pass.num_units = rows;
        pass.unit_starts = each_row.data();
        pass.unit_spans = pass.row_spans;
    }
    return program.run(threads, arena, pass);
}

} // namespace

void bind_run(nb::class_<Program>& program) {
    program.def("run", run, nb::arg("threads"), nb::arg("arena"), nb::arg("token_ids"), nb::arg("positions"),
                nb::arg("slots"), nb::arg("row_starts"), nb::arg("block_tables"), nb::arg("logit_rows"),
                nb::arg("block_size"), nb::arg("first_position"), nb::arg("sees").none(), nb::arg("path_starts").none(),
                nb::arg("path_slots").none(), nb::arg("hidden_slots").none(), nb::arg("hidden_pool").none(),
                nb::arg("hidden").none(), nb::arg("states").none());
}

} // namespace headstart
