// The sampler's loops over rows in blocks of 64 tokens, compiled once per instruction-set path. All paths give the same
// bits: elementwise float operations in one order, and integer sums.
#pragma once

#include <cstdint>
#include <cstring>

#include "matrix.h"
#include "noise.h"

namespace headstart {

constexpr int kBlock = 64;
constexpr int kGroups = kBlock / 4; // Philox counters per block of consecutive ids

constexpr float kMassOne = 1099511627776.0f;         // 2^40: mass of the best token
constexpr int kBinsPerNat = 16, kNumBins = 28 * 16 + 1; // bins of the distance to the best; the last has no mass
constexpr double kNoMass = -28.0;                    // exp(-28) < 2^-40

// Fixed-point e^x, 1 = 2^40, in two halves: high * 2^24 + low (SSE2 has no conversion to 64-bit integers).
struct Mass {
    int32_t high, low;
    HEADSTART_INLINE int64_t value() const { return int64_t(high) * (1 << 24) + low; }
};

struct Loops {
    // maxima[b] of each block b, skipping NaN; returns whether there was a NaN
    bool (*maxima_f32)(const float* x, int64_t n, float* maxima);
    bool (*maxima_f64)(const double* x, int64_t n, double* maxima);
    // below = float32(x / divisor - best), n <= kBlock
    void (*below_f32)(const float* x, int n, double divisor, double best, float* below);
    void (*below_f64)(const double* x, int n, double divisor, double best, float* below);
    // e^x, n <= kBlock
    void (*exp)(const float* below, int n, float* result);
    // sum of masses, n <= kBlock; then mass and bin of each token
    int64_t (*mass_sum)(const float* below, int n);
    void (*mass_bins)(const float* below, int n, Mass* mass, int32_t* bin);
    // Noise words of counters groups[i] + offset, i < count rounded up to kGroups, stored at word_place; returns whether one
    // is <= limit.
    bool (*words)(const NoiseKey& key, const uint64_t* groups, int count, uint64_t offset, uint32_t limit,
                  uint32_t* words);
};

// Index of word (id % 4) of the group-th of at most kBlock groups. Two words share 64 bits.
static inline int word_place(int group, int word) { return (word >> 1) * 2 * kBlock + 2 * group + (word & 1); }

namespace portable {
extern const Loops kLoops;
}
namespace avx2 {
extern const Loops kLoops;
}
namespace avx512 {
extern const Loops kLoops;
}
namespace neon {
extern const Loops kLoops;
}
namespace dotprod {
extern const Loops kLoops;
}
namespace i8mm {
extern const Loops kLoops;
}

// e^x for float32 x <= 87, 0 below -87, as defined by kernels/reference/sampling.py.
static inline float exact_exp(float x) {
    constexpr float kRound = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer, ties to even
    const float clamped = x < -87.0f ? -87.0f : x;
    const float shifted = clamped * 1.4426950216293335f + kRound;
    const float k = shifted - kRound;
    const float r = (clamped - k * 0.693145751953125f) - k * 1.428606765330187e-06f;
    float series = r * float(1.0 / 5040);
    series = (series + float(1.0 / 720)) * r;
    series = (series + float(1.0 / 120)) * r;
    series = (series + float(1.0 / 24)) * r;
    series = (series + float(1.0 / 6)) * r;
    series = (series + 0.5f) * r;
    series = (series + 1.0f) * r;
    series += 1.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    bits = (bits - 0x4B400000 + 127) * (1 << 23);
    float power;
    std::memcpy(&power, &bits, 4);
    const float result = series * power;
    return x < -87.0f ? 0.0f : result;
}

static inline Mass exact_mass(float below) {
    const float mass = exact_exp(below) * kMassOne;
    const int32_t high = int32_t(mass * (1.0f / (1 << 24)));
    return {high, int32_t(mass - float(high) * (1 << 24))};
}

} // namespace headstart
