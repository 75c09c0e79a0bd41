// What is done to one row at a time: norms, rotation, activations.

#pragma once

#include <cmath>

#include "simd.h"

namespace triptych {

// out = x / rms(x) * weight; out(i) is the place of the 16 elements from i on
template <class T, class Out>
void rms_norm(const T* x, const T* weight, long size, float eps, const Out& out) {
    __m512 sum = _mm512_setzero_ps();
    for (long i = 0; i < size; i += LANES) {
        const __m512 v = Number<T>::load(first_lanes(size - i), x + i);
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    const __m512 inverse = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / size + eps));
    for (long i = 0; i < size; i += LANES) {
        const __mmask16 mask = first_lanes(size - i);
        const __m512 v = _mm512_mul_ps(Number<T>::load(mask, x + i), inverse);
        Number<T>::store(mask, out(i), _mm512_mul_ps(v, Number<T>::load(mask, weight + i)));
    }
}

// out = (x - mean) / deviation * weight + bias; out as above
template <class T, class Out>
void layer_norm(const T* x, const T* weight, const T* bias, long size, float eps, const Out& out) {
    __m512 sum = _mm512_setzero_ps();
    for (long i = 0; i < size; i += LANES) sum = _mm512_add_ps(sum, Number<T>::load(first_lanes(size - i), x + i));
    const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / size);
    sum = _mm512_setzero_ps();
    for (long i = 0; i < size; i += LANES) {
        const __mmask16 mask = first_lanes(size - i);
        const __m512 v = _mm512_maskz_sub_ps(mask, Number<T>::load(mask, x + i), mean);
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    const __m512 inverse = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / size + eps));
    for (long i = 0; i < size; i += LANES) {
        const __mmask16 mask = first_lanes(size - i);
        const __m512 v = _mm512_mul_ps(_mm512_sub_ps(Number<T>::load(mask, x + i), mean), inverse);
        Number<T>::store(mask, out(i),
                         _mm512_fmadd_ps(v, Number<T>::load(mask, weight + i), Number<T>::load(mask, bias + i)));
    }
}

// One head, its halves rotated against each other by the row's angles; cos and sin [head_dim]. `out` may be `head`.
template <class T>
void rotate(const T* head, const float* cos, const float* sin, long head_dim, T* out) {
    const long half = head_dim / 2;
    for (long i = 0; i < half; i += LANES) {
        const __mmask16 mask = first_lanes(half - i);
        const __m512 a = Number<T>::load(mask, head + i), b = Number<T>::load(mask, head + half + i);
        const __m512 low = _mm512_fmsub_ps(a, _mm512_maskz_loadu_ps(mask, cos + i),
                                           _mm512_mul_ps(b, _mm512_maskz_loadu_ps(mask, sin + i)));
        const __m512 high = _mm512_fmadd_ps(b, _mm512_maskz_loadu_ps(mask, cos + half + i),
                                            _mm512_mul_ps(a, _mm512_maskz_loadu_ps(mask, sin + half + i)));
        Number<T>::store(mask, out + i, low);
        Number<T>::store(mask, out + half + i, high);
    }
}

// x / (1 + e^-y)
template <class T>
inline __m512 times_sigmoid(__m512 x, __m512 y) {
    // Far out e^-y is as good as 2^126, and stays finite.
    const __m512 power = _mm512_min_ps(_mm512_mul_ps(y, _mm512_set1_ps(-LOG2_E)), _mm512_set1_ps(126.0f));
    const __m512 below = _mm512_add_ps(_mm512_set1_ps(1.0f), exp2<T>(power));
    if constexpr (sizeof(T) == 4) return _mm512_div_ps(x, below);
    return _mm512_mul_ps(x, _mm512_rcp14_ps(below));
}

template <class T>
inline __m512 silu(__m512 x) {
    return times_sigmoid<T>(x, x);
}

// 0.5 x (1 + tanh(y)) = x sigmoid(2 y), y = sqrt(2 / pi) (x + 0.044715 x^3)
template <class T>
inline __m512 gelu_tanh(__m512 x) {
    const __m512 inner = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f * 1.5957691216f),
                                         _mm512_set1_ps(1.5957691216f));
    return times_sigmoid<T>(x, _mm512_mul_ps(inner, x));
}

}  // namespace triptych
