// A whole draft in one crossing (Chain of headstart/kernels/ops.py): a first pass, then token after token of every
// sequence: draw, score, gate, the program of the next step. Sequences whose draft has ended drop out. Or the first pass
// has made the rows of whole drafts, and what is left is to draw them, with what a program says of the token before each.
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

constexpr double kMostLogit = 80; // of a confidence: where exp ends

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
    bool scored = false;
    std::optional<Gate> gate;
    std::vector<int64_t> tokens;
    std::vector<double> scores;
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
    // rows_given: the first pass makes all rows, and steps is nothing or the program between one token and the next.
    Chain(const std::string& path, std::vector<nb::object> steps, std::vector<int64_t> rows_before, bool rows_given,
          int64_t vocab_size, std::optional<Column<int64_t>> token_ids)
        : path_(find_path(path)), steps_(std::move(steps)), rows_before_(std::move(rows_before)),
          rows_given_(rows_given), vocab_size_(vocab_size), token_ids_(std::move(token_ids)) {
        require(steps_.size() == rows_before_.size() && (!rows_given || steps_.size() <= 1),
                "a chain's lists have a wrong length");
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
        require((int64_t)depths.size() == pass.num_spans && gates.size() == depths.size(),
                "draft: a depth and a gate for each sequence");
        const DrawRows rows(draw_rows, depths.size(), vocab_size_);
        std::vector<Line> lines(depths.size());
        int64_t num_logits = 0;
        for (size_t i = 0; i < lines.size(); ++i) {
            require(depths[i] > 0 && (rows_given_ || depths[i] <= (int64_t)steps_.size() + 1),
                    "draft: deeper than the chain");
            lines[i].depth = depths[i];
            lines[i].logit = num_logits;
            lines[i].scored = !gates[i].is_none();
            num_logits += rows_given_ ? depths[i] : 1;
            if (lines[i].scored) lines[i].gate.emplace(gates[i]);
        }
        require(num_logits == pass.num_logits, "draft: another number of rows of logits");
        {
            nb::gil_scoped_release released;
            ThreadPool::Turn turn(threads);
            first.compute(turn, arena, pass);
            if (rows_given_) draw_given(turn, arena, first, pass, rows, lines);
            else grow(turn, arena, first, pass, rows, lines);
        }
        std::vector<std::pair<std::vector<int64_t>, std::vector<double>>> found;
        for (Line& line : lines) found.push_back({std::move(line.tokens), std::move(line.scores)});
        return found;
    }

  private:
    // Token after token, each from the logits of the step before; the vectors go with them.
    void grow(ThreadPool::Turn& turn, Arena& arena, const Program& first, const Pass& pass, const DrawRows& rows,
              std::vector<Line>& lines) {
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
                if (!push_score(line) || !goes_on(line)) continue;
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

    // From rows that are there, as far as their drafts go.
    void draw_given(ThreadPool::Turn& turn, Arena& arena, const Program& first, const Pass& pass, const DrawRows& rows,
                    std::vector<Line>& lines) {
        const Result given(first, "logits"), sure(first, "confidence");
        require(given.values, "draft: the first program gives no logits");
        for (Line& line : lines) line.scored = line.scored && !sure.values; // a score of its own
        if (programs_.empty()) {
            draw_at_once(turn, given, sure, rows, lines);
            return;
        }
        std::vector<int32_t> going, at;
        for (int64_t step = 0;; ++step) {
            going.clear(), at.clear();
            for (size_t i = 0; i < lines.size(); ++i) {
                if (lines[i].depth <= step) continue;
                going.push_back((int32_t)i);
                at.push_back((int32_t)(lines[i].logit + step));
            }
            if (going.empty()) return;
            take(given, at, at.size());
            advance(*programs_[0], turn, arena, pass, rows, lines, going, rows_before_[0]);
            const Result of_token(*programs_[0], "confidence");
            draw(turn, Result(*programs_[0], "logits"), rows, lines, going);
            for (size_t i = 0; i < going.size(); ++i) {
                Line& line = lines[going[i]];
                if (push_score(line) && sure.values) {
                    const float rest = of_token.values ? *of_token.row((int64_t)i) : 0;
                    line.scores.push_back(sureness(*sure.row(at[i]) + rest));
                }
                if ((int64_t)line.tokens.size() <= step || !goes_on(line)) line.depth = (int64_t)line.tokens.size();
            }
        }
    }

    // Rows that do not see each other's tokens, but for penalties.
    void draw_at_once(ThreadPool::Turn& turn, const Result& given, const Result& sure, const DrawRows& rows,
                      std::vector<Line>& lines) {
        struct Task {
            int64_t line, first, last;
        };
        std::vector<Task> tasks;
        for (int64_t i = 0; i < (int64_t)lines.size(); ++i) {
            Line& line = lines[i];
            line.tokens.assign(line.depth, -1);
            line.scores.assign(line.depth, 0);
            const int64_t step = rows.is_penalized(i) ? line.depth : 1;
            for (int64_t k = 0; k < line.depth; k += step) tasks.push_back({i, k, k + step});
        }
        const Vocabulary vocabulary = vocabulary_of(given);
        turn.for_each((int64_t)tasks.size(), [&](int64_t task) {
            Scratch& scratch = own_scratch(path_);
            Line& line = lines[tasks[task].line];
            for (int64_t k = tasks[task].first; k < tasks[task].last; ++k) {
                const float* x = given.row(line.logit + k);
                int64_t& token = line.tokens[k];
                token = rows.draw(x, tasks[task].line, vocabulary, nullptr, scratch, line.tokens.data(), k);
                if (token < 0) return;
                if (sure.values) line.scores[k] = sureness(*sure.row(line.logit + k));
                else if (line.scored) line.scores[k] = std::exp((double)logprob(x, token, vocabulary, scratch));
            }
        });
        for (Line& line : lines) {
            const auto end = std::find_if(line.tokens.begin(), line.tokens.end(), [](int64_t t) { return t < 0; });
            line.tokens.erase(end, line.tokens.end());
            line.scores.resize(sure.values || line.scored ? line.tokens.size() : 0);
            size_t kept = 1;
            while (kept < line.tokens.size() && (!line.gate || line.gate->goes_on(kept - 1, line.scores[kept - 1]))) ++kept;
            line.tokens.resize(std::min(kept, line.tokens.size()));
            line.scores.resize(std::min(kept, line.scores.size()));
        }
    }

    static double sureness(float logit) { return 1 / (1 + std::exp(-std::max((double)logit, -kMostLogit))); }

    Vocabulary vocabulary_of(const Result& logits) const {
        if (token_ids_) return {token_ids_->data(), (int64_t)token_ids_->size()};
        return {nullptr, std::min(logits.width, vocab_size_)};
    }

    static float logprob(const float* x, int64_t token, const Vocabulary& vocabulary, Scratch& scratch) {
        float value;
        logprob_row(x, vocabulary.width, vocabulary.column(token), 0, &value, nullptr, nullptr, scratch);
        return value;
    }

    // One token more for each sequence that is going on, from its row of logits.
    void draw(ThreadPool::Turn& turn, const Result& logits, const DrawRows& rows, std::vector<Line>& lines,
              const std::vector<int32_t>& going) {
        const Vocabulary vocabulary = vocabulary_of(logits);
        turn.for_each((int64_t)going.size(), [&](int64_t i) {
            Line& line = lines[going[i]];
            const float* x = logits.row(i);
            Scratch& scratch = own_scratch(path_);
            const int64_t token = rows.draw(x, going[i], vocabulary, nullptr, scratch, line.tokens.data(),
                                            (int64_t)line.tokens.size());
            if (token >= 0 && line.scored) line.logprob = logprob(x, token, vocabulary, scratch);
            line.tokens.push_back(token);
        });
    }

    // The token of this step is in; false where there is none: nothing allowed in the draft vocabulary, or a head that
    // fails, ends the draft.
    static bool push_score(Line& line) {
        if (line.tokens.back() < 0) {
            line.tokens.pop_back();
            return false;
        }
        if (line.scored) line.scores.push_back(std::exp((double)line.logprob));
        return true;
    }

    // Shall there be another token?
    static bool goes_on(Line& line) {
        if ((int64_t)line.tokens.size() >= line.depth) return false;
        return !line.gate || line.gate->goes_on(line.tokens.size() - 1, line.scores.back());
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
            const std::vector<int64_t>& drafted = lines[going[i]].tokens;
            tokens_[i] = drafted.empty() ? base.token_ids[base.row_starts[going[i]]] : (int32_t)drafted.back();
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
        pass.row_starts = pass.unit_starts = pass.logit_rows = pass.row_spans = numbers_.data();
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
    bool rows_given_;
    int64_t vocab_size_;
    std::optional<Column<int64_t>> token_ids_;
    std::vector<int32_t> tokens_, positions_, slots_, numbers_, tables_;
    std::vector<float> taken_;
    int64_t taken_width_ = 0;
};

} // namespace

void bind_chain(nb::module_& m) {
    nb::class_<Chain>(m, "Chain")
        .def(nb::init<const std::string&, std::vector<nb::object>, std::vector<int64_t>, bool, int64_t,
                      std::optional<Column<int64_t>>>(),
             nb::arg("path"), nb::arg("steps"), nb::arg("rows_before"), nb::arg("rows_given"), nb::arg("vocab_size"), nb::arg("token_ids").none())
        .def("draft", &Chain::draft, nb::arg("threads"), nb::arg("arena"), nb::arg("first"), nb::arg("plan"),
             nb::arg("hidden_pool").none(), nb::arg("rows"), nb::arg("depths"), nb::arg("gates"));
}

} // namespace headstart
