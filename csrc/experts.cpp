// Row-wise kernels of mixtures of experts: routing, and the weighted sum of experts' outputs.
#include "kernels.h"
#include "simd.h"

#include <cmath>

namespace headstart::HEADSTART_PATH {
namespace {

constexpr float kEpsilon = 1e-20f; // added to the sum of weights, which is 0 if all sigmoids are

void softmax(const float* logits, int64_t count, float* out) {
    float top = logits[0];
    for (int64_t i = 1; i < count; ++i) top = logits[i] > top ? logits[i] : top;
    for (int64_t i = 0; i < count; i += 16)
        store_some(out + i, count - i, exp(load_some(logits + i, count - i) - splat(top)));
    float total = 0.0f;
    for (int64_t i = 0; i < count; ++i) total += out[i];
    for (int64_t i = 0; i < count; ++i) out[i] /= total;
}

// First index of the largest unmarked value; NaN never wins over an earlier value. At least one must be unmarked.
int64_t largest(const float* values, const bool* marked, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i)
        if (!marked[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

float sum_of_two_best(const float* values, int64_t count) {
    if (count == 1) return values[0];
    float first = values[0] > values[1] ? values[0] : values[1], second = values[0] > values[1] ? values[1] : values[0];
    for (int64_t i = 2; i < count; ++i) {
        if (values[i] > first) {
            second = first;
            first = values[i];
        } else if (values[i] > second) {
            second = values[i];
        }
    }
    return first + second;
}

void mark_other_groups(const float* choice, const Router& router, bool* marked) {
    const int64_t size = router.num_experts / router.num_groups;
    float best[kMaxExperts];
    bool taken[kMaxExperts] = {};
    for (int64_t g = 0; g < router.num_groups; ++g) best[g] = sum_of_two_best(choice + g * size, size);
    for (int64_t i = 0; i < router.top_groups; ++i) taken[largest(best, taken, router.num_groups)] = true;
    for (int64_t i = 0; i < router.num_experts; ++i) marked[i] = !taken[i / size];
}

} // namespace

void sigmoid_mul(const float* gate, const float* x, int64_t gates, int64_t width, float* out) {
    if (gates == width) {
        for (int64_t i = 0; i < width; i += 16)
            store_some(out + i, width - i, sigmoid(load_some(gate + i, width - i)) * load_some(x + i, width - i));
        return;
    }
    const int64_t size = width / gates;
    for (int64_t g = 0; g < gates; ++g, x += size, out += size) {
        const f32 factor = sigmoid(splat(gate[g]));
        for (int64_t i = 0; i < size; i += 16) store_some(out + i, size - i, factor * load_some(x + i, size - i));
    }
}

void softplus(const float* x, const float* rate, const float* bias, int64_t width, float* out); // recurrent.cpp

void route(const float* logits, const float* bias, const int64_t* token_experts, const Router& router, int32_t* ids,
           float* weights) {
    const int64_t count = router.num_experts, k = router.top_k;
    float scores[kMaxExperts], choice[kMaxExperts];
    bool marked[kMaxExperts] = {};
    if (router.scoring == Scoring::SIGMOID) {
        for (int64_t i = 0; i < count; i += 16)
            store_some(scores + i, count - i, sigmoid(load_some(logits + i, count - i)));
    } else if (router.scoring == Scoring::SOFTPLUS) {
        static constexpr float kNothing[kMaxExperts] = {};
        softplus(logits, nullptr, kNothing, count, scores);
        for (int64_t i = 0; i < count; ++i) scores[i] = std::sqrt(scores[i]);
    } else {
        softmax(logits, count, scores);
    }
    for (int64_t i = 0; i < count; ++i) choice[i] = bias ? scores[i] + bias[i] : scores[i];
    if (router.num_groups > 1) mark_other_groups(choice, router, marked);
    for (int64_t i = 0; i < k; ++i) {
        const int64_t best = token_experts ? token_experts[i] : largest(choice, marked, count);
        marked[best] = true;
        int64_t at = i; // insertion sort: ids ascend, which fixes the order of the sum
        for (; at > 0 && ids[at - 1] > best; --at) ids[at] = ids[at - 1];
        ids[at] = (int32_t)best;
    }
    float total = 0.0f;
    for (int64_t i = 0; i < k; ++i) total += scores[ids[i]];
    for (int64_t i = 0; i < k; ++i) {
        const float weight = router.normalize ? scores[ids[i]] / (total + kEpsilon) : scores[ids[i]];
        weights[i] = weight * router.scale;
    }
}

void weighted_sum(const float* values, int64_t stride, const int32_t* slots, const float* weights, int64_t count,
           const float* x, int64_t width, float* out) {
    for (int64_t at = 0; at < width; at += 16) {
        f32 sum = splat(0.0f);
        for (int64_t i = 0; i < count; ++i)
            sum = fma(load_some((slots[i] < 0 ? x : values + slots[i] * stride) + at, width - at), splat(weights[i]), sum);
        store_some(out + at, width - at, sum);
    }
}

} // namespace headstart::HEADSTART_PATH
