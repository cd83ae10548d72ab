// Converts a StepPlan (headstart/core.py) to a Pass, checks all ids, slots and positions, and runs it.
#include <algorithm>

#include "plan.h"

namespace headstart {
namespace {

constexpr int64_t kMaxPath = 17; // slots in a path: drafts have at most 16 tokens

bool within(const int32_t* values, int64_t count, int64_t limit) {
    int32_t lowest = 0, highest = -1;
    for (int64_t i = 0; i < count; ++i) {
        lowest = std::min(lowest, values[i]);
        highest = std::max(highest, values[i]);
    }
    return lowest >= 0 && highest < limit;
}

bool ascends(const int32_t* starts, int64_t count) {
    return starts[0] == 0 && std::is_sorted(starts, starts + count + 1);
}

States states_of(const std::vector<Ints>& arrays, const Pass& pass) {
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
        require(states.starts[s] <= first && kept <= limits.kept, "run: more kept rows than the pool has per sequence");
        require(kept <= 0 || (states.own[s] >= 0 && states.own[s] < limits.owned),
                "run: kept rows belong to a slot outside the pool");
    }
}

void check_paths(const Program& program, const Pass& pass, int64_t num_slots) {
    require(ascends(pass.path_starts, pass.num_rows) && pass.path_starts[pass.num_rows] == num_slots,
            "run: the paths' arrays differ in length");
    require(within(pass.path_slots, num_slots, program.limits.table_slots), "run: a path's slot is outside the pool");
    for (int64_t row = 0; row < pass.num_rows; ++row) {
        const int64_t count = pass.path_starts[row + 1] - pass.path_starts[row];
        require(count <= std::min<int64_t>(kMaxPath, pass.positions[row] + 1), "run: a path is too long");
        require(count == 0 || pass.visible_end[row] == pass.positions[row], "run: a row with a path sees later positions");
    }
}

void check_blocks(const Program& program, const Pass& pass) {
    const int64_t blocks = program.limits.table_slots / pass.block_size;
    for (int64_t s = 0; s < pass.num_spans; ++s) {
        const int32_t last = *std::max_element(pass.visible_end + pass.row_starts[s], pass.visible_end + pass.row_starts[s + 1]);
        const int64_t used = last / pass.block_size + 1;
        require(used <= pass.table_width && within(pass.block_tables + s * pass.table_width, used, blocks),
                "run: a row sees a position outside its blocks or the pool");
    }
}

template <class Array> Array array(nb::handle plan, const char* name) { return nb::cast<Array>(plan.attr(name)); }

template <class Array> std::optional<Array> optional_array(nb::handle owner, const char* name) {
    nb::object found = owner.attr(name);
    if (found.is_none()) return std::nullopt;
    return nb::cast<Array>(found);
}

} // namespace

void check_pass(const Program& program, const Pass& pass) {
    const Limits& limits = program.limits;
    require(ascends(pass.row_starts, pass.num_spans), "run: the rows' starts do not ascend");
    const auto is_known = [&](int32_t id) { return id < limits.tokens && (id >= 0 || (id == kImageRow && limits.marks)); };
    require(std::all_of(pass.token_ids, pass.token_ids + pass.num_rows, is_known), "run: a token id is outside the embedding");
    require(within(pass.positions, pass.num_rows, INT64_MAX) && within(pass.visible_end, pass.num_rows, INT64_MAX) &&
                within(pass.visible_start, pass.num_rows, INT64_MAX),
            "run: a position is below 0");
    require(!pass.rope_positions || within(pass.rope_positions, pass.num_rows * kRopeAxes, INT64_MAX),
            "run: a rotary position is below 0");
    require(within(pass.slots, pass.num_rows, limits.slots), "run: a slot is outside the pool");
    require(within(pass.logit_rows, pass.num_logits, pass.num_rows), "run: a logit row is not in the pass");
    if (program.hidden_width && pass.hidden)
        require(pass.hidden_stride >= program.hidden_width, "run: hidden states are narrower than the program reads");
    else if (program.hidden_width)
        require(pass.hidden_pool->width >= program.hidden_width && within(pass.hidden_slots, pass.num_rows, pass.hidden_pool->num_slots),
                "run: a hidden state's slot is outside the pool");
    if (program.limits.table_slots != INT64_MAX) check_blocks(program, pass);
    if (program.wants_states) check_states(limits, pass);
}

