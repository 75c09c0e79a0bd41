// The largest of a row's logits without most of the head's products, and yet exactly.
//
// Beside the packed head lies a copy of 8 bits a weight: half the bytes to read, and products of four inputs at once. What
// they give is off by no more than the lengths of what was rounded away allow (Cauchy and Schwarz):
//
//     x w = s t (p q) + (x - s p) w + s p (w - t q)      |x w - s t (p q)| <= |x - s p| |w| + |s p| |w - t q|
//
// with x = s p and w = t q but for rounding, p and q whole numbers up to 127. That bounds each logit from above. What is not
// below the best logit known so far is computed from the head's own weights, as the head does, bit for bit.
//
// A few large inputs would make the steps of all others coarse. Both sides are therefore turned before they are rounded,
// by the same reflections (Hadamard's), which leave products as they are, but for a factor, and spread what is large.

#pragma once

#include <algorithm>
#include <cmath>

#include "gemm.h"
#include "parallel.h"
#include "scratch.h"
#include "simd.h"

namespace triptych {

// [num_outputs / 16, num_inputs / 4, 16, 4] whole numbers plus 128, and of each output its step, its length and the
// length of what was rounded away. `num_inputs` is a multiple of 16; outputs are filled up to one.
struct Rounded {
    uint8_t* panels;
    float *steps, *lengths, *errors;
    int64_t num_outputs, num_inputs;

    long num_vectors() const { return (num_outputs + LANES - 1) / LANES; }
};

struct RoundedRow {
    float step, length, error;
};

constexpr float ROUND_UP = 1.0001f;  // more than the rounding of what bounds are computed with
constexpr float LARGEST = 1e37f;      // above it, sums may overflow
constexpr float LEAST = 1e-30f;      // below it, products are lost: so much is added to each bound

// Vectors that are mixed with each other: a power of two, so many times that they fill a row.
inline long block_of(long size) { return size / LANES & -(size / LANES); }

// Every sum and difference of two vectors of a block, again and again. Products of what was turned are `block_of` times as
// large as before.
inline void turn(float* x, long size) {
    const long count = size / LANES, block = block_of(size);
    for (long reach = 1; reach < block; reach *= 2)
        for (long i = 0; i < count; ++i) {
            if (i & reach) continue;
            float *a = x + i * LANES, *b = a + reach * LANES;
            const __m512 left = _mm512_loadu_ps(a), right = _mm512_loadu_ps(b);
            _mm512_storeu_ps(a, _mm512_add_ps(left, right));
            _mm512_storeu_ps(b, _mm512_sub_ps(left, right));
        }
}

// x [size] turned, then rounded to `out`. What is not finite has a length that is not.
template <class T>
RoundedRow round_row(const T* x, long size, float* turned, int8_t* out) {
    for (long i = 0; i < size; i += LANES) _mm512_storeu_ps(turned + i, Number<T>::load(x + i));
    turn(turned, size);
    __m512 largest = _mm512_setzero_ps(), length = _mm512_setzero_ps(), error = _mm512_setzero_ps();
    for (long i = 0; i < size; i += LANES)
        largest = _mm512_max_ps(largest, _mm512_abs_ps(_mm512_loadu_ps(turned + i)));
    const float most = _mm512_reduce_max_ps(largest);
    if (most <= LEAST) {
        std::memset(out, 0, size);
        return {0, most * size, most * size};
    }
    const float step = most / 127;
    const __m512 per_step = _mm512_set1_ps(1 / step);
    for (long i = 0; i < size; i += LANES) {
        const __m512 v = _mm512_loadu_ps(turned + i), in_steps = _mm512_mul_ps(v, per_step);
        const __m512i whole = _mm512_cvtps_epi32(in_steps);
        const __m512 rest = _mm512_mul_ps(_mm512_fnmadd_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(step), v), per_step);
        length = _mm512_fmadd_ps(in_steps, in_steps, length);
        error = _mm512_fmadd_ps(rest, rest, error);
        _mm_storeu_si128((__m128i*)(out + i), _mm512_cvtsepi32_epi8(whole));
    }
    return {step, ROUND_UP * step * std::sqrt(_mm512_reduce_add_ps(length)),
            ROUND_UP * step * std::sqrt(_mm512_reduce_add_ps(error))};
}

