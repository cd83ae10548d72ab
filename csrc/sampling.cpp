#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

namespace headstart {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Scores x[i] / divisor in blocks of kBlock, with each block's maximum. columns nullptr: column i is i.
template <class Real> struct View {
    const Real* x;
    int64_t n;
    double divisor;
    const int32_t* columns;
    const Real* maxima;
    const Loops* loops;

    double score(int64_t i) const { return double(x[i]) / divisor; }
    int64_t column(int64_t i) const { return columns ? columns[i] : i; }
    int64_t num_blocks() const { return (n + kBlock - 1) / kBlock; }
    int block_size(int64_t block) const { return int(std::min<int64_t>(kBlock, n - block * kBlock)); }

    // A bound: x below it certainly has a lower score than `score`.
    Real floor_of(double score) const {
        const double raw = score * divisor;
        return Real(raw - std::abs(raw) * 1e-6 - 1e-30);
    }
};

bool find_maxima(const Loops& loops, const float* x, int64_t n, float* maxima) { return loops.maxima_f32(x, n, maxima); }
bool find_maxima(const Loops& loops, const double* x, int64_t n, double* maxima) {
    return loops.maxima_f64(x, n, maxima);
}
void find_below(const View<float>& v, int64_t block, double best, float* out) {
    v.loops->below_f32(v.x + block * kBlock, v.block_size(block), v.divisor, best, out);
}
void find_below(const View<double>& v, int64_t block, double best, float* out) {
    v.loops->below_f64(v.x + block * kBlock, v.block_size(block), v.divisor, best, out);
}
std::vector<float>& maxima_of(Scratch& scratch, float) { return scratch.maxima32; }
std::vector<double>& maxima_of(Scratch& scratch, double) { return scratch.maxima64; }
std::vector<float>& sorted_of(Scratch& scratch, float) { return scratch.sorted32; }
std::vector<double>& sorted_of(Scratch& scratch, double) { return scratch.sorted64; }

template <class Real> Real* resized(std::vector<Real>& values, int64_t n) {
    if (int64_t(values.size()) < n) values.resize(n);
    return values.data();
}

View<double> view_of(const Candidates& from, Scratch& scratch) {
    double* maxima = resized(scratch.maxima64, from.count / kBlock + 1);
    find_maxima(*scratch.loops, from.scores.data(), from.count, maxima);
    return {from.scores.data(), from.count, 1.0, from.columns.data(), maxima, scratch.loops};
}

// The lowest index of the maximum.
template <class Real> int64_t first_best(const View<Real>& view) {
    const int64_t block = std::max_element(view.maxima, view.maxima + view.num_blocks()) - view.maxima;
    const Real* start = view.x + block * kBlock;
    return std::find(start, start + view.block_size(block), view.maxima[block]) - view.x;
}

// Collects the columns with scores of at least `least`.
template <class Real> void collect(const View<Real>& view, double least, Candidates& out) {
    out.reserve(view.n);
    least = std::max(least, std::numeric_limits<double>::lowest()); // excludes masked columns (-inf)
    const Real floor = view.floor_of(least);
    for (int64_t block = 0; block < view.num_blocks(); ++block) {
        if (view.maxima[block] < floor) continue;
        const int64_t start = block * kBlock, end = start + view.block_size(block);
        for (int64_t i = start; i < end; ++i)
            if (view.x[i] >= floor && view.score(i) >= least) out.add(view.score(i), int32_t(view.column(i)));
    }
}

// Keeps the k best scores; ties go to lower columns.
template <class Real> void keep_top_k(const View<Real>& view, int64_t k, Candidates& out, Scratch& scratch) {
    double least = -kInfinity;
    const int64_t num_blocks = view.num_blocks();
    if (k <= num_blocks) { // the k-th largest block maximum is a lower bound of the k-th best score
        Real* sorted = resized(sorted_of(scratch, Real()), num_blocks);
        std::copy(view.maxima, view.maxima + num_blocks, sorted);
        std::nth_element(sorted, sorted + k - 1, sorted + num_blocks, std::greater<Real>());
        least = double(sorted[k - 1]) / view.divisor;
    }
    collect(view, least, out);
    if (out.count <= k) return;
    double* sorted = resized(scratch.sorted64, out.count);
    std::copy(out.scores.data(), out.scores.data() + out.count, sorted);
    std::nth_element(sorted, sorted + k - 1, sorted + out.count, std::greater<double>());
    const double cut = sorted[k - 1];
    int64_t room = k - std::count_if(sorted, sorted + k, [cut](double score) { return score > cut; });
    const int64_t count = out.count;
    out.count = 0;
    for (int64_t i = 0; i < count; ++i) {
        const double score = out.scores[i];
        if (score > cut || (score == cut && room-- > 0)) out.add(score, out.columns[i]);
    }
}

// Histogram of probability mass by distance to the best score: the bin in which `share` is reached, and the mass before it.
struct Cut {
    int bin;
    int64_t before;
    double need;
};

template <class Real> Cut find_cut(const View<Real>& view, double best, double share) {
    int64_t histogram[4][kNumBins] = {}; // four copies, so that adjacent tokens in one bin do not wait for each other
    float below[kBlock];
    int32_t bin[kBlock];
    Mass mass[kBlock];
    for (int64_t block = 0; block < view.num_blocks(); ++block) {
        if (double(view.maxima[block]) / view.divisor - best < kNoMass) continue;
        const int size = view.block_size(block);
        find_below(view, block, best, below);
        view.loops->mass_bins(below, size, mass, bin);
        for (int i = 0; i < size; ++i) histogram[i & 3][bin[i]] += mass[i].value();
    }
    int64_t total = 0, before = 0;
    for (int i = 0; i < kNumBins; ++i) {
        for (int part = 1; part < 4; ++part) histogram[0][i] += histogram[part][i];
        total += histogram[0][i];
    }
    const double need = share * double(total);
    int cut = 0;
    while (cut < kNumBins - 1 && double(before + histogram[0][cut]) < need) before += histogram[0][cut++];
    return {cut, before, need};
}

// Sets column -1 for candidates of the cut's bin (order[]) outside the prefix. Halves the bin until sorting is cheap.
void drop_rest(int32_t* begin, int32_t* end, double best, const Cut& cut, Candidates& out) {
    const double* scores = out.scores.data();
    const auto comes_first = [scores](int32_t a, int32_t b) {
        return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
    };
    const auto mass = [&](int32_t i) { return exact_mass(float(scores[i] - best)).value(); };
    int64_t ahead = cut.before;
    while (end - begin > 32) {
        int32_t* middle = begin + (end - begin) / 2;
        std::nth_element(begin, middle, end, comes_first);
        int64_t half = 0;
        for (int32_t* i = begin; i < middle; ++i) half += mass(*i);
        if (double(ahead + half) < cut.need) {
            ahead += half;
            begin = middle;
        } else {
            for (int32_t* i = middle; i < end; ++i) out.columns[*i] = -1;
            end = middle;
        }
    }
    std::sort(begin, end, comes_first);
    for (; begin < end && (ahead == 0 || double(ahead) < cut.need); ++begin) ahead += mass(*begin);
    for (; begin < end; ++begin) out.columns[*begin] = -1;
}

// Top-p: the smallest prefix, best first, ties in column order, that has `share` of the mass.
template <class Real>
void keep_top_p(const View<Real>& view, double best, double share, Candidates& out, Scratch& scratch) {
    const Cut cut = find_cut(view, best, share);
    collect(view, best - (cut.bin + 2.0) / kBinsPerNat, out); // one extra bin for rounding errors
    int32_t* order = resized(scratch.order, out.count);
    int64_t count = 0, in_cut = 0;
    for (int64_t i = 0; i < out.count; ++i) {
        const float place = float(out.scores[i] - best) * -kBinsPerNat;
        if (place >= float(cut.bin + 1)) continue;
        out.scores[count] = out.scores[i], out.columns[count] = out.columns[i];
        if (place >= float(cut.bin)) order[in_cut++] = int32_t(count);
        ++count;
    }
    out.count = count;
    drop_rest(order, order + in_cut, best, cut, out);
    out.count = 0;
    for (int64_t i = 0; i < count; ++i)
        if (out.columns[i] >= 0) out.add(out.scores[i], out.columns[i]);
}

template <class Real> bool apply_filters(const View<Real>& all, double best, const Draw& draw, Scratch& scratch) {
    bool filtered = false;
    Candidates &kept = scratch.candidates, &next = scratch.next;
    if (draw.min_p > 0) {
        collect(all, best + std::min(0.0, exact_log(draw.min_p)), kept);
        filtered = true;
    }
    if (draw.top_k > 0 && draw.top_k < (filtered ? kept.count : all.n)) {
        if (filtered) {
            keep_top_k(view_of(kept, scratch), draw.top_k, next, scratch);
            std::swap(kept, next);
        } else {
            keep_top_k(all, draw.top_k, kept, scratch);
        }
        filtered = true;
    }
    if (draw.top_p < 1) {
        if (filtered) {
            keep_top_p(view_of(kept, scratch), best, draw.top_p, next, scratch);
            std::swap(kept, next);
        } else {
            keep_top_p(all, best, draw.top_p, kept, scratch);
        }
        filtered = true;
    }
    return filtered;
}

// Upper bound of noise words that can lift a score l to the bound b: l + g >= b needs v <= 1 - exp(-exp(l - b)) <=
// exp(l - b). 2^y is bounded by the line between powers of two, plus 0.1 % for rounding.
uint32_t largest_word(double score, double bound) {
    const float y = std::max(float(score - bound) * 1.4426950f + 32.0f, 0.0f);
    if (y >= 31.9f) return 0xFFFFFFFFu;
    const int32_t bits = int32_t((y + 127.0f) * (1 << 23));
    float reach;
    std::memcpy(&reach, &bits, 4);
    return uint32_t(reach * 1.001f) + 1;
}

// Index of the maximum of score + Gumbel noise. Noise is bounded, so blocks far below the best sum so far are skipped.
template <class Real>
int64_t draw_gumbel(const View<Real>& view, int64_t top, const NoiseKey& key, const Vocabulary& vocabulary) {
    double bound = view.score(top) + gumbel(noise_word(key, vocabulary.token_id(view.column(top))));
    int64_t winner = top;
    BlockGroups found;
    const BlockGroups* known = view.columns ? nullptr : vocabulary.groups;
    alignas(64) uint32_t words[4 * kBlock];
    for (int64_t block = 0; block < view.num_blocks(); ++block) {
        const double best = double(view.maxima[block]) / view.divisor;
        if (best < bound - kGumbelMax) continue;
        const int64_t start = block * kBlock;
        const int size = view.block_size(block);
        const uint32_t limit = largest_word(best, bound);
        if (!known) found.find(view.columns, vocabulary.token_ids, start, size);
        const BlockGroups& groups = known ? known[block] : found;
        if (!view.loops->words(key, groups.groups, groups.count, groups.offset, limit, words)) continue;
        for (int i = 0; i < size; ++i) {
            const uint32_t word = words[groups.place[i]];
            if (word > limit) continue;
            const double score = view.score(start + i);
            if (word > largest_word(score, bound)) continue;
            const double value = score + gumbel(word);
            if (value > bound || (value == bound && start + i < winner)) bound = value, winner = start + i;
        }
    }
    return winner;
}

template <class Real>
void write_probs(const View<Real>& view, double best, const Vocabulary& vocabulary, double* probs) {
    float below[kBlock], weight[kBlock];
    int64_t mass = 0;
    for (int64_t block = 0; block < view.num_blocks(); ++block) {
        find_below(view, block, best, below);
        mass += view.loops->mass_sum(below, view.block_size(block));
    }
    const double total = double(mass) * (1.0 / kMassOne);
    for (int64_t block = 0; block < view.num_blocks(); ++block) {
        find_below(view, block, best, below);
        const int size = view.block_size(block);
        view.loops->exp(below, size, weight);
        for (int i = 0; i < size; ++i)
            probs[vocabulary.token_id(view.column(block * kBlock + i))] = double(weight[i]) / total;
    }
}

template <class Real>
int64_t draw_view(const View<Real>& view, int64_t top, double best, const Draw& draw, const Vocabulary& vocabulary,
                  double* probs) {
    if (probs) write_probs(view, best, vocabulary, probs);
    return view.column(draw_gumbel(view, top, draw.key, vocabulary));
}

} // namespace

