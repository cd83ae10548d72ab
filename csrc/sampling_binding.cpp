// Python side of the sampler: rows of a SamplingRows, shared out over the pool.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "bindings.h"
#include "cpu.h"
#include "pool.h"
#include "sampling.h"

namespace nb = nanobind;

namespace headstart {
namespace {

template <class T> using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Result = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Table = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>; // rows may lie apart
using TokenIds = std::optional<Column<int64_t>>;

void require(bool holds, const char* what) {
    if (!holds) throw nb::value_error(what);
}

void require_rows(const Logits& logits, const TokenIds& token_ids) {
    require(logits.size() == 0 || logits.shape(1) == 1 || logits.stride(1) == 1, "the logits of a row do not lie side by side");
    require(!token_ids || token_ids->shape(0) == logits.shape(1), "token_ids and logits differ in width");
}

// Sparse edits of one kind, CSR over rows.
template <class Value> struct Edits {
    Column<int32_t> indptr, ids;
    Column<Value> values;

    Edits(nb::handle rows, const char* indptr_name, const char* ids_name, const char* values_name, size_t num_rows)
        : indptr(nb::cast<Column<int32_t>>(rows.attr(indptr_name))),
          ids(nb::cast<Column<int32_t>>(rows.attr(ids_name))),
          values(nb::cast<Column<Value>>(rows.attr(values_name))) {
        require(indptr.shape(0) == num_rows + 1 && ids.shape(0) == values.shape(0), "a sparse edit has a wrong length");
        require(indptr.data()[0] >= 0 && std::is_sorted(indptr.data(), indptr.data() + num_rows + 1) &&
                    size_t(indptr.data()[num_rows]) <= ids.shape(0),
                "an indptr does not fit its ids");
    }
    int32_t begin(int64_t row) const { return indptr.data()[row]; }
    int32_t end(int64_t row) const { return indptr.data()[row + 1]; }
};

template <class T> Column<T> column(nb::handle rows, const char* name, size_t num_rows) {
    auto values = nb::cast<Column<T>>(rows.attr(name));
    require(values.shape(0) == num_rows, name);
    return values;
}

// SamplingRows; the meanings are there.
struct Rows {
    size_t count;
    Column<float> temperature, top_p, min_p, repetition, presence, frequency;
    Column<int32_t> top_k, choice;
    Column<uint64_t> seed;
    Column<int64_t> position;
    Edits<float> bias;
    Edits<int32_t> penalty;
    std::optional<Table<const uint32_t>> allowed;

    Rows(nb::handle rows, size_t n, int64_t vocab_size)
        : count(n), temperature(column<float>(rows, "temperature", n)), top_p(column<float>(rows, "top_p", n)),
          min_p(column<float>(rows, "min_p", n)), repetition(column<float>(rows, "repetition", n)),
          presence(column<float>(rows, "presence", n)), frequency(column<float>(rows, "frequency", n)),
          top_k(column<int32_t>(rows, "top_k", n)), choice(column<int32_t>(rows, "choice", n)),
          seed(column<uint64_t>(rows, "seed", n)), position(column<int64_t>(rows, "position", n)),
          bias(rows, "bias_indptr", "bias_ids", "bias_values", n),
          penalty(rows, "penalty_indptr", "penalty_ids", "penalty_counts", n) {
        nb::object mask = rows.attr("allowed");
        if (mask.is_none()) return;
        allowed = nb::cast<Table<const uint32_t>>(mask);
        require(allowed->shape(0) == n && int64_t(allowed->shape(1)) * 32 >= vocab_size, "allowed has a wrong shape");
    }

    Draw draw(int64_t row) const {
        const uint64_t seeds = seed.data()[row];
        return {temperature.data()[row], top_k.data()[row], top_p.data()[row], min_p.data()[row],
                {uint32_t(seeds), uint32_t(seeds >> 32), uint32_t(position.data()[row]), uint32_t(choice.data()[row])}};
    }
    bool is_edited(int64_t row) const {
        return allowed || bias.begin(row) < bias.end(row) || penalty.begin(row) < penalty.end(row);
    }
};

// The logits of one row [width] and the target ids they belong to.
struct Vocabulary {
    const int64_t* token_ids; // nullptr: all of them
    int64_t width;