PlannedPass::PlannedPass(const Program& program, nb::handle plan, const HiddenPool* hidden_pool, std::optional<Floats> hidden)
    : token_ids_(array<Ints>(plan, "token_ids")), positions_(array<Ints>(plan, "positions")),
      slots_(array<Ints>(plan, "slots")), row_starts_(array<Ints>(plan, "row_starts")),
      logit_rows_(array<Ints>(plan, "logit_rows")), block_tables_(array<Table>(plan, "block_tables")),
      rope_positions_(optional_array<Table>(plan, "rope_positions")),
      visible_start_(optional_array<Ints>(plan, "visible_start")),
      visible_end_(optional_array<Ints>(plan, "visible_end")), hidden_slots_(optional_array<Ints>(plan, "hidden_slots")),
      adapter_slots_(optional_array<Ints>(plan, "adapter_slots")),
      hidden_(std::move(hidden)) {
    const int64_t rows = (int64_t)token_ids_.size(), spans = (int64_t)row_starts_.size() - 1;
    const nb::object tree = plan.attr("paths"), states = plan.attr("states");
    pass.block_size = nb::cast<int64_t>(plan.attr("block_size"));
    pass.first_position = nb::cast<int64_t>(plan.attr("first_position"));
    require(rows > 0 && (int64_t)positions_.size() == rows && (int64_t)slots_.size() == rows && spans > 0 &&
                (int64_t)block_tables_.shape(0) == spans && row_starts_.data()[spans] == rows &&
                (!visible_start_ || (int64_t)visible_start_->size() == rows) &&
                (!visible_end_ || (int64_t)visible_end_->size() == rows) &&
                (!rope_positions_ ||
                 ((int64_t)rope_positions_->shape(0) == rows && rope_positions_->shape(1) == kRopeAxes)) &&
                (!hidden_slots_ || (int64_t)hidden_slots_->size() == rows) &&
                (!adapter_slots_ || (int64_t)adapter_slots_->size() == rows),
            "run: the plan's arrays differ in length");
    require(pass.block_size > 0 && pass.block_size % 16 == 0, "run: blocks must hold a multiple of 16 positions");
    require(!hidden_ || (int64_t)hidden_->shape(0) == rows, "run: hidden has not one row per token");
    require(!program.hidden_width || hidden_ || (hidden_slots_ && hidden_pool),
            "run: the program needs hidden states, and the plan gives none");
    require(!program.wants_states || !states.is_none(), "run: the program needs recurrent states, and the plan gives none");
    pass.num_rows = rows;
    pass.num_logits = (int64_t)logit_rows_.size();
    pass.num_spans = spans;
    pass.table_width = (int64_t)block_tables_.shape(1);
    pass.token_ids = token_ids_.data();
    pass.positions = positions_.data();
    pass.slots = slots_.data();
    pass.visible_start = visible_start_ ? visible_start_->data() : positions_.data();
    pass.visible_end = visible_end_ ? visible_end_->data() : positions_.data();
    pass.row_starts = row_starts_.data();
    pass.block_tables = block_tables_.data();
    pass.logit_rows = logit_rows_.data();
    pass.hidden_slots = hidden_slots_ ? hidden_slots_->data() : nullptr;
    pass.rope_positions = rope_positions_ ? rope_positions_->data() : nullptr;
    pass.adapter_slots = adapter_slots_ ? adapter_slots_->data() : nullptr;
    pass.hidden_pool = hidden_pool;
    pass.hidden = hidden_ ? hidden_->data() : nullptr;
    pass.hidden_stride = hidden_ ? (int64_t)hidden_->shape(1) : 0;
    if (!states.is_none() || !tree.is_none() || program.scores.wanted || program.wants_spans) {
        require(ascends(row_starts_.data(), spans), "run: the rows' starts do not ascend");
        row_spans_.resize(rows);
        for (int64_t s = 0; s < spans; ++s)
            std::fill(row_spans_.begin() + pass.row_starts[s], row_spans_.begin() + pass.row_starts[s + 1], (int32_t)s);
        pass.row_spans = row_spans_.data();
    }
    if (!states.is_none()) {
        for (const char* name :
             {"own", "reads", "starts", "keeps", "store_starts", "store_positions", "store_slots"})
            state_arrays_.push_back(array<Ints>(states, name));
        states_ = states_of(state_arrays_, pass);
        pass.states = &states_;
    }
    check_pass(program, pass);
    pass.num_units = spans;
    pass.unit_starts = pass.row_starts;
    if (tree.is_none()) return;
    // a row with a path sees keys of its own, so it is a unit; other rows of a span share one with their neighbours
    path_starts_ = array<Ints>(tree, "starts");
    path_slots_ = array<Ints>(tree, "slots");
    require((int64_t)path_starts_->size() == rows + 1, "run: the plan's arrays differ in length");
    pass.path_starts = path_starts_->data();
    pass.path_slots = path_slots_->data();
    check_paths(program, pass, (int64_t)path_slots_->size());
    const auto has_path = [&](int64_t row) { return pass.path_starts[row + 1] > pass.path_starts[row]; };
    for (int64_t row = 0; row < rows; ++row) {
        if (row && row_spans_[row] == row_spans_[row - 1] && !has_path(row) && !has_path(row - 1)) continue;
        unit_starts_.push_back((int32_t)row);
        unit_spans_.push_back(row_spans_[row]);
    }
    pass.num_units = (int64_t)unit_spans_.size();
    unit_starts_.push_back((int32_t)rows);
    pass.unit_starts = unit_starts_.data();
    pass.unit_spans = unit_spans_.data();
}

namespace {

nb::dict run(Program& program, ThreadPool& threads, Arena& arena, nb::handle plan, const HiddenPool* hidden_pool,
             std::optional<Floats> hidden) {
    PlannedPass planned(program, plan, hidden_pool, std::move(hidden));
    return program.run(threads, arena, planned.pass);
}

} // namespace

void bind_run(nb::class_<Program>& program) {
    program.def("run", run, nb::arg("threads"), nb::arg("arena"), nb::arg("plan"), nb::arg("hidden_pool").none(),
                nb::arg("hidden").none());
}

} // namespace headstart