BlockGroups::BlockGroups() {
    for (int i = 0; i < kGroups; ++i) groups[i] = uint64_t(i);
    for (int i = 0; i < kBlock; ++i) place[i] = word_place(i / 4, i % 4);
}

void BlockGroups::find(const int32_t* columns, const int64_t* token_ids, int64_t start, int size) {
    if (!columns && !token_ids) {
        offset = uint64_t(start) / 4;
        return;
    }
    count = 0;
    for (int i = 0; i < size; ++i) {
        const int64_t column = columns ? columns[start + i] : start + i, id = token_ids ? token_ids[column] : column;
        const uint64_t group = uint64_t(id) / 4;
        count += count == 0 || groups[count - 1] != group;
        groups[count - 1] = group;
        place[i] = word_place(count - 1, int(id % 4));
    }
}

std::vector<BlockGroups> BlockGroups::of(const int64_t* token_ids, int64_t n) {
    std::vector<BlockGroups> found((n + kBlock - 1) / kBlock);
    for (int64_t start = 0; start < n; start += kBlock)
        found[start / kBlock].find(nullptr, token_ids, start, int(std::min<int64_t>(kBlock, n - start)));
    return found;
}

template <class Real>
int64_t draw_row(const Real* x, const Vocabulary& vocabulary, const Draw& draw, double* probs, Scratch& scratch) {
    const int64_t n = vocabulary.width;
    if (n == 0) return kNothingLeft;
    Real* maxima = resized(maxima_of(scratch, Real()), n / kBlock + 1);
    if (find_maxima(*scratch.loops, x, n, maxima)) return kNotFinite;
    const bool greedy = !(draw.temperature >= kGreedyBelow);
    const View<Real> all{x, n, greedy ? 1.0 : double(draw.temperature), nullptr, maxima, scratch.loops};
    const int64_t top = first_best(all);
    if (x[top] == -kInfinity) return kNothingLeft;
    if (!std::isfinite(x[top])) return kNotFinite;
    if (greedy) {
        if (probs) probs[vocabulary.token_id(top)] = 1.0;
        return top;
    }
    const double best = all.score(top);
    if (!apply_filters(all, best, draw, scratch)) return draw_view(all, top, best, draw, vocabulary, probs);
    const View<double> kept = view_of(scratch.candidates, scratch);
    return draw_view(kept, first_best(kept), best, draw, vocabulary, probs);
}

