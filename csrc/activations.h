// Activation functions (Activation of headstart/kernels/ops.py), based on exp of simd.h.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace headstart::HEADSTART_PATH {

// tanh(x): the polynomial of Cephes' tanhf near 0, else from e^(-2 |x|). NaN stays NaN.
INLINE f32 tanh(f32 x) {
    const f32 size = as_float(as_int(x) & splat_int(0x7fffffff)), square = x * x;
    const f32 power = exp(splat(-2.0f) * size);
    const f32 far = (splat(1.0f) - power) / (splat(1.0f) + power);
    f32 near = splat(-5.70498872745e-3f);
    near = fma(near, square, splat(2.06390887954e-2f));
    near = fma(near, square, splat(-5.37397155531e-2f));
    near = fma(near, square, splat(1.33314422036e-1f));
    near = fma(near, square, splat(-3.33332819422e-1f));
    near = fma(near * square, x, x);
    return select_less(size, splat(0.625f), near, select_less(x, splat(0.0f), splat(0.0f) - far, far));
}

INLINE f32 softcap(f32 x, float cap) { return tanh(x / splat(cap)) * splat(cap); }

// 1 - erf(x) for x >= 0, relative error below 1.2e-7 (Numerical Recipes, erfcc).
INLINE f32 erfc(f32 x) {
    const f32 t = splat(1.0f) / fma(splat(0.5f), x, splat(1.0f));
    f32 y = splat(0.17087277f);
    y = fma(y, t, splat(-0.82215223f));
    y = fma(y, t, splat(1.48851587f));
    y = fma(y, t, splat(-1.13520398f));
    y = fma(y, t, splat(0.27886807f));
    y = fma(y, t, splat(-0.18628806f));
    y = fma(y, t, splat(0.09678418f));
    y = fma(y, t, splat(0.37409196f));
    y = fma(y, t, splat(1.00002368f));
    y = fma(y, t, splat(-1.26551223f));
    return t * exp(y - x * x);
}

// GELU x Phi(x), from the smaller tail; 0 below -14, where |x Phi(x)| < 1e-43.
INLINE f32 gelu(f32 x) {
    const f32 size = as_float(as_int(x) & splat_int(0x7fffffff));
    const f32 tail = splat(0.5f) * size * erfc(min(splat(14.0f), size) * splat(0.70710678f));
    const f32 y = select_less(x, splat(0.0f), splat(0.0f) - tail, x - tail);
    return select_less(x, splat(-14.0f), splat(0.0f), select_less(splat(14.0f), x, x, y));
}

// Tanh GELU: x / 2 (1 + tanh(u)) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3); 0 below -10.
INLINE f32 gelu_tanh(f32 x) {
    const f32 inner = fma(x * x * splat(0.044715f), x, x) * splat(-1.5957691216f);
    const f32 y = x / (splat(1.0f) + exp(min(splat(87.0f), inner)));
    return select_less(x, splat(-10.0f), splat(0.0f), y);
}

INLINE f32 relu(f32 x) { return select_less(x, splat(0.0f), splat(0.0f), x); } // NaN and -0 stay

// Not inlined, to keep the products' code small.
__attribute__((noinline, unused)) static f32 activate_other(f32 x, Activation kind) {
    switch (kind) {
    case Activation::GELU: return gelu(x);
    case Activation::GELU_TANH: return gelu_tanh(x);
    case Activation::RELU: return relu(x);
    case Activation::RELU2: return relu(x) * relu(x);
    case Activation::IDENTITY:
    case Activation::CLAMPED:
    case Activation::SILU_OF_10:
    case Activation::SITU:
    case Activation::SILU_7:
    case Activation::SILU_16: return x; // takes two operands: see gate_mul
    case Activation::SILU: break;
    }
    return silu(x);
}

INLINE f32 activate(f32 x, Activation kind) { return kind == Activation::SILU ? silu(x) : activate_other(x, kind); }

// Clamped SwiGLU of gpt-oss, limit 7. NaN stays NaN (second operand of min and max).
INLINE f32 clamped(f32 x, f32 up) {
    x = min(splat(7.0f), x);
    up = max(splat(-7.0f), min(splat(7.0f), up));
    return x * sigmoid(x * splat(1.702f)) * (up + splat(1.0f));
}

// silu(min(x, 10)) * up, up clamped to +-10 (DeepSeek-V4).
INLINE f32 silu_of_10(f32 x, f32 up) {
    return silu(min(splat(10.0f), x)) * max(splat(-10.0f), min(splat(10.0f), up));
}

// sigmoid(x) * tanh(x) * tanh(up), both tanh scaled to limits of 4 and 25 (Kimi-K3).
INLINE f32 situ(f32 x, f32 up) { return softcap(x, 4.0f) * sigmoid(x) * softcap(up, 25.0f); }

// min(silu(x), limit) * up, up clamped to +-limit. NaN stays NaN.
INLINE f32 limited(f32 x, f32 up, float limit) {
    return min(splat(limit), silu(x)) * max(splat(-limit), min(splat(limit), up));
}

__attribute__((noinline, unused)) static f32 gate_mul_other(f32 x, f32 up, Activation kind) {
    switch (kind) {
    case Activation::CLAMPED: return clamped(x, up);
    case Activation::SILU_7: return limited(x, up, 7.0f);
    case Activation::SILU_16: return limited(x, up, 16.0f);
    case Activation::SILU_OF_10: return silu_of_10(x, up);
    case Activation::SITU: return situ(x, up);
    default: return activate_other(x, kind) * up;
    }
}

// activate(x) * up, or the gated activations that take both.
INLINE f32 gate_mul(f32 x, f32 up, Activation kind) {
    return kind == Activation::SILU ? silu(x) * up : gate_mul_other(x, up, kind);
}

} // namespace headstart::HEADSTART_PATH
