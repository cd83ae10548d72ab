// The sampler's loops, compiled for the instruction-set path HEADSTART_PATH (see CMakeLists.txt).
#include "sampling_loops.h"

#include <initializer_list>

#if defined(__SSE2__)
#include <immintrin.h>
#elif HEADSTART_NEON
#include <arm_neon.h>
#endif

#ifndef HEADSTART_PATH
#define HEADSTART_PATH portable
#endif

namespace headstart {
namespace HEADSTART_PATH {
extern const Loops kLoops;
}
namespace {

#if defined(__AVX512F__)
constexpr int kRegister = 64; // bytes of a vector register
#elif defined(__AVX2__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif

template <class Real> bool maxima(const Real* x, int64_t n, Real* result) {
    typedef Real Vector __attribute__((vector_size(kRegister)));
    constexpr int kWidth = kRegister / sizeof(Real);
    decltype(Vector() < Vector()) odd = {};
    bool has_nan = false;
    for (; n >= kBlock; n -= kBlock, x += kBlock) {
        Vector best, next;
        std::memcpy(&best, x, sizeof best);
        odd |= best != best;
        for (int i = kWidth; i < kBlock; i += kWidth) {
            std::memcpy(&next, x + i, sizeof next);
            odd |= next != next;
            best = next > best ? next : best;
        }
        Real lanes[kWidth];
        std::memcpy(lanes, &best, sizeof lanes);
        for (int width = kWidth / 2; width > 0; width /= 2)
            for (int l = 0; l < width; ++l) lanes[l] = lanes[l + width] > lanes[l] ? lanes[l + width] : lanes[l];
        *result++ = lanes[0];
    }
    for (int l = 0; l < kWidth; ++l) has_nan |= odd[l] != 0;
    if (n > 0) {
        Real best = x[0];
        for (int64_t i = 0; i < n; ++i) {
            best = x[i] > best ? x[i] : best;
            has_nan |= x[i] != x[i];
        }
        *result = best;
    }
    return has_nan;
}

template <class Real> void below(const Real* x, int n, double divisor, double best, float* result) {
    if (divisor == 1.0)
        for (int i = 0; i < n; ++i) result[i] = float(double(x[i]) - best);
    else
        for (int i = 0; i < n; ++i) result[i] = float(double(x[i]) / divisor - best);
}

void exps(const float* below, int n, float* result) {
    for (int i = 0; i < n; ++i) result[i] = exact_exp(below[i]);
}

int64_t mass_sum(const float* below, int n) {
    int32_t high = 0, low = 0; // sums of 64 halves below 2^24 fit
    for (int i = 0; i < n; ++i) {
        const Mass mass = exact_mass(below[i]);
        high += mass.high;
        low += mass.low;
    }
    return Mass{high, low}.value();
}

void mass_bins(const float* below, int n, Mass* mass, int32_t* bin) {
    for (int i = 0; i < n; ++i) {
        const float place = below[i] * -kBinsPerNat;
        bin[i] = int32_t(place < kNumBins - 1 ? place : kNumBins - 1);
        mass[i] = exact_mass(below[i]);
    }
}

// Only the low 32 bits of a lane are used.
typedef uint64_t Lanes __attribute__((vector_size(kRegister)));
constexpr int kLanes = kRegister / 8;

#if defined(__AVX512F__)
inline void multiply(const Lanes& a, uint32_t b, Lanes& product) { // masked, because the plain intrinsic makes GCC 12 warn
    product = Lanes(_mm512_maskz_mul_epu32(0xFF, __m512i(a), _mm512_set1_epi64(b)));
}
#elif defined(__AVX2__)
inline void multiply(const Lanes& a, uint32_t b, Lanes& product) {
    product = Lanes(_mm256_mul_epu32(__m256i(a), _mm256_set1_epi64x(b)));
}
#elif defined(__SSE2__)
inline void multiply(const Lanes& a, uint32_t b, Lanes& product) {
    product = Lanes(_mm_mul_epu32(__m128i(a), _mm_set1_epi64x(b)));
}
#elif HEADSTART_NEON
inline void multiply(const Lanes& a, uint32_t b, Lanes& product) {
    product = Lanes(vmull_n_u32(vmovn_u64(uint64x2_t(a)), b));
}
#else
inline void multiply(const Lanes& a, uint32_t b, Lanes& product) { product = (a & 0xFFFFFFFFu) * b; }
#endif

// Words 0 and 1 of 2 * kLanes groups, and words 2 and 3 at offset 2 * kBlock. Two registers at a time hide the latency of
// multiplications.
inline void philox_lanes(const NoiseKey& key, const uint64_t* groups, uint64_t offset, uint32_t* words) {
    Lanes c0[2], c1[2], c2[2], c3[2], k0 = Lanes{} + key.low, k1 = Lanes{} + key.high;
    std::memcpy(c0, groups, sizeof c0);
    for (int i = 0; i < 2; ++i) {
        c0[i] += offset;
        c1[i] = Lanes{} + key.position, c2[i] = Lanes{} + key.choice, c3[i] = Lanes{};
    }
#pragma GCC unroll 10
    for (int round = 0; round < kPhiloxRounds; ++round) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            Lanes p0, p1;
            multiply(c0[i], kPhiloxMultiply0, p0);
            multiply(c2[i], kPhiloxMultiply1, p1);
            c0[i] = (p1 >> 32) ^ (c1[i] ^ k0);
            c2[i] = (p0 >> 32) ^ (c3[i] ^ k1);
            c1[i] = p1;
            c3[i] = p0;
        }
        k0 += kPhiloxWeyl0;
        k1 += kPhiloxWeyl1;
    }
    for (int i = 0; i < 2; ++i) {
        const Lanes first = (c0[i] & 0xFFFFFFFFu) | c1[i] << 32, second = (c2[i] & 0xFFFFFFFFu) | c3[i] << 32;
        std::memcpy(words + 2 * i * kLanes, &first, sizeof first);
        std::memcpy(words + 2 * i * kLanes + 2 * kBlock, &second, sizeof second);
    }
}

bool words(const NoiseKey& key, const uint64_t* groups, int count, uint64_t offset, uint32_t limit,
           uint32_t* result) {
    uint32_t hits = 0;
    for (int start = 0; start < count; start += kGroups) {
        for (int i = start; i < start + kGroups; i += 2 * kLanes) philox_lanes(key, groups + i, offset, result + 2 * i);
        for (const uint32_t* half : {result + 2 * start, result + 2 * start + 2 * kBlock})
            for (int i = 0; i < 2 * kGroups; ++i) hits |= half[i] <= limit;
    }
    return hits != 0;
}

} // namespace

const Loops HEADSTART_PATH::kLoops = {maxima<float>, maxima<double>, below<float>, below<double>,
                                      exps,          mass_sum,       mass_bins,    words};

} // namespace headstart
