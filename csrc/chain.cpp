// A whole draft in one crossing (Backend.draft of headstart/kernels/ops.py): a first pass, then token after token of
// every sequence: draw, score, gate, the program of the next step. Sequences whose draft has ended drop out.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <stdexcept>

#include "bindings.h"
#include "plan.h"
#include "sampling_rows.h"

namespace headstart {
namespace {

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// GateRule (headstart/core.py): how far the draft of one sequence goes.
class Gate {
  public:
    explicit Gate(nb::handle rule)
        : token_s_(nb::cast<double>(rule.attr("token_s"))), row_s_(nb::cast<double>(rule.attr("row_s"))),
          draft_s_(nb::cast<double>(rule.attr("draft_s"))), factor_(nb::cast<double>(rule.attr("factor"))),
          edges_(nb::cast<Doubles>(rule.attr("edges"))) {
        for (nb::handle table : rule.attr("tables")) {
            tries_.push_back(nb::cast<Doubles>(table.attr("tries")));
            hits_.push_back(nb::cast<Doubles>(table.attr("hits")));
            require(tries_.back().size() == bins() && hits_.back().size() == bins(), "draft: a table has other bins");
        }
        require(!tries_.empty(), "draft: a gate without tables");
    }

    // Called once after each token: shall there be one more behind that of `place`, whose score is this?
    bool goes_on(size_t place, double score) {
        const size_t bin = std::upper_bound(edges_.data(), edges_.data() + edges_.size(), score) - edges_.data();
        const size_t here = std::min(place, tries_.size() - 1), next = std::min(place + 1, tries_.size() - 1);
        chance_ *= std::min(1.0, factor_ * (hits_[here].data()[bin] / tries_[here].data()[bin]));
        if (chance_ * token_s_ < row_s_) return false;
        const double *tries = tries_[next].data(), *hits = hits_[next].data(), worth = chance_ * factor_ * token_s_;
        double whole = 0, gain = 0;
        for (size_t i = 0; i < bins(); ++i) whole += tries[i];
        for (size_t i = 0; i < bins(); ++i) {
            const double chance = hits[i] / tries[i];
            if (chance * worth > row_s_) gain += tries[i] / whole * (chance * worth - row_s_);
        }
        return gain > draft_s_;
    }

  private:
    size_t bins() const { return edges_.size() + 1; }

    double token_s_, row_s_, draft_s_, factor_, chance_ = 1;
    Doubles edges_;
    std::vector<Doubles> tries_, hits_; // by place; the last for all beyond
};

// One sequence's draft while it grows.
struct Line {
    int64_t depth, logit; // the most tokens; its first row of the first pass's logits
    std::optional<Gate> gate;
    std::vector<int64_t> tokens;
    std::vector<double> scores; // where there is a gate
    float logprob = 0;
};

// Rows of a result, wherever it lies.
struct Result {
    const float* values = nullptr;
    int64_t stride = 0, width = 0;
    Result() = default;
    Result(const Program& program, const char* name) {
        const int id = program.output(name);
        if (id < 0) return;
        values = program.values(id, 0), stride = program.buffers[id].stride(), width = program.buffers[id].width;
    }
    const float* row(int64_t row) const { return values + row * stride; }
};

class Chain {
  public:
    Chain(const std::string& path, std::vector<nb::object> steps, std::vector<int64_t> rows_before, int64_t vocab_size,
          std::optional<Column<int64_t>> token_ids)
        : path_(find_path(path)), steps_(std::move(steps)), rows_before_(std::move(rows_before)),
          vocab_size_(vocab_size), token_ids_(std::move(token_ids)) {
        require(steps_.size() == rows_before_.size(), "a chain's lists differ in length");
        for (const nb::object& step : steps_) programs_.push_back(nb::cast<Program*>(step));
        if (token_ids_ && token_ids_->size() > 0)
            require(token_ids_->data()[0] >= 0 && token_ids_->data()[token_ids_->size() - 1] < vocab_size,
                    "token_ids must ascend, and be below vocab_size");
    }