// `weight` row-major [n, k].
template <class T>
void round_weight(const T* weight, const Rounded& rounded) {
    const long size = rounded.num_inputs;
    std::memset(rounded.panels, 0, rounded.num_vectors() * LANES * size);
#pragma omp parallel num_threads(num_threads())
    {
        Scratch memory;
        float* turned = memory.take<float>(2 * size);
        int8_t* row = (int8_t*)(turned + size);
#pragma omp for
        for (long c = 0; c < rounded.num_outputs; ++c) {
            const RoundedRow result = round_row(weight + c * size, size, turned, row);
            uint8_t* out = rounded.panels + c / LANES * LANES * size + c % LANES * 4;
            for (long k = 0; k < size; ++k) out[k / 4 * 4 * LANES + k % 4] = (uint8_t)(row[k] + 128);
            rounded.steps[c] = result.step;
            rounded.lengths[c] = result.length;
            rounded.errors[c] = result.error;
        }
    }
}

constexpr int ROUNDED_ROWS = 16;  // at most, whose sums are in registers at once
constexpr long ROUNDED_PIECE = 8;  // vectors that all rows are multiplied by before the next ones: they stay in the second cache

struct AskedRow {
    float step;
    float error, length;  // that weights' lengths and errors are multiplied by
    int32_t offset;       // of its sums: weights are 128 too large
};

// sums += weights * input, four products a lane, the same four inputs in all. Written out: of the intrinsic in a loop,
// compilers make two copies of the sums beside each product.
inline void add_products(__m512i& sums, __m512i weights, const int32_t& input) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(weights), "m"(input));
}

// Of each vector of 16 outputs the largest upper bound, for MR rows: [MR, stride]. Inputs [k / 4, MR, 4].
template <int MR>
void bound_logits(const Rounded& weight, const int32_t* inputs, const AskedRow* rows, long first, long end,
                  float* upper, long stride) {
    const long num_steps = weight.num_inputs / 4;
    for (long v = first; v < end; ++v) {
        const uint8_t* panel = weight.panels + v * LANES * weight.num_inputs;
        __m512i sums[MR];
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) sums[i] = _mm512_setzero_si512();
        for (long k = 0; k < num_steps; ++k) {
            const __m512i column = _mm512_loadu_si512(panel + k * 4 * LANES);
#pragma GCC unroll 16
            for (int i = 0; i < MR; ++i) add_products(sums[i], column, inputs[k * MR + i]);
        }
        const __mmask16 lanes = first_lanes(weight.num_outputs - v * LANES);
        const __m512 steps = _mm512_loadu_ps(weight.steps + v * LANES);
        const __m512 lengths = _mm512_loadu_ps(weight.lengths + v * LANES);
        const __m512 errors = _mm512_loadu_ps(weight.errors + v * LANES);
#pragma GCC unroll 16  // for the sums to stay in registers
        for (int i = 0; i < MR; ++i) {
            const AskedRow& row = rows[i];
            const __m512 sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[i], _mm512_set1_epi32(row.offset)));
            const __m512 about = _mm512_mul_ps(sum, _mm512_mul_ps(steps, _mm512_set1_ps(row.step)));
            const __m512 off = _mm512_fmadd_ps(
                lengths, _mm512_set1_ps(row.error),
                _mm512_fmadd_ps(errors, _mm512_set1_ps(row.length), _mm512_set1_ps(LEAST)));
            const __m512 bound = _mm512_mask_add_ps(_mm512_set1_ps(-INFINITY), lanes, about, off);
            upper[i * stride + v] = _mm512_reduce_max_ps(bound);
        }
    }
}

// The logits of 16 outputs from v * 16 on, as `linear_to` has them.
template <class T>
inline __m512 logits_of(const T* x, const Weight<T>& head, long v) {
    __m512 sums[1][1] = {{_mm512_setzero_ps()}};
    const T* const columns[1] = {head.panel(v * LANES / PANEL) + head.place(v * LANES % PANEL, 0)};
    multiply<T, 1, 1>(sums, x, 0, columns, PANEL * Number<T>::step, head.num_steps());
    return sums[0][0];
}

