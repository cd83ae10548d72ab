// The native draft loop (headstart/kernels/draft_loop.py) in one call from Python. After the first pass, each step samples
// a token of every sequence, scores it, asks the gate, and runs the program of the next step; finished sequences drop out.
// With is_block the first pass computes all rows of the drafts (block drafters), and the loop only samples.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <tuple>

#include "bindings.h"
#include "plan.h"
#include "sampling_rows.h"

namespace headstart {
namespace {

constexpr double kMaxLogit = 80; // bound of a confidence logit, beyond which e^x overflows

using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Counts = nb::ndarray<const double, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

// GateRule (headstart/kernels/draft_loop.py): stops the draft of one sequence when another token would not pay.
class Gate {
  public:
    explicit Gate(nb::handle rule)
        : token_s_(nb::cast<double>(rule.attr("token_s"))), row_s_(nb::cast<double>(rule.attr("row_s"))),
          draft_s_(nb::cast<double>(rule.attr("draft_s"))), factor_(nb::cast<double>(rule.attr("factor"))),
          counts_(nb::cast<Counts>(rule.attr("counts"))), edges_(nb::cast<Doubles>(rule.attr("edges"))) {
        require(counts_.shape(0) > 0 && counts_.shape(1) == 2 && counts_.shape(2) == bins(),
                "draft: a gate's counts do not match its edges");
    }

    // Whether to draft one more token after the one at `place` with this score. Called once after each token.
    bool should_continue(size_t place, double score) {
        const size_t bin = std::upper_bound(edges_.data(), edges_.data() + edges_.size(), score) - edges_.data();
        probability_ *= std::min(1.0, factor_ * (hits(place)[bin] / tries(place)[bin]));
        if (probability_ * token_s_ < row_s_) return false;
        const double *tried = tries(place + 1), *right = hits(place + 1), worth = probability_ * factor_ * token_s_;
        double total = 0, gain = 0;
        for (size_t i = 0; i < bins(); ++i) total += tried[i];
        for (size_t i = 0; i < bins(); ++i) {
            const double probability = right[i] / tried[i];
            if (probability * worth > row_s_) gain += tried[i] / total * (probability * worth - row_s_);
        }
        return gain > draft_s_;
    }

  private:
    size_t bins() const { return edges_.size() + 1; }
    const double* tries(size_t place) const { return counts_.data() + std::min(place, counts_.shape(0) - 1) * 2 * bins(); }
    const double* hits(size_t place) const { return tries(place) + bins(); }

    double token_s_, row_s_, draft_s_, factor_, probability_ = 1;
    Counts counts_; // [places, 2, bins]
    Doubles edges_;
};

using Leaf = std::tuple<int64_t, int64_t, int64_t, double>; // core.Leaf: place, rank, token, score
using Drafted = std::tuple<std::vector<int64_t>, std::vector<double>, std::vector<Leaf>>;

constexpr float kExcluded = -1e30f; // logit of a candidate that was drawn before

// The draft of one sequence.
struct DraftState {
    int64_t depth, logit; // maximum tokens; first row in the first pass's logits
    bool scored = false;
    std::optional<Gate> gate;
    std::vector<int64_t> tokens;
    std::vector<double> scores;
    std::vector<float> carried; // result `carry` of the step before; it replaces the last columns of the next row
    float logprob = 0;
    int64_t width = 1;         // candidates for each token
    std::vector<Leaf> leaves;  // candidates after the first, by place

    bool needs_logprobs() const { return scored || (gate && width > 1); }
};

// Rows of a program's output.
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

class DraftLoop {
  public:
    // steps: the program of each further token; with is_block at most one, run before every token. rows_before[i]:
    // position of step i's row, relative to the first drafted token.
    DraftLoop(const std::string& path, std::vector<nb::object> steps, std::vector<int64_t> rows_before, bool is_block,
          int64_t vocab_size, std::optional<Column<int64_t>> token_ids)
        : path_(find_path(path)), steps_(std::move(steps)), rows_before_(std::move(rows_before)),
          is_block_(is_block), vocab_size_(vocab_size), token_ids_(std::move(token_ids)) {
        require(steps_.size() == rows_before_.size() && (!is_block || steps_.size() <= 1),
                "draft: steps and rows_before differ in length, or is_block has several steps");
        for (const nb::object& step : steps_) programs_.push_back(nb::cast<Program*>(step));
        if (token_ids_ && token_ids_->size() > 0)
            require(token_ids_->data()[0] >= 0 && token_ids_->data()[token_ids_->size() - 1] < vocab_size,
                    "token_ids must ascend, and be below vocab_size");
        if (token_ids_) groups_ = BlockGroups::of(token_ids_->data(), (int64_t)token_ids_->size());
    }

