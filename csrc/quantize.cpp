// Quantizes float32 rows to int8 and int4 with a scale (int4: and a min) per 32 columns.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"
#include "packing.h"

namespace headstart {
namespace {

constexpr int kGroup = 32, kWays = 4;
// Explicit vectors, because compilers do not vectorize the search; every instruction set has this width.
using Floats = float __attribute__((vector_size(kWays * 4)));
using Ints = int32_t __attribute__((vector_size(kWays * 4)));
constexpr float kMaxHalf = 65504.0f;

// Loads a group's values; beyond the row's end it repeats the first value.
void load_group(const uint8_t* row, int64_t column, int64_t count, float* values) {
    std::memcpy(values, row + column * 4, static_cast<size_t>(count) * 4);
    std::fill(values + count, values + kGroup, values[0]);
}

uint16_t finite_half(float value) { return half_from_float(std::clamp(value, -kMaxHalf, kMaxHalf)); }

Floats load(const float* values) {
    Floats out;
    std::memcpy(&out, values, sizeof out);
    return out;
}

// Rounds to the nearest integer in [0, limit]; NaN becomes 0.
Ints round_quants(Floats value, float limit) {
    const Floats low{}, high = low + limit;
    value = value > low ? value : low;
    value = value < high ? value : high;
    return __builtin_convertvector(value + 0.5f, Ints);
}

float sum(Floats ways) { return (ways[0] + ways[1]) + (ways[2] + ways[3]); }

// x ~ scale * q + min
struct Line {
    float scale, min;
};

// Least-squares line through a group's (q, x - mean), with q rounded by a given line.
struct Fit {
    float gain; // reduction of the sum of squared errors
    Line line;
};

Fit fit_nearest(const float* centered, Line line) {
    const float inverse = 1.0f / line.scale;
    Floats q_sum{}, qq_sum{}, qx_sum{};
    for (int i = 0; i < kGroup; i += kWays) {
        const Floats x = load(centered + i);
        const Floats q = __builtin_convertvector(round_quants((x - line.min) * inverse, 15.0f), Floats);
        q_sum += q;
        qq_sum += q * q;
        qx_sum += q * x;
    }
    const float q_mean = sum(q_sum) / kGroup, spread = sum(qq_sum) - q_mean * sum(q_sum), qx = sum(qx_sum);
    if (!(spread > 0) || !(qx > 0)) return {0, line}; // all q are equal
    const float scale = qx / spread;
    return {scale * qx, {scale, -scale * q_mean}};
}

// Tries ranges that clip more and more of both ends, then alternates rounding and least squares from the best one; no
// iteration increases the squared error.
Line search_line(const float* centered, float lowest, float highest) {
    constexpr int kRanges = 3, kRefinements = 3;
    Fit best{-1, {}};
    for (int range = 0; range < kRanges; ++range) {
        const float cut = 0.03f * static_cast<float>(range) * (highest - lowest);
        const Fit fit = fit_nearest(centered, {(highest - lowest - 2 * cut) / 15, lowest + cut});
        if (fit.gain > best.gain) best = fit;
    }
    for (int i = 0; i < kRefinements; ++i) {
        const Fit fit = fit_nearest(centered, best.line);
        if (fit.gain > best.gain) best = fit;
    }
    return best.line;
}

// q = (values - base) * inverse + offset, rounded and clamped to [0, limit].
void write_quants(const float* values, float base, float inverse, float offset, float limit, uint8_t* quants) {
    for (int i = 0; i < kGroup; i += kWays) {
        const Ints q = round_quants((load(values + i) - base) * inverse + offset, limit);
        for (int way = 0; way < kWays; ++way) quants[i + way] = static_cast<uint8_t>(q[way]);
    }
}

void quantize_group4(const float* values, uint16_t& scale_bits, uint16_t& min_bits, uint8_t* quants) {
    Floats low = load(values), high = low, total{};
    for (int i = 0; i < kGroup; i += kWays) {
        const Floats x = load(values + i);
        low = x < low ? x : low;
        high = x > high ? x : high;
        total += x;
    }
    const float lowest = std::min(std::min(low[0], low[1]), std::min(low[2], low[3]));
    const float highest = std::max(std::max(high[0], high[1]), std::max(high[2], high[3]));
    const float mean = sum(total) / kGroup;
    float centered[kGroup];
    for (int i = 0; i < kGroup; ++i) centered[i] = values[i] - mean;
    Line line{0, 0};
    if (lowest < highest) line = search_line(centered, lowest - mean, highest - mean);
    scale_bits = finite_half(line.scale);
    min_bits = finite_half(line.min + mean);
    // Quantize with the scale and min as stored (float16).
    const float scale = float_from_half(scale_bits), min = float_from_half(min_bits);
    const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    write_quants(values, min, inverse, 0.0f, 15.0f, quants);
}

} // namespace

void fill_int8(const uint8_t* row, int64_t column, int64_t count, Strip& strip) {
    for (int64_t begin = 0; begin < count; begin += kGroup) {
        float values[kGroup], largest = 0;
        load_group(row, column + begin, std::min<int64_t>(kGroup, count - begin), values);
        for (float value : values) largest = std::max(largest, std::fabs(value));
        const uint16_t bits = finite_half(largest / 127);
        const float scale = float_from_half(bits), inverse = scale > 0 ? 1.0f / scale : 0.0f;
        strip.scales[begin / kGroup] = bits;
        uint8_t quants[kGroup];
        write_quants(values, 0.0f, inverse, 128.0f, 255.0f, quants);
        std::memcpy(strip.body + begin, quants, static_cast<size_t>(std::min<int64_t>(kGroup, count - begin)));
    }
}

void fill_int4(const uint8_t* row, int64_t column, int64_t count, Strip& strip) {
    for (int64_t begin = 0; begin < count; begin += kGroup) {
        float values[kGroup];
        uint8_t quants[kGroup];
        uint16_t scale, min;
        load_group(row, column + begin, std::min<int64_t>(kGroup, count - begin), values);
        quantize_group4(values, scale, min, quants);
        strip.scales[begin / kGroup] = scale;
        strip.offsets[begin / kGroup] = min;
        for (int i = 0; i < 16; ++i)
            strip.body[begin / 2 + i] = static_cast<uint8_t>(quants[i] | quants[16 + i] << 4);
    }
}

} // namespace headstart