// Of each row [num_inputs] the output whose logit is the largest, the first of equal ones; -1 if more than `most` vectors
// of 16 might have it, or numbers are too large or none at all. Returns how many vectors' logits were computed for that.
// Not for weights in tiles, whose sums have another order.
template <class T>
long find_likeliest(const Rounded& rounded, const Weight<T>& head, const T* x, long num_rows, long most,
                    int64_t* tokens) {
    static thread_local Scratch of_inputs, of_rows, of_bounds;
    const long size = rounded.num_inputs, num_vectors = rounded.num_vectors();
    float* turned = of_inputs.take<float>(size + (num_rows + 1) * size / 4);
    int8_t* row_inputs = (int8_t*)(turned + size);
    int32_t* inputs = (int32_t*)(row_inputs + size);
    AskedRow* rows = of_rows.take<AskedRow>(num_rows);
    float* upper = of_bounds.take<float>(num_rows * num_vectors);
    // Sums of floats, here and in the head, are off by no more than this times both lengths.
    const float unsure = (2 * size + 64) * 0x1p-24f;
    const float scale = 1.0f / block_of(size);
    // Rows that are multiplied at once, about as many in each group.
    const long num_groups = (num_rows + ROUNDED_ROWS - 1) / ROUNDED_ROWS;
    const auto group = [&](long g) { return num_rows * g / num_groups; };
    for (long g = 0; g < num_groups; ++g) {
        const long first = group(g), count = group(g + 1) - first;
        for (long row = first; row < first + count; ++row) {
            const RoundedRow result = round_row(x + row * size, size, turned, row_inputs);
            int32_t sum = 0;
            for (long k = 0; k < size; ++k) sum += row_inputs[k];
            rows[row] = {scale * result.step, scale * ROUND_UP * (result.error + unsure * result.length),
                         scale * ROUND_UP * (result.length + result.error), 128 * sum};
            for (long k = 0; k < size / 4; ++k)
                std::memcpy(inputs + first * size / 4 + k * count + row - first, row_inputs + 4 * k, 4);
        }
    }
    for_each_part(num_vectors, [&](long first_vector, long end_vector) {
        for (long v = first_vector; v < end_vector; v += ROUNDED_PIECE)
            for (long g = 0; g < num_groups; ++g) {
                const long first = group(g);
                with_count<ROUNDED_ROWS>(group(g + 1) - first, [&](auto count) {
                    bound_logits<decltype(count)::value>(rounded, inputs + first * size / 4, rows + first, v,
                                                         std::min(v + ROUNDED_PIECE, end_vector),
                                                         upper + first * num_vectors, num_vectors);
                });
            }
    });
    // What is not a number, or infinite, stays so in a sum. Where lengths' products are small, no product overflows.
    __m512 lengths = _mm512_setzero_ps();
    for (long v = 0; v < num_vectors; ++v) lengths = _mm512_add_ps(lengths, _mm512_loadu_ps(rounded.lengths + v * LANES));
    const float total_length = _mm512_reduce_add_ps(lengths);
    long num_asked = 0;
    for_each(num_rows, [&](long row) {
        tokens[row] = -1;
        if (!(rows[row].length * total_length < LARGEST)) return;
        const float* bounds = upper + row * num_vectors;
        float largest = -INFINITY;
        int64_t token = -1;
        long asked = 0;
        const auto ask = [&](long v) {
            const __m512 logits = logits_of(x + row * size, head, v);
            const __mmask16 lanes = first_lanes(rounded.num_outputs - v * LANES);
            const float here = _mm512_mask_reduce_max_ps(lanes, logits);
            const long which = __builtin_ctz(_mm512_mask_cmpeq_ps_mask(lanes, logits, _mm512_set1_ps(here)));
            if (here > largest || (here == largest && v * LANES < token)) token = v * LANES + which;
            largest = std::max(largest, here);
            ++asked;
        };
        // The most promising one first: what is below its logit need not be asked.
        const long promising = std::max_element(bounds, bounds + num_vectors) - bounds;
        ask(promising);
        for (long v = 0; v < num_vectors && asked <= most; ++v)
            if (bounds[v] >= largest && v != promising) ask(v);
        if (asked <= most) tokens[row] = token;
#pragma omp atomic
        num_asked += asked;
    });
    return num_asked;
}

}  // namespace triptych