    // Returns (tokens, scores, leaves) of each sequence of the plan.
    std::vector<Drafted>
    draft(ThreadPool& threads, Arena& arena, Program& first, nb::handle plan, const HiddenPool* hidden_pool,
          nb::handle draw_rows, const std::vector<int64_t>& depths, const std::vector<nb::object>& gates,
          const std::vector<int64_t>& widths) {
        PlannedPass planned(first, plan, hidden_pool, std::nullopt);
        Pass& pass = planned.pass;
        require((int64_t)depths.size() == pass.num_spans && gates.size() == depths.size() && widths.size() == depths.size(),
                "draft: needs one depth, one gate and one width per sequence");
        const DrawRows rows(draw_rows, depths.size(), vocab_size_);
        std::vector<DraftState> drafts(depths.size());
        int64_t num_logits = 0;
        for (size_t i = 0; i < drafts.size(); ++i) {
            require(depths[i] > 0 && (is_block_ || depths[i] <= (int64_t)steps_.size() + 1),
                    "draft: a depth is below 1, or above the number of steps + 1");
            drafts[i].depth = depths[i];
            drafts[i].width = widths[i];
            drafts[i].logit = num_logits;
            drafts[i].scored = !gates[i].is_none();
            num_logits += is_block_ ? depths[i] : 1;
            if (drafts[i].scored) drafts[i].gate.emplace(gates[i]);
        }
        require(num_logits == pass.num_logits, "draft: the plan's logit rows do not match the depths");
        {
            nb::gil_scoped_release released;
            ThreadPool::Turn turn(threads);
            first.compute(turn, arena, pass);
            if (is_block_) draw_block(turn, arena, first, pass, rows, drafts);
            else grow(turn, arena, first, pass, rows, drafts);
        }
        std::vector<Drafted> found;
        for (DraftState& state : drafts)
            found.push_back({std::move(state.tokens), std::move(state.scores), std::move(state.leaves)});
        return found;
    }

  private:
    // Samples token by token, each from the previous step's logits; hidden states feed the next step.
    void grow(ThreadPool::Turn& turn, Arena& arena, const Program& first, const Pass& pass, const DrawRows& rows,
              std::vector<DraftState>& drafts) {
        Result logits(first, "logits"), hidden(first, "hidden");
        require(logits.values && hidden.values, "draft: the first program needs outputs logits and hidden");
        std::vector<int32_t> active, at; // sequences still drafting, and their rows in `hidden`
        for (size_t i = 0; i < drafts.size(); ++i) {
            active.push_back((int32_t)i);
            at.push_back(pass.logit_rows[i]);
        }
        for (size_t step = 0;; ++step) {
            draw(turn, logits, rows, drafts, active);
            size_t kept = 0;
            for (size_t i = 0; i < active.size(); ++i) {
                DraftState& state = drafts[active[i]];
                if (!push_score(state) || !should_continue(state)) continue;
                active[kept] = active[i];
                at[kept++] = at[i];
            }
            active.resize(kept);
            if (active.empty()) return;
            Program& program = *programs_[step];
            copy_rows(hidden, at, kept);
            advance(program, turn, arena, pass, rows, drafts, active, rows_before_[step]);
            logits = Result(program, "logits"), hidden = Result(program, "hidden");
            for (size_t i = 0; i < kept; ++i) at[i] = (int32_t)i;
        }
    }