    // (tokens, scores) of each sequence of the plan.
    std::vector<std::pair<std::vector<int64_t>, std::vector<double>>>
    draft(ThreadPool& threads, Arena& arena, Program& first, nb::handle plan, const HiddenPool* hidden_pool,
          nb::handle draw_rows, const std::vector<int64_t>& depths, const std::vector<nb::object>& gates) {
        Planned planned(first, plan, hidden_pool, std::nullopt);
        Pass& pass = planned.pass;
        require((int64_t)depths.size() == pass.num_spans && gates.size() == depths.size() &&
                    pass.num_logits == pass.num_spans,
                "draft: a row of logits, a depth and a gate for each sequence");
        const DrawRows rows(draw_rows, depths.size(), vocab_size_);
        std::vector<Line> lines(depths.size());
        for (size_t i = 0; i < lines.size(); ++i) {
            require(depths[i] > 0 && depths[i] <= (int64_t)steps_.size() + 1, "draft: deeper than the chain");
            lines[i].depth = depths[i];
            lines[i].logit = (int64_t)i;
            if (!gates[i].is_none()) lines[i].gate.emplace(gates[i]);
        }
        {
            nb::gil_scoped_release released;
            grow(threads, arena, first, pass, rows, lines);
        }
        std::vector<std::pair<std::vector<int64_t>, std::vector<double>>> found;
        for (Line& line : lines) found.push_back({std::move(line.tokens), std::move(line.scores)});
        return found;
    }

  private:
    void grow(ThreadPool& threads, Arena& arena, Program& first, Pass& pass, const DrawRows& rows,
              std::vector<Line>& lines) {
        ThreadPool::Turn turn(threads);
        first.compute(turn, arena, pass);
        Result logits(first, "logits"), hidden(first, "hidden");
        require(logits.values && hidden.values, "draft: the first program gives no logits or no hidden states");
        std::vector<int32_t> going, at; // sequences whose draft grows, and their rows in `hidden`
        for (size_t i = 0; i < lines.size(); ++i) {
            going.push_back((int32_t)i);
            at.push_back(pass.logit_rows[i]);
        }
        for (size_t step = 0;; ++step) {
            draw(turn, logits, rows, lines, going);
            size_t kept = 0;
            for (size_t i = 0; i < going.size(); ++i) {
                Line& line = lines[going[i]];
                if (!goes_on(line, step)) continue;
                going[kept] = going[i];
                at[kept++] = at[i];
            }
            going.resize(kept);
            if (going.empty()) return;
            Program& program = *programs_[step];
            take(hidden, at, kept);
            advance(program, turn, arena, pass, rows, lines, going, rows_before_[step]);
            logits = Result(program, "logits"), hidden = Result(program, "hidden");
            for (size_t i = 0; i < kept; ++i) at[i] = (int32_t)i;
        }
    }

    // One token more for each sequence that is going on, from its row of logits.
    void draw(ThreadPool::Turn& turn, const Result& logits, const DrawRows& rows, std::vector<Line>& lines,
              const std::vector<int32_t>& going) {
        Vocabulary vocabulary{nullptr, std::min(logits.width, vocab_size_)};
        if (token_ids_) vocabulary = {token_ids_->data(), (int64_t)token_ids_->size()};
        turn.for_each((int64_t)going.size(), [&](int64_t i) {
            Line& line = lines[going[i]];
            const float* x = logits.row(i);
            Scratch& scratch = own_scratch(path_);
            const int64_t token = rows.draw(x, going[i], vocabulary, nullptr, scratch, line.tokens);
            if (token >= 0 && line.gate)
                logprob_row(x, vocabulary.width, vocabulary.column(token), 0, &line.logprob, nullptr, nullptr, scratch);
            line.tokens.push_back(token);
        });
    }