    int64_t column(int64_t id) const { // -1: not here
        if (!token_ids) return id >= 0 && id < width ? id : -1;
        const int64_t* found = std::lower_bound(token_ids, token_ids + width, id);
        return found < token_ids + width && *found == id ? found - token_ids : -1;
    }
};

// Mask, then bias, then penalties, in float64.
void edit(const float* x, const Rows& rows, int64_t row, const Vocabulary& vocabulary, double* scores) {
    const int64_t width = vocabulary.width;
    std::copy(x, x + width, scores);
    if (rows.allowed) {
        const uint32_t* bits = rows.allowed->data() + row * rows.allowed->shape(1);
        for (int64_t i = 0; i < width; ++i) {
            const int64_t id = vocabulary.token_ids ? vocabulary.token_ids[i] : i;
            if (!(bits[id / 32] >> (id % 32) & 1)) scores[i] = -std::numeric_limits<double>::infinity();
        }
    }
    for (int32_t i = rows.bias.begin(row); i < rows.bias.end(row); ++i) {
        const int64_t column = vocabulary.column(rows.bias.ids.data()[i]);
        if (column >= 0) scores[column] += double(rows.bias.values.data()[i]);
    }
    const double repetition = rows.repetition.data()[row], presence = rows.presence.data()[row],
                 frequency = rows.frequency.data()[row];
    for (int32_t i = rows.penalty.begin(row); i < rows.penalty.end(row); ++i) {
        const int64_t column = vocabulary.column(rows.penalty.ids.data()[i]);
        if (column < 0) continue;
        const double count = rows.penalty.values.data()[i];
        double& score = scores[column];
        score = score > 0 ? score / repetition : score * repetition;
        score -= frequency * count + (count > 0 ? presence : 0.0);
    }
}

Scratch& own_scratch(const Path& path) {
    thread_local Scratch scratch;
    scratch.loops = path.loops;
    return scratch;
}

void sample(ThreadPool& pool, const std::string& path_name, const Logits& logits, nb::handle rows_object, int64_t vocab_size,
            const TokenIds& token_ids, Result<int64_t> tokens, std::optional<Table<double>> probs) {
    const size_t count = logits.shape(0);
    require_rows(logits, token_ids);
    const Rows rows(rows_object, count, vocab_size);
    require(tokens.shape(0) == count, "tokens has a wrong length");
    require(!probs || (probs->shape(0) == count && int64_t(probs->shape(1)) == vocab_size), "probs has a wrong shape");
    Vocabulary vocabulary{nullptr, std::min(int64_t(logits.shape(1)), vocab_size)};
    if (token_ids && token_ids->shape(0) > 0) {
        vocabulary = {token_ids->data(), int64_t(token_ids->shape(0))};
        require(vocabulary.token_ids[0] >= 0 && vocabulary.token_ids[vocabulary.width - 1] < vocab_size,
                "token_ids must ascend, and be below vocab_size");
    }
    const Path& path = find_path(path_name);
    nb::gil_scoped_release released;
    ThreadPool::Turn(pool).for_each(int64_t(count), [&](int64_t row) {
        Scratch& scratch = own_scratch(path);
        const float* x = logits.data() + row * logits.stride(0);
        double* row_probs = probs ? probs->data() + row * vocab_size : nullptr;
        const Draw draw = rows.draw(row);
        int64_t drawn;
        if (rows.is_edited(row)) {
            if (int64_t(scratch.edited.size()) < vocabulary.width) scratch.edited.resize(vocabulary.width);
            edit(x, rows, row, vocabulary, scratch.edited.data());
            drawn = draw_row<double>(scratch.edited.data(), vocabulary.width, draw, vocabulary.token_ids, row_probs,
                                     scratch);
        } else {
            drawn = draw_row<float>(x, vocabulary.width, draw, vocabulary.token_ids, row_probs, scratch);
        }
        tokens.data()[row] = drawn < 0 || !vocabulary.token_ids ? drawn : vocabulary.token_ids[drawn];
    });
}

void logprobs(ThreadPool& pool, const std::string& path_name, const Logits& logits, const TokenIds& token_ids, const Column<int64_t>& tokens,
              const Column<int64_t>& num_top, Result<float> values, Table<int64_t> top_ids, Table<float> top_values,
              Result<int64_t> num_found) {
    const size_t count = logits.shape(0);
    require_rows(logits, token_ids);
    require(tokens.shape(0) == count && num_top.shape(0) == count && values.shape(0) == count &&
                num_found.shape(0) == count && top_ids.shape(0) == count && top_values.shape(0) == count &&
                top_ids.shape(1) == top_values.shape(1),
            "logprobs: lengths differ");
    const Vocabulary vocabulary{token_ids ? token_ids->data() : nullptr, int64_t(logits.shape(1))};
    const int64_t room = int64_t(top_ids.shape(1));
    for (size_t row = 0; row < count; ++row)
        if (num_top.data()[row] >= 0 && vocabulary.column(tokens.data()[row]) < 0)
            throw nb::index_error("logprobs: a token is outside the vocabulary");
    const Path& path = find_path(path_name);
    nb::gil_scoped_release released;
    ThreadPool::Turn(pool).for_each(int64_t(count), [&](int64_t row) {
        if (num_top.data()[row] < 0) return; // not asked
        int64_t* columns = top_ids.data() + row * room;
        const int64_t found = logprob_row(logits.data() + row * logits.stride(0), vocabulary.width,
                                          vocabulary.column(tokens.data()[row]), std::min(num_top.data()[row], room),
                                          values.data() + row, columns, top_values.data() + row * room, own_scratch(path));
        if (vocabulary.token_ids)
            for (int64_t i = 0; i < found; ++i) columns[i] = vocabulary.token_ids[columns[i]];
        num_found.data()[row] = found;
    });
}

} // namespace

void bind_sampling(nb::module_& m) {
    m.attr("NOTHING_LEFT") = kNothingLeft;
    m.attr("NOT_FINITE") = kNotFinite;
    m.def("sample", &sample, nb::arg("pool"), nb::arg("path"), nb::arg("logits"), nb::arg("rows"), nb::arg("vocab_size"),
          nb::arg("token_ids").none(), nb::arg("tokens").noconvert(), nb::arg("probs").noconvert().none());
    m.def("logprobs", &logprobs, nb::arg("pool"), nb::arg("path"), nb::arg("logits"), nb::arg("token_ids").none(), nb::arg("tokens"),
          nb::arg("num_top"), nb::arg("values").noconvert(), nb::arg("top_ids").noconvert(),
          nb::arg("top_values").noconvert(), nb::arg("num_found").noconvert());
}

} // namespace headstart
