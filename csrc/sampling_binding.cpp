// Bindings of the sampler: rows are distributed over the pool's threads.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <optional>

#include "bindings.h"
#include "pool.h"
#include "sampling_rows.h"

namespace headstart {
namespace {

template <class T> using Result = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Table = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>; // rows may be strided
using TokenIds = std::optional<Column<int64_t>>;

void require(bool holds, const char* what) {
    if (!holds) throw nb::value_error(what);
}

void require_rows(const Logits& logits, const TokenIds& token_ids) {
    require(logits.size() == 0 || logits.shape(1) == 1 || logits.stride(1) == 1,
            "the logits of a row must lie side by side");
    require(!token_ids || token_ids->shape(0) == logits.shape(1), "token_ids and logits differ in width");
}

void sample(ThreadPool& pool, const std::string& path_name, const Logits& logits, nb::handle rows_object, int64_t vocab_size,
            const TokenIds& token_ids, Result<int64_t> tokens, std::optional<Table<double>> probs) {
    const size_t count = logits.shape(0);
    require_rows(logits, token_ids);
    const DrawRows rows(rows_object, count, vocab_size);
    require(tokens.shape(0) == count, "tokens has a wrong length");
    require(!probs || (probs->shape(0) == count && int64_t(probs->shape(1)) == vocab_size), "probs has a wrong shape");
    Vocabulary vocabulary{nullptr, std::min(int64_t(logits.shape(1)), vocab_size)};
    if (token_ids && token_ids->shape(0) > 0) {
        vocabulary = {token_ids->data(), int64_t(token_ids->shape(0))};
        require(vocabulary.token_ids[0] >= 0 && vocabulary.token_ids[vocabulary.width - 1] < vocab_size,
                "token_ids must ascend and be below vocab_size");
    }
    const Path& path = find_path(path_name);
    nb::gil_scoped_release released;
    ThreadPool::Turn(pool).for_each(int64_t(count), [&](int64_t row) {
        tokens.data()[row] = rows.draw(logits.data() + row * logits.stride(0), row, vocabulary,
                                       probs ? probs->data() + row * vocab_size : nullptr, thread_scratch(path));
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
        if (num_top.data()[row] < 0) return; // no logprobs requested
        int64_t* columns = top_ids.data() + row * room;
        const int64_t found = logprob_row(logits.data() + row * logits.stride(0), vocabulary.width,
                                          vocabulary.column(tokens.data()[row]), std::min(num_top.data()[row], room),
                                          values.data() + row, columns, top_values.data() + row * room, thread_scratch(path));
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
