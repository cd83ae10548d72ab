// Kernels of residual streams and compressed attention for one row (Ops.stream_weights, sum_streams, mix_streams and
// compress of headstart/kernels/ops.py).
#include "kernels.h"
#include "simd.h"

namespace headstart::HEADSTART_PATH {
namespace {

INLINE float sigmoid_of(float x) {
    float lanes[16];
    store(lanes, sigmoid(splat(x)));
    return lanes[0];
}

// Divides each row (or column) of a count x count matrix by its sum.
void normalize(float* square, int64_t count, float eps, int64_t step, int64_t stride) {
    for (int64_t i = 0; i < count; ++i) {
        float total = 0.0f;
        for (int64_t j = 0; j < count; ++j) total += square[i * step + j * stride];
        for (int64_t j = 0; j < count; ++j) square[i * step + j * stride] /= total + eps;
    }
}

// Softmax of each of `rows` rows of `count` values, + eps.
void softmax_rows(float* values, int64_t rows, int64_t count, float eps) {
    for (int64_t i = 0; i < rows; ++i) {
        float* row = values + i * count;
        float peak = row[0], total = 0.0f;
        for (int64_t j = 1; j < count; ++j) peak = row[j] > peak ? row[j] : peak;
        for (int64_t j = 0; j < count; j += 16)
            store_some(row + j, count - j, exp(load_some(row + j, count - j) - splat(peak)));
        for (int64_t j = 0; j < count; ++j) total += row[j];
        for (int64_t j = 0; j < count; ++j) row[j] = row[j] / total + eps;
    }
}

} // namespace

void stream_weights(const float* mixes, const float* base, const float* scale, const StreamShape& shape, float* out) {
    const int64_t n = shape.count;
    if (shape.last && shape.softmax) {
        for (int64_t i = 0; i < n; ++i) out[i] = mixes[i] * scale[0] + base[i];
        return softmax_rows(out, 1, n, shape.eps);
    }
    for (int64_t i = 0; i < n; ++i) out[i] = sigmoid_of(mixes[i] * scale[0] + base[i]) + shape.eps;
    if (shape.last) return;
    for (int64_t i = n; i < 2 * n; ++i)
        out[i] = shape.magnitude * sigmoid_of(mixes[i] * scale[1] + base[i]) + (shape.mixed ? 0.0f : shape.eps);
    if (!shape.mixed) return;
    float* square = out + 2 * n;
    for (int64_t i = 0; i < n * n; ++i) square[i] = mixes[2 * n + i] * scale[2] + base[2 * n + i];
    softmax_rows(square, n, n, shape.eps);
    normalize(square, n, shape.eps, 1, n);
    for (int64_t i = 1; i < shape.iterations; ++i) {
        normalize(square, n, shape.eps, n, 1);
        normalize(square, n, shape.eps, 1, n);
    }
}

void sum_streams(const float* streams, const float* weights, int64_t count, int64_t width, float* out) {
    const float even = 1.0f / (float)count;
    for (int64_t i = 0; i < width; i += 16) {
        f32 sum = splat(0.0f);
        for (int64_t s = 0; s < count; ++s)
            sum = fma(load_some(streams + s * width + i, width - i), splat(weights ? weights[s] : even), sum);
        store_some(out + i, width - i, sum);
    }
}

void mix_streams(const float* streams, const float* x, const float* weights, int64_t count, int64_t width, bool mixed,
                 float* out) {
    const float *share = weights + count, *square = weights + 2 * count;
    for (int64_t i = 0; i < width; i += 16) {
        const f32 said = load_some(x + i, width - i);
        for (int64_t k = 0; k < count; ++k) {
            f32 sum = said * splat(share[k]);
            if (!mixed) sum = sum + load_some(streams + k * width + i, width - i);
            for (int64_t j = 0; mixed && j < count; ++j)
                sum = fma(load_some(streams + j * width + i, width - i), splat(square[j * count + k]), sum);
            store_some(out + k * width + i, width - i, sum);
        }
    }
}

void compress(const CompressTask& task) {
    const int64_t half = task.overlap ? task.span / 2 : 0; // earlier rows use their first columns
    const int64_t width = task.overlap ? 2 * task.dim : task.dim;
    for (int64_t d = 0; d < task.dim; d += 16) {
        const int64_t rest = task.dim - d;
        f32 peak = splat(-3.4e38f), total = splat(0.0f), sum = splat(0.0f);
        for (int64_t pass = 0; pass < 2; ++pass)
            for (int64_t i = task.first; i < task.span; ++i) {
                const float* value = task.rows + i * task.stride + (task.overlap && i >= half ? task.dim : 0) + d;
                const f32 gate = load_some(value + width, rest);
                if (pass == 0) {
                    peak = max(peak, gate);
                    continue;
                }
                const f32 weight = exp(gate - peak);
                total = total + weight;
                sum = fma(weight, load_some(value, rest), sum);
            }
        store_some(task.out + d, rest, sum / total);
    }
}

} // namespace headstart::HEADSTART_PATH