    // Samples from the first pass's rows, up to each sequence's depth.
    void draw_block(ThreadPool::Turn& turn, Arena& arena, const Program& first, const Pass& pass, const DrawRows& rows,
                    std::vector<DraftState>& drafts) {
        const Result logits(first, "logits"), confidence(first, "confidence");
        require(logits.values, "draft: the first program needs the output logits");
        // else the confidence is the score
        for (DraftState& state : drafts) state.scored = state.scored && !confidence.values;
        if (programs_.empty()) {
            draw_parallel(turn, logits, confidence, rows, drafts);
            return;
        }
        std::vector<int32_t> active, at;
        for (int64_t step = 0;; ++step) {
            active.clear(), at.clear();
            for (size_t i = 0; i < drafts.size(); ++i) {
                if (drafts[i].depth <= step) continue;
                active.push_back((int32_t)i);
                at.push_back((int32_t)(drafts[i].logit + step));
            }
            if (active.empty()) return;
            copy_rows(logits, at, at.size());
            for (size_t i = 0; i < active.size(); ++i) {
                const std::vector<float>& carried = drafts[active[i]].carried;
                std::copy(carried.begin(), carried.end(), copied_.data() + (i + 1) * logits.width - carried.size());
            }
            advance(*programs_[0], turn, arena, pass, rows, drafts, active, rows_before_[0]);
            const Result of_token(*programs_[0], "confidence"), carry(*programs_[0], "carry");
            for (size_t i = 0; carry.values && i < active.size(); ++i)
                drafts[active[i]].carried.assign(carry.row((int64_t)i), carry.row((int64_t)i) + carry.width);
            draw(turn, Result(*programs_[0], "logits"), rows, drafts, active);
            for (size_t i = 0; i < active.size(); ++i) {
                DraftState& state = drafts[active[i]];
                if (push_score(state) && confidence.values) {
                    const float rest = of_token.values ? *of_token.row((int64_t)i) : 0;
                    state.scores.push_back(sigmoid(*confidence.row(at[i]) + rest));
                }
                if ((int64_t)state.tokens.size() <= step || !should_continue(state)) state.depth = (int64_t)state.tokens.size();
            }
        }
    }

    // Samples all rows in parallel: they are independent, except for penalties.
    void draw_parallel(ThreadPool::Turn& turn, const Result& logits, const Result& confidence, const DrawRows& rows,
                      std::vector<DraftState>& drafts) {
        struct Task {
            int64_t state, first, last;
        };
        std::vector<Task> tasks;
        for (int64_t i = 0; i < (int64_t)drafts.size(); ++i) {
            DraftState& state = drafts[i];
            state.tokens.assign(state.depth, -1);
            state.scores.assign(state.depth, 0);
            const int64_t step = rows.is_penalized(i) || state.width > 1 ? state.depth : 1;
            for (int64_t k = 0; k < state.depth; k += step) tasks.push_back({i, k, k + step});
        }
        const Vocabulary vocabulary = vocabulary_of(logits);
        turn.for_each((int64_t)tasks.size(), [&](int64_t task) {
            Scratch& scratch = thread_scratch(path_);
            DraftState& state = drafts[tasks[task].state];
            for (int64_t k = tasks[task].first; k < tasks[task].last; ++k) {
                const float* x = logits.row(state.logit + k);
                int64_t& token = state.tokens[k];
                token = rows.draw(x, tasks[task].state, vocabulary, nullptr, scratch, state.tokens.data(), k);
                if (token < 0) return;
                const float known = state.needs_logprobs() ? logprob(x, token, vocabulary, scratch) : 0;
                if (confidence.values) state.scores[k] = sigmoid(*confidence.row(state.logit + k));
                else if (state.scored) state.scores[k] = std::exp((double)known);
                branch(x, tasks[task].state, token, known, state, k, rows, vocabulary, scratch);
            }
        });
        for (DraftState& state : drafts) {
            const auto end = std::find_if(state.tokens.begin(), state.tokens.end(), [](int64_t t) { return t < 0; });
            state.tokens.erase(end, state.tokens.end());
            state.scores.resize(confidence.values || state.scored ? state.tokens.size() : 0);
            size_t kept = 1;
            while (kept < state.tokens.size() &&
                   (!state.gate || state.gate->should_continue(kept - 1, state.scores[kept - 1])))
                ++kept;
            state.tokens.resize(std::min(kept, state.tokens.size()));
            state.scores.resize(std::min(kept, state.scores.size()));
            while (!state.leaves.empty() && std::get<0>(state.leaves.back()) >= (int64_t)state.tokens.size())
                state.leaves.pop_back();
        }
    }

