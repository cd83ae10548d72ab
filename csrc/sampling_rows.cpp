#include "sampling_rows.h"

#include <limits>

namespace headstart {
namespace {

void require(bool holds, const char* what) {
    if (!holds) throw nb::value_error(what);
}

template <class T> Column<T> column(nb::handle rows, const char* name, size_t num_rows) {
    auto values = nb::cast<Column<T>>(rows.attr(name));
    require(values.shape(0) == num_rows, name);
    return values;
}

} // namespace

template <class Value>
Edits<Value>::Edits(nb::handle rows, const char* indptr_name, const char* ids_name, const char* values_name,
                    size_t num_rows)
    : indptr(nb::cast<Column<int32_t>>(rows.attr(indptr_name))), ids(nb::cast<Column<int32_t>>(rows.attr(ids_name))),
      values(nb::cast<Column<Value>>(rows.attr(values_name))) {
    require(indptr.shape(0) == num_rows + 1 && ids.shape(0) == values.shape(0),
            "sampling rows: a sparse edit's arrays differ in length");
    require(indptr.data()[0] >= 0 && std::is_sorted(indptr.data(), indptr.data() + num_rows + 1) &&
                size_t(indptr.data()[num_rows]) <= ids.shape(0),
            "sampling rows: an indptr does not match its ids");
}

DrawRows::DrawRows(nb::handle rows, size_t n, int64_t vocab_size)
    : temperature_(column<float>(rows, "temperature", n)), top_p_(column<float>(rows, "top_p", n)),
      min_p_(column<float>(rows, "min_p", n)), repetition_(column<float>(rows, "repetition", n)),
      presence_(column<float>(rows, "presence", n)), frequency_(column<float>(rows, "frequency", n)),
      top_k_(column<int32_t>(rows, "top_k", n)), choice_(column<int32_t>(rows, "choice", n)),
      seed_(column<uint64_t>(rows, "seed", n)), position_(column<int64_t>(rows, "position", n)),
      bias_(rows, "bias_indptr", "bias_ids", "bias_values", n),
      penalty_(rows, "penalty_indptr", "penalty_ids", "penalty_counts", n) {
    nb::object mask = rows.attr("allowed");
    if (mask.is_none()) return;
    allowed_ = nb::cast<decltype(allowed_)::value_type>(mask);
    require(allowed_->shape(0) == n && int64_t(allowed_->shape(1)) * 32 >= vocab_size, "allowed has a wrong shape");
}

int64_t DrawRows::draw(const float* x, int64_t row, const Vocabulary& vocabulary, double* probs, Scratch& scratch,
                       const int64_t* drafted, int64_t num_drafted) const {
    const uint64_t seed = seed_.data()[row];
    const NoiseKey key{uint32_t(seed), uint32_t(seed >> 32), uint32_t(position(row) + num_drafted),
                       uint32_t(choice_.data()[row])};
    const Draw draw{temperature_.data()[row], top_k_.data()[row], top_p_.data()[row], min_p_.data()[row], key};
    int64_t drawn;
    if (is_edited(row)) {
        if (int64_t(scratch.edited.size()) < vocabulary.width) scratch.edited.resize(vocabulary.width);
        edit(x, row, vocabulary, drafted, num_drafted, scratch.edited.data());
        drawn = draw_row<double>(scratch.edited.data(), vocabulary, draw, probs, scratch);
    } else {
        drawn = draw_row<float>(x, vocabulary, draw, probs, scratch);
    }
    return drawn < 0 ? drawn : vocabulary.token_id(drawn);
}

// Applies mask, bias, then penalties, in float64.
void DrawRows::edit(const float* x, int64_t row, const Vocabulary& vocabulary, const int64_t* drafted,
                    int64_t num_drafted, double* scores) const {
    const int64_t width = vocabulary.width;
    std::copy(x, x + width, scores);
    if (allowed_) {
        const uint32_t* bits = allowed_->data() + row * allowed_->shape(1);
        for (int64_t i = 0; i < width; ++i) {
            const int64_t id = vocabulary.token_id(i);
            if (!(bits[id / 32] >> (id % 32) & 1)) scores[i] = -std::numeric_limits<double>::infinity();
        }
    }
    for (int32_t i = bias_.begin(row); i < bias_.end(row); ++i) {
        const int64_t column = vocabulary.column(bias_.ids.data()[i]);
        if (column >= 0) scores[column] += double(bias_.values.data()[i]);
    }
    if (!is_penalized(row)) return;
    const double repetition = repetition_.data()[row], presence = presence_.data()[row],
                 frequency = frequency_.data()[row];
    const int64_t* drafted_end = drafted + num_drafted;
    const auto penalize = [&](int64_t id, double count) {
        const int64_t column = vocabulary.column(id);
        if (column < 0) return;
        count += double(std::count(drafted, drafted_end, id));
        double& score = scores[column];
        score = score > 0 ? score / repetition : score * repetition;
        score -= frequency * count + (count > 0 ? presence : 0.0);
    };
    const int32_t *first = penalty_.ids.data() + penalty_.begin(row), *last = penalty_.ids.data() + penalty_.end(row);
    for (const int32_t* id = first; id < last; ++id) penalize(*id, penalty_.values.data()[id - penalty_.ids.data()]);
    for (const int64_t* id = drafted; id < drafted_end; ++id) // each distinct token once
        if (std::find(drafted, id, *id) == id && std::find(first, last, int32_t(*id)) == last) penalize(*id, 0);
}

Scratch& thread_scratch(const Path& path) {
    thread_local Scratch scratch;
    scratch.loops = path.loops;
    return scratch;
}

} // namespace headstart