template int64_t draw_row(const float*, const Vocabulary&, const Draw&, double*, Scratch&);
template int64_t draw_row(const double*, const Vocabulary&, const Draw&, double*, Scratch&);

int64_t logprob_row(const float* x, int64_t n, int64_t column, int64_t num_top, float* value, int64_t* top_columns,
                    float* top_values, Scratch& scratch) {
    float* maxima = resized(scratch.maxima32, n / kBlock + 1);
    *value = std::numeric_limits<float>::quiet_NaN();
    if (find_maxima(*scratch.loops, x, n, maxima)) return 0;
    const View<float> view{x, n, 1.0, nullptr, maxima, scratch.loops};
    const double best = view.score(first_best(view));
    if (!std::isfinite(best)) return 0;
    float below[kBlock];
    int64_t mass = 0;
    for (int64_t block = 0; block < view.num_blocks(); ++block) {
        if (double(maxima[block]) - best < kNoMass) continue;
        find_below(view, block, best, below);
        mass += view.loops->mass_sum(below, view.block_size(block));
    }
    const double log_total = exact_log(double(mass) * (1.0 / kMassOne));
    *value = float(double(x[column]) - best - log_total);
    num_top = std::min(num_top, n);
    if (num_top <= 0) return 0;
    Candidates& top = scratch.candidates;
    keep_top_k(view, num_top, top, scratch);
    for (int64_t i = 0; i < n && top.count < num_top; ++i) // masked columns last
        if (x[i] == -kInfinity) top.add(x[i], int32_t(i));
    int32_t* order = resized(scratch.order, num_top);
    for (int64_t i = 0; i < num_top; ++i) order[i] = int32_t(i);
    const double* scores = top.scores.data();
    std::sort(order, order + num_top,
              [scores](int32_t a, int32_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
    for (int64_t i = 0; i < num_top; ++i) {
        top_columns[i] = top.columns[order[i]];
        top_values[i] = float(scores[order[i]] - best - log_total);
    }
    return num_top;
}

} // namespace headstart
