// Vectors of 16 floats, and the two element types that weights and activations have: float and bf16.
//
// `Number<T>` says how T is loaded, stored and multiplied. One k step of a product takes `step` neighbouring elements:
// two of bf16 (vdpbf16ps adds both products to the float accumulator), one of float.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace triptych {

struct bf16 {
    uint16_t bits;
};

constexpr int LANES = 16;

template <class T>
struct Number;

template <>
struct Number<float> {
    static constexpr int step = 1;
    static __m512 load(const float* p) { return _mm512_loadu_ps(p); }
    static __m512 load(__mmask16 mask, const float* p) { return _mm512_maskz_loadu_ps(mask, p); }
    static void store(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
    static void store(__mmask16 mask, float* p, __m512 v) { _mm512_mask_storeu_ps(p, mask, v); }
    static __m512 add_product(__m512 sum, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, sum); }
};

template <>
struct Number<bf16> {
    static constexpr int step = 2;
    static __m512 widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
    static __m512 load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
    static __m512 load(__mmask16 mask, const bf16* p) { return widen(_mm256_maskz_loadu_epi16(mask, p)); }
    static __m256i narrow(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }
    static void store(bf16* p, __m512 v) { _mm256_storeu_si256((__m256i*)p, narrow(v)); }
    static void store(__mmask16 mask, bf16* p, __m512 v) { _mm256_mask_storeu_epi16(p, mask, narrow(v)); }
    static __m512 add_product(__m512 sum, __m512 a, __m512 b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    }
};

// 64 bytes of T as they lie in memory, and one k step of a row in every lane.
template <class T>
inline __m512 load_raw(const T* p) {
    return _mm512_loadu_ps((const float*)p);
}

template <class T>
inline __m512 broadcast_step(const T* p) {
    float pair;
    std::memcpy(&pair, p, 4);
    return _mm512_set1_ps(pair);
}

inline __mmask16 first_lanes(long count) { return count >= LANES ? 0xffff : (__mmask16)((1u << (count > 0 ? count : 0)) - 1); }

// 2^x for finite x; far below the range of floats it is 0. Minimax polynomials on [-1/2, 1/2]: relative error 1e-7 for
// float, and 3e-6 for bf16, which keeps 8 bits.
template <class T>
inline __m512 exp2(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, 0x08);
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 p;
    if constexpr (sizeof(T) == 4) {
        p = _mm512_set1_ps(1.537070481e-4f);
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.339984829e-3f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.618373251e-3f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.550329035e-2f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402264846e-1f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931472056e-1f));
    } else {
        p = _mm512_set1_ps(9.600395517e-3f);
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.591689383e-2f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402371846e-1f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931219948e-1f));
    }
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

constexpr float LOG2_E = 1.44269504f;

// Lane i of the result is the 16 floats of row i, combined in the same order for every row.
template <class Combine>
inline __m512 reduce_rows(const float (&rows)[LANES][LANES], const Combine& combine) {
    __m512 pairs[8], quads[4], eights[2];
    for (int i = 0; i < 8; ++i) {
        const __m512 a = _mm512_load_ps(rows[2 * i]), b = _mm512_load_ps(rows[2 * i + 1]);
        pairs[i] = combine(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    for (int i = 0; i < 4; ++i) {
        const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        quads[i] = combine(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const auto fold = [&](__m512 a, __m512 b) {
        return combine(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    for (int i = 0; i < 2; ++i) eights[i] = fold(quads[2 * i], quads[2 * i + 1]);
    return fold(eights[0], eights[1]);
}

// body(std::integral_constant<int, count>()) for a count in 1..MOST.
template <int MOST, class Body>
inline void with_count(long count, const Body& body) {
    if (count == MOST) {
        body(std::integral_constant<int, MOST>());
    } else if constexpr (MOST > 1) {
        with_count<MOST - 1>(count, body);
    }
}

template <int LINES, _mm_hint HINT = _MM_HINT_T0>
struct Prefetch {
    static constexpr int lines = LINES;
    static constexpr _mm_hint hint = HINT;
};

template <_mm_hint HINT>
using Hint = std::integral_constant<_mm_hint, HINT>;

// The `count` elements at p are read soon. For rows that lie too far from each other for the hardware to see a pattern.
template <class T>
inline void prefetch_row(const T* p, long count) {
    for (long i = 0; i < count; i += 64 / (long)sizeof(T)) _mm_prefetch((const char*)(p + i), _MM_HINT_T0);
}

// sums += rows of `a` times columns of `b`, over `steps` k steps. Row i of `a` begins at a + i * lda; vector j of `b`
// for step k is the 64 bytes at b[j] + k * ldb. Each sum is made in the order of k whatever MR and NR are, so that a
// row's result does not depend on the rows beside it. At each step the next `Ahead::lines` lines from `ahead` on are
// prefetched.
template <class T, int MR, int NR, class Ahead = Prefetch<0>>
inline __attribute__((always_inline)) void multiply(__m512 (&sums)[MR][NR], const T* a, long lda,
                                                    const T* const (&b)[NR], long ldb, long steps,
                                                    const T* ahead = nullptr) {
    for (long k = 0; k < steps; ++k) {
        __m512 column[NR];
#pragma GCC unroll 8
        for (int line = 0; line < Ahead::lines; ++line)
            _mm_prefetch((const char*)ahead + (k * Ahead::lines + line) * 64, Ahead::hint);
#pragma GCC unroll 8
        for (int j = 0; j < NR; ++j) column[j] = load_raw(b[j] + k * ldb);
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
            const __m512 row = broadcast_step(a + i * lda + k * Number<T>::step);
#pragma GCC unroll 8
            for (int j = 0; j < NR; ++j) sums[i][j] = Number<T>::add_product(sums[i][j], row, column[j]);
        }
    }
}

}  // namespace triptych
