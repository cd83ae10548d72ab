// Converts a StepPlan (headstart/core.py) to a validated Pass.
#pragma once

#include "program.h"

namespace headstart {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Throws std::invalid_argument if an id, slot or position is outside the program's limits.
void check_pass(const Program& program, const Pass& pass);

// Owns the arrays that `pass` points into. hidden: rows to read instead of the hidden-state pool's.
class PlannedPass {
  public:
    PlannedPass(const Program& program, nb::handle plan, const HiddenPool* hidden_pool, std::optional<Floats> hidden);
    PlannedPass(const PlannedPass&) = delete;
    PlannedPass& operator=(const PlannedPass&) = delete;
    Pass pass{};

  private:
    Ints token_ids_, positions_, slots_, row_starts_, logit_rows_;
    Table block_tables_;
    std::optional<Table> rope_positions_;
    std::optional<Ints> visible_start_, visible_end_, hidden_slots_, adapter_slots_, path_starts_, path_slots_;
    std::optional<Floats> hidden_;
    std::vector<Ints> state_arrays_;
    std::vector<int32_t> row_spans_, unit_starts_, unit_spans_;
    States states_{};
};

} // namespace headstart