    static double sigmoid(float logit) { return 1 / (1 + std::exp(-std::max((double)logit, -kMaxLogit))); }

    Vocabulary vocabulary_of(const Result& logits) const {
        if (token_ids_) return {token_ids_->data(), (int64_t)token_ids_->size(), groups_.data()};
        return {nullptr, std::min(logits.width, vocab_size_)};
    }

    static float logprob(const float* x, int64_t token, const Vocabulary& vocabulary, Scratch& scratch) {
        float value;
        logprob_row(x, vocabulary.width, vocabulary.column(token), 0, &value, nullptr, nullptr, scratch);
        return value;
    }

    // Samples one token for each active sequence; row i of logits belongs to active[i].
    void draw(ThreadPool::Turn& turn, const Result& logits, const DrawRows& rows, std::vector<DraftState>& drafts,
              const std::vector<int32_t>& active) {
        const Vocabulary vocabulary = vocabulary_of(logits);
        turn.for_each((int64_t)active.size(), [&](int64_t i) {
            DraftState& state = drafts[active[i]];
            const float* x = logits.row(i);
            Scratch& scratch = thread_scratch(path_);
            const int64_t token = rows.draw(x, active[i], vocabulary, nullptr, scratch, state.tokens.data(),
                                            (int64_t)state.tokens.size());
            if (token >= 0) {
                if (state.needs_logprobs()) state.logprob = logprob(x, token, vocabulary, scratch);
                branch(x, active[i], token, state.logprob, state, (int64_t)state.tokens.size(), rows, vocabulary, scratch);
            }
            state.tokens.push_back(token);
        });
    }

    // Draws the leaves beside the token drawn from logits x at `place`: each without the candidates before it. known: the
    // token's log probability, if state.needs_logprobs().
    static void branch(const float* x, int64_t row, int64_t token, float known, DraftState& state, int64_t place,
                       const DrawRows& rows, const Vocabulary& vocabulary, Scratch& scratch) {
        if (state.width < 2) return;
        thread_local std::vector<float> rest;
        rest.assign(x, x + vocabulary.width);
        const double shift = (double)known - x[vocabulary.column(token)]; // of logits to log probabilities
        for (int64_t rank = 1; rank < state.width; ++rank) {
            rest[vocabulary.column(token)] = kExcluded;
            token = rows.draw(rest.data(), row, vocabulary, nullptr, scratch, state.tokens.data(), place);
            if (token < 0 || rest[vocabulary.column(token)] == kExcluded) return;
            const double score = state.gate ? std::exp(x[vocabulary.column(token)] + shift) : 0;
            state.leaves.emplace_back(place, rank, token, score);
        }
    }

    // Records the score of the last token. Returns false if sampling failed (no allowed token in the draft vocabulary, or
    // logits that are not finite), which ends the draft.
    static bool push_score(DraftState& state) {
        if (state.tokens.back() < 0) {
            state.tokens.pop_back();
            return false;
        }
        if (state.scored) state.scores.push_back(std::exp((double)state.logprob));
        return true;
    }

    // Whether to draft another token.
    static bool should_continue(DraftState& state) {
        if ((int64_t)state.tokens.size() >= state.depth) return false;
        return !state.gate || state.gate->should_continue(state.tokens.size() - 1, state.scores.back());
    }

    // Copies rows of hidden states: a program's output cannot be its own input.
    void copy_rows(const Result& hidden, const std::vector<int32_t>& at, size_t count) {
        copied_.resize(count * hidden.width);
        copied_width_ = hidden.width;
        for (size_t i = 0; i < count; ++i)
            std::copy_n(hidden.row(at[i]), hidden.width, copied_.data() + i * hidden.width);
    }

