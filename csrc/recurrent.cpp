// Kernels of recurrent layers: causal convolution, gated delta rule, selective scan. Rows are processed in sequence order
// and every lane sums over taps or keys in order, so bits do not depend on how rows are divided into passes.
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "noise.h"
#include "simd.h"

namespace headstart::HEADSTART_PATH {
namespace {

constexpr float kL2Epsilon = 1e-6f;
#if HEADSTART_AVX512
constexpr int kStrips = 4; // vectors of 16 columns
#elif HEADSTART_AVX2 || HEADSTART_NEON
constexpr int kStrips = 2;
#else
constexpr int kStrips = 1;
#endif

float lane(f32 a) {
    float lanes[16];
    store(lanes, a);
    return lanes[0];
}

// out = x * factor / |x|, L2 norm over `count` values.
void normalize(const float* x, int64_t count, float factor, float* out) {
    f32 squares = splat(0.0f);
    for (int64_t i = 0; i < count; i += 16) {
        const f32 value = load_some(x + i, count - i);
        squares = fma(value, value, squares);
    }
    const f32 inverse = splat(factor / std::sqrt(sum_lanes(squares) + kL2Epsilon));
    for (int64_t i = 0; i < count; i += 16) store_some(out + i, count - i, load_some(x + i, count - i) * inverse);
}

// One row's inputs for one head; those of a scan point into the row.
struct Row {
    alignas(64) float unit_query[kMaxKeyDim], unit_key[kMaxKeyDim], decays[kMaxKeyDim], decayed_key[kMaxKeyDim];
    const float *query, *key, *values;
    float decay, strength; // decay 1 by channel: decayed_key, which reads the state, has the factors
};

// A head's inputs are three ranges of a wide row, which hardware does not prefetch.
void prefetch_row(const RecurrenceTask& task, const float* row) {
    for (int64_t i = 0; i < task.key_dim; i += 16) {
        prefetch(row + task.query_at + i);
        prefetch(row + task.key_at + i);
    }
    for (int64_t i = 0; i < task.num_columns; i += 16) prefetch(row + task.value_at + task.first_column + i);
}

float raised(float x) { return lane(exp(min(splat(88.0f), splat(x)))); }

void read_delta(const RecurrenceTask& task, const float* from, const float* log_decay, float strength, Row& row) {
    normalize(from + task.query_at, task.key_dim, 1.0f / std::sqrt((float)task.key_dim), row.unit_query);
    normalize(from + task.key_at, task.key_dim, 1.0f, row.unit_key);
    row.query = row.unit_query, row.key = row.unit_key, row.values = from + task.value_at;
    row.decay = task.by_channel ? 1.0f : raised(*log_decay);
    for (int64_t i = 0; task.by_channel && i < task.key_dim; i += 16) {
        const int64_t rest = task.key_dim - i;
        const f32 decay = exp(min(splat(88.0f), load_some(log_decay + i, rest)));
        store_some(row.decays + i, rest, decay);
        store_some(row.decayed_key + i, rest, load_some(row.unit_key + i, rest) * decay);
    }
    row.strength = lane(sigmoid(splat(strength)));
}

void read_scan(const RecurrenceTask& task, const float* from, float step, Row& row) {
    row.query = from + task.query_at, row.key = from + task.key_at, row.values = from + task.value_at;
    row.decay = raised(task.rate * step);
    row.strength = step;
}

// Updates state [key_dim][kWidth * 16] with a row; writes `columns` outputs unless out is nullptr.
template <int kWidth, bool kByChannel>
void take_in(const RecurrenceTask& task, float* state, const Row& row, int64_t first, int64_t columns, float* out) {
    constexpr int64_t kStride = kWidth * 16;
    const f32 decay = splat(row.decay), strength = splat(row.strength);
    f32 values[kWidth], change[kWidth], read[kWidth];
    for (int s = 0; s < kWidth; ++s) {
        values[s] = load_some(row.values + first + s * 16, columns - s * 16);
        read[s] = splat(0.0f);
    }
    if (task.delta) {
        f32 is_supported[kWidth];
        for (int s = 0; s < kWidth; ++s) is_supported[s] = splat(0.0f);
        const float* reading = kByChannel ? row.decayed_key : row.key;
        for (int64_t k = 0; k < task.key_dim; ++k) {
            const f32 key = splat(reading[k]);
            for (int s = 0; s < kWidth; ++s) is_supported[s] = fma(load(state + k * kStride + s * 16), key, is_supported[s]);
        }
        for (int s = 0; s < kWidth; ++s) change[s] = (values[s] - decay * is_supported[s]) * strength;
    } else {
        for (int s = 0; s < kWidth; ++s) change[s] = values[s] * strength;
    }
    for (int64_t k = 0; k < task.key_dim; ++k) {
        const f32 key = splat(row.key[k]), query = splat(row.query[k]);
        const f32 fading = kByChannel ? splat(row.decays[k]) : decay;
        for (int s = 0; s < kWidth; ++s) {
            float* at = state + k * kStride + s * 16;
            const f32 moved = fma(key, change[s], load(at) * fading);
            store(at, moved);
            read[s] = fma(moved, query, read[s]);
        }
    }
    if (!out) return;
    for (int s = 0; s < kWidth; ++s) {
        const f32 made = task.delta ? read[s] : fma(splat(task.skip), values[s], read[s]);
        store_some(out + first + s * 16, columns - s * 16, made);
    }
}

// Processes all rows of a sequence for up to kWidth * 16 columns of a head.
template <int kWidth> void run_rows(const RecurrenceTask& task, int64_t first, int64_t columns) {
    constexpr int64_t kStride = kWidth * 16;
    alignas(64) float state[kMaxKeyDim * kStride];
    Row row;
    const int64_t matrix = task.head * task.key_dim * task.value_dim;
    for (int64_t k = 0; k < task.key_dim; ++k)
        for (int s = 0; s < kWidth; ++s) {
            const float* from = task.from ? task.from + matrix + k * task.value_dim + first + s * 16 : nullptr;
            store(state + k * kStride + s * 16, from ? load_some(from, columns - s * 16) : splat(0.0f));
        }
    int64_t next = 0;
    for (int64_t walked = 0;; ++walked) {
        for (; next < task.num_stores && task.store_positions[next] - task.start == walked; ++next) {
            float* to = task.states + task.store_slots[next] * task.state_size + matrix + first;
            for (int64_t k = 0; k < task.key_dim; ++k)
                for (int s = 0; s < kWidth; ++s)
                    store_some(to + k * task.value_dim + s * 16, columns - s * 16, load(state + k * kStride + s * 16));
        }
        if (walked == task.num_kept + task.num_rows) return;
        const int64_t r = walked - task.num_kept;
        const float* kept = r < 0 ? task.kept + walked * task.kept_stride : nullptr;
        const float* from = kept ? kept : task.rows + r * task.row_stride;
        const float strength = kept ? kept[task.strength_at] : task.strength[r * task.gate_stride];
        if (task.delta)
            read_delta(task, from, kept ? kept + task.decay_at : task.decay + r * task.decay_stride, strength, row);
        else
            read_scan(task, from, strength, row);
        if (r + 1 < task.num_rows && r >= -1) prefetch_row(task, task.rows + (r + 1) * task.row_stride);
        float* out = r < 0 ? nullptr : task.out + r * task.out_stride + task.head * task.value_dim;
        (task.by_channel ? take_in<kWidth, true> : take_in<kWidth, false>)(task, state, row, first, columns, out);
    }
}

} // namespace

void recur(const RecurrenceTask& task) {
    const int64_t end = task.first_column + task.num_columns;
    int64_t first = task.first_column;
    for (; end - first > 16; first += kStrips * 16)
        run_rows<kStrips>(task, first, end - first < kStrips * 16 ? end - first : kStrips * 16);
    if (first < end) run_rows<1>(task, first, end - first);
}

void conv(const float* const* rows, const float* taps, const float* bias, int64_t width, int64_t channels, float* out) {
    for (int64_t i = 0; i < channels; i += 16) {
        f32 sum = bias ? load_some(bias + i, channels - i) : splat(0.0f);
        for (int64_t j = 0; j < width; ++j)
            if (rows[j]) sum = fma(load_some(rows[j] + i, channels - i), load_some(taps + j * channels + i, channels - i), sum);
        store_some(out + i, channels - i, sum);
    }
}

void bounded_decay(const float* x, const float* rate, const float* bias, float bound, int64_t width, float* out) {
    for (int64_t i = 0; i < width; i += 16) {
        const f32 moved = load_some(x + i, width - i) + load_some(bias + i, width - i);
        store_some(out + i, width - i, splat(bound) * sigmoid(load_some(rate + i, width - i) * moved));
    }
}

void softplus(const float* x, const float* rate, const float* bias, int64_t width, float* out) {
    for (int64_t i = 0; i < width; ++i) {
        const float value = x[i] + bias[i], size = std::fabs(value);
        // ln(1 + e^v) = max(v, 0) + ln(1 + e^-|v|); for small y = e^-|v|, ln(1 + y) is y
        const float small = lane(exp(splat(-size)));
        const double rest = small < 1e-8f ? (double)small : exact_log(1.0 + (double)small);
        out[i] = value != value ? value : (rate ? rate[i] : 1.0f) * (float)((value > 0.0f ? (double)value : 0.0) + rest);
    }
}

} // namespace headstart::HEADSTART_PATH