    // The token of this step is in: shall there be another? Nothing allowed in the draft vocabulary, or a head that
    // fails, ends the draft.
    static bool goes_on(Line& line, size_t step) {
        if (line.tokens.back() < 0) {
            line.tokens.pop_back();
            return false;
        }
        if (line.gate) line.scores.push_back(std::exp((double)line.logprob));
        if ((int64_t)line.tokens.size() >= line.depth) return false;
        return !line.gate || line.gate->goes_on(step, line.scores.back());
    }

    // Copies: the results of a pass are not its own next input.
    void take(const Result& hidden, const std::vector<int32_t>& at, size_t count) {
        taken_.resize(count * hidden.width);
        taken_width_ = hidden.width;
        for (size_t i = 0; i < count; ++i)
            std::copy_n(hidden.row(at[i]), hidden.width, taken_.data() + i * hidden.width);
    }

    // A row for each sequence that is going on: its last token and the vector that was taken.
    void advance(Program& program, ThreadPool::Turn& turn, Arena& arena, const Pass& base, const DrawRows& rows,
                 const std::vector<Line>& lines, const std::vector<int32_t>& going, int64_t before) {
        const size_t count = going.size();
        for (auto* each : {&tokens_, &positions_, &slots_, &numbers_}) each->resize(count + 1);
        tables_.resize(count * base.table_width);
        for (size_t i = 0; i < count; ++i) {
            const int64_t position = rows.position(going[i]) + before, block = position / base.block_size;
            require(position >= 0 && block < base.table_width, "draft: a position is outside its sequence's blocks");
            const int32_t* table = base.block_tables + going[i] * base.table_width;
            std::copy_n(table, base.table_width, tables_.data() + i * base.table_width);
            tokens_[i] = (int32_t)lines[going[i]].tokens.back();
            positions_[i] = (int32_t)position;
            slots_[i] = (int32_t)(table[block] * base.block_size + position % base.block_size);
            numbers_[i] = (int32_t)i;
        }
        numbers_[count] = (int32_t)count;
        Pass pass{};
        pass.num_rows = pass.num_logits = pass.num_spans = pass.num_units = (int64_t)count;
        pass.table_width = base.table_width;
        pass.block_size = base.block_size;
        pass.first_position = base.first_position;
        pass.token_ids = tokens_.data();
        pass.positions = pass.sees = positions_.data();
        pass.slots = slots_.data();
        pass.row_starts = pass.unit_starts = pass.logit_rows = numbers_.data();
        pass.block_tables = tables_.data();
        pass.hidden = taken_.data();
        pass.hidden_stride = taken_width_;
        require(!program.wants_states, "draft: the program reads recurrent states");
        check_pass(program, pass);
        program.compute(turn, arena, pass);
    }

    const Path& path_;
    std::vector<nb::object> steps_; // keeps the programs
    std::vector<Program*> programs_;
    std::vector<int64_t> rows_before_;
    int64_t vocab_size_;
    std::optional<Column<int64_t>> token_ids_;
    std::vector<int32_t> tokens_, positions_, slots_, numbers_, tables_;
    std::vector<float> taken_;
    int64_t taken_width_ = 0;
};

} // namespace

void bind_chain(nb::module_& m) {
    nb::class_<Chain>(m, "Chain")
        .def(nb::init<const std::string&, std::vector<nb::object>, std::vector<int64_t>, int64_t,
                      std::optional<Column<int64_t>>>(),
             nb::arg("path"), nb::arg("steps"), nb::arg("rows_before"), nb::arg("vocab_size"), nb::arg("token_ids").none())
        .def("draft", &Chain::draft, nb::arg("threads"), nb::arg("arena"), nb::arg("first"), nb::arg("plan"),
             nb::arg("hidden_pool").none(), nb::arg("rows"), nb::arg("depths"), nb::arg("gates"));
}

} // namespace headstart