    // Rotary positions of drafted tokens, less their positions: drafts go on from the span's last row, on all axes alike.
    static int64_t rope_shift(const Pass& base, int64_t span) {
        const int64_t last = base.row_starts[span + 1] - 1;
        const int32_t* at = base.rope_positions + last * kRopeAxes;
        return *std::max_element(at, at + kRopeAxes) - base.positions[last];
    }

    // Runs `program` on one row per active sequence: its last token, and the hidden state of copy_rows().
    void advance(Program& program, ThreadPool::Turn& turn, Arena& arena, const Pass& base, const DrawRows& rows,
                 const std::vector<DraftState>& drafts, const std::vector<int32_t>& active, int64_t before) {
        const size_t count = active.size();
        for (auto* each : {&tokens_, &positions_, &slots_, &numbers_}) each->resize(count + 1);
        tables_.resize(count * base.table_width);
        rope_positions_.resize(base.rope_positions ? count * kRopeAxes : 0);
        for (size_t i = 0; i < count; ++i) {
            const int64_t position = rows.position(active[i]) + before, block = position / base.block_size;
            require(position >= 0 && block < base.table_width, "draft: a position is outside its sequence's blocks");
            const int32_t* table = base.block_tables + active[i] * base.table_width;
            std::copy_n(table, base.table_width, tables_.data() + i * base.table_width);
            const std::vector<int64_t>& drafted = drafts[active[i]].tokens;
            tokens_[i] = drafted.empty() ? base.token_ids[base.row_starts[active[i]]] : (int32_t)drafted.back();
            positions_[i] = (int32_t)position;
            slots_[i] = (int32_t)(table[block] * base.block_size + position % base.block_size);
            numbers_[i] = (int32_t)i;
            for (int axis = 0; base.rope_positions && axis < kRopeAxes; ++axis)
                rope_positions_[i * kRopeAxes + axis] = (int32_t)(position + rope_shift(base, active[i]));
        }
        numbers_[count] = (int32_t)count;
        Pass pass{};
        pass.num_rows = pass.num_logits = pass.num_spans = pass.num_units = (int64_t)count;
        pass.table_width = base.table_width;
        pass.block_size = base.block_size;
        pass.first_position = base.first_position;
        pass.token_ids = tokens_.data();
        pass.positions = pass.visible_start = pass.visible_end = positions_.data();
        pass.slots = slots_.data();
        pass.row_starts = pass.unit_starts = pass.logit_rows = pass.row_spans = numbers_.data();
        pass.block_tables = tables_.data();
        pass.rope_positions = base.rope_positions ? rope_positions_.data() : nullptr;
        pass.hidden = copied_.data();
        pass.hidden_stride = copied_width_;
        require(!program.wants_states,
                "draft: a step's program reads recurrent states, which the draft loop does not support");
        check_pass(program, pass);
        program.compute(turn, arena, pass);
    }

    const Path& path_;
    std::vector<nb::object> steps_; // owns the programs
    std::vector<Program*> programs_;
    std::vector<int64_t> rows_before_;
    bool is_block_;
    int64_t vocab_size_;
    std::optional<Column<int64_t>> token_ids_;
    std::vector<BlockGroups> groups_;
    std::vector<int32_t> tokens_, positions_, slots_, numbers_, tables_, rope_positions_;
    std::vector<float> copied_;
    int64_t copied_width_ = 0;
};

} // namespace

void bind_draft_loop(nb::module_& m) {
    nb::class_<DraftLoop>(m, "DraftLoop")
        .def(nb::init<const std::string&, std::vector<nb::object>, std::vector<int64_t>, bool, int64_t,
                      std::optional<Column<int64_t>>>(),
             nb::arg("path"), nb::arg("steps"), nb::arg("rows_before"), nb::arg("is_block"), nb::arg("vocab_size"), nb::arg("token_ids").none())
        .def("draft", &DraftLoop::draft, nb::arg("threads"), nb::arg("arena"), nb::arg("first"), nb::arg("plan"),
             nb::arg("hidden_pool").none(), nb::arg("rows"), nb::arg("depths"), nb::arg("gates"), nb::arg("widths"));
}

} // namespace headstart
