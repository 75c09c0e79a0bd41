// One decoder layer and one block of a vision tower, whole: a call a layer from Python.

#pragma once

#include "attention.h"
#include "gemm.h"
#include "rows.h"
#include "scratch.h"

namespace triptych {

enum Activation : int64_t { NONE = 0, SILU = 1, GELU_TANH = 2 };

// A packed linear layer; `bias` [num_outputs] may be null.
struct Linear {
    const void* panels;
    const void* bias;
    int64_t num_outputs;
    int64_t num_inputs;
};

struct DecoderLayer {
    Linear query, key_value, output;  // key_value: all heads' keys, then all heads' values
    Linear gate_up;                   // outputs in blocks of 32 gates and 32 ups; zeros where there are fewer
    Linear down;
    const void *input_norm, *output_norm;  // [hidden]
    const void *query_norm, *key_norm;     // [head_dim], or null
    int64_t hidden, num_heads, num_kv_heads, head_dim, intermediate;
    double norm_eps, scale;
};

// Rows of one sequence that attend: tokens `context` to `context + num_rows` of it.
struct Query {
    int64_t first_row, num_rows, context, first_block;  // first_block: its place in `block_table`
};

// The packed rows of a step. KV block b of this layer begins at kv + b * block_stride: keys, then values, each
// [KV heads, tiles of a block, TILE * head_dim].
struct Step {
    const float *cos, *sin;  // [num_rows, head_dim]
    const int64_t* slots;    // [num_rows], block * block_size + offset
    const Query* queries;
    const int64_t* block_table;
    const int64_t* selected;  // rows that go on after the keys and values are stored; null: all of them
    int64_t num_rows, num_queries, num_selected;
    int64_t block_size, block_stride;
};

struct VisionBlock {
    Linear qkv, projection;
    Linear up;  // or gates and ups in blocks of 32, where `gated`
    Linear down;
    const void *norm1_weight, *norm1_bias, *norm2_weight, *norm2_bias;  // without biases: RMS norms
    int64_t hidden, num_heads, head_dim, intermediate, gated, activation;
    double norm_eps, scale;
};

struct Buffers {
    Scratch normed, projected, queries, attended, hidden;
};

inline Buffers& buffers() {
    static thread_local Buffers buffers;
    return buffers;
}

inline Scratch& thread_scratch() {
    static thread_local Scratch scratch;
    return scratch;
}

// -- linear layers ----------------------------------------------------------------------------------------------------

template <class Finish>
void linear_tiled(const Rows<bf16>& x, long num_rows, const Weight<bf16>& weight, const Finish& finish) {
    // Several threads take a few panels at a time, because one of them may be much slower than the others for a while; if
    // none is, all take equally many.
    const long num_panels = weight.num_panels();
    const bool are_equal = num_panels % (TILED_PANELS * num_threads()) == 0;
    const long together = num_threads() == 1 ? num_panels : are_equal ? TILED_PANELS : TILED_PANELS / 2;
    for_each((num_panels + together - 1) / together, [&](long task) {
        const long first = task * together, end = std::min(num_panels, first + together);
        float* sums = thread_scratch().take<float>(tiled_sums(num_rows));
        multiply_panels_tiled(x, num_rows, weight, first, end, sums, finish);
        _mm_sfence();  // before another thread reads what was streamed
    });
}

template <class T, class Expect, class Finish>
void linear(const Rows<T>& x, long num_rows, const Linear& layer, const Expect& expect, const Finish& finish) {
    const Weight<T> weight{static_cast<const T*>(layer.panels), layer.num_outputs, layer.num_inputs};
    if constexpr (sizeof(T) == sizeof(bf16)) {
        if (x.stride) return linear_tiled(x, num_rows, weight, finish);
    }
    for_each_part(weight.num_panels(), [&](long first, long end) {
        float* partial = thread_scratch().take<float>(num_rows * PANEL);
        multiply_panels(x, num_rows, weight, first, end, partial, expect, finish);
    });
}

template <class T>
void copy_row(const T* x, long row, const Rows<T>& out) {
    for (long i = 0; i < out.width; i += LANES) {
        const __mmask16 mask = first_lanes(out.width - i);
        Number<T>::store(mask, out.at(row, i), Number<T>::load(mask, x + i));
    }
}

template <class T>
inline __m512 biased(__m512 sum, const Linear& layer, __mmask16 mask, long column) {
    if (layer.bias == nullptr) return sum;
    return _mm512_add_ps(sum, Number<T>::load(mask, static_cast<const T*>(layer.bias) + column));
}

// The outputs of a panel, WIDTH of them, on their way before they are written.
template <class T, long WIDTH>
struct Expected {
    const Rows<T>& out;

    void operator()(long row, long panel) const {
        constexpr long LINE = 64 / sizeof(T);
        for (long column = panel * WIDTH; column < panel * WIDTH + WIDTH; column += LINE)
            _mm_prefetch((const char*)out.at(row, column), _MM_HINT_T0);
    }
};

// `count` vectors of a row, from `column` on.
template <class T>
inline void store_row(const Rows<T>& out, long row, long column, const __m512* values, int count) {
    if constexpr (sizeof(T) == sizeof(bf16)) {
        if (out.streamed && column + count * LANES <= out.width) {
            for (int j = 0; j < count; j += 2) {
                const __m512i low = _mm512_castsi256_si512(Number<T>::narrow(values[j]));
                _mm512_stream_si512((__m512i*)out.at(row, column + j * LANES),
                                    _mm512_inserti64x4(low, Number<T>::narrow(values[j + 1]), 1));
            }
            return;
        }
    }
    for (int j = 0; j < count; ++j) {
        const __mmask16 mask = first_lanes(out.width - column - j * LANES);
        if (mask) Number<T>::store(mask, out.at(row, column + j * LANES), values[j]);
    }
}

template <class T, class Out>
void linear_to(const Rows<T>& x, long num_rows, const Linear& layer, Activation activation, const Rows<Out>& out) {
    linear(x, num_rows, layer, Expected<Out, PANEL>{out}, [&](long row, long panel, const __m512* sums) {
        __m512 values[VECTORS];
        for (int j = 0; j < VECTORS; ++j) {
            const long column = panel * PANEL + j * LANES;
            values[j] = biased<T>(sums[j], layer, first_lanes(layer.num_outputs - column), column);
            if (activation == SILU) values[j] = silu<T>(values[j]);
            if (activation == GELU_TANH) values[j] = gelu_tanh<T>(values[j]);
        }
        store_row(out, row, panel * PANEL, values, VECTORS);
    });
}

template <class T>
void linear_added(const Rows<T>& x, long num_rows, const Linear& layer, T* sum) {
    const Rows<T> out{sum, layer.num_outputs, 0};
    linear(x, num_rows, layer, Expected<T, PANEL>{out}, [&](long row, long panel, const __m512* sums) {
        __m512 values[VECTORS];
        for (int j = 0; j < VECTORS; ++j) {
            const long column = panel * PANEL + j * LANES;
            const __mmask16 mask = first_lanes(layer.num_outputs - column);
            const __m512 before = Number<T>::load(mask, out.at(row, mask ? column : 0));
            values[j] = _mm512_add_ps(biased<T>(sums[j], layer, mask, column), before);
        }
        store_row(out, row, panel * PANEL, values, VECTORS);
    });
}

// out [num_rows, intermediate] = silu(gate) * up
template <class T>
void gated(const Rows<T>& x, long num_rows, const Linear& layer, const Rows<T>& out) {
    linear(x, num_rows, layer, Expected<T, PANEL / 2>{out}, [&](long row, long panel, const __m512* sums) {
        __m512 values[VECTORS / 2];
        for (int j = 0; j < VECTORS / 2; ++j) {
            const long place = panel * PANEL + j * LANES;
            const __m512 gate = biased<T>(sums[j], layer, 0xffff, place);
            const __m512 up = biased<T>(sums[j + VECTORS / 2], layer, 0xffff, place + PANEL / 2);
            values[j] = _mm512_mul_ps(silu<T>(gate), up);
        }
        store_row(out, row, panel * (PANEL / 2), values, VECTORS / 2);
    });
}

constexpr long ROWS_AHEAD = 8;  // whose elements are on their way from farther memory while one row is worked on

// -- decoder layer ----------------------------------------------------------------------------------------------------

// Where the keys of a head lie in a block; its values lie all heads further.
template <class T>
struct KVPlace {
    T* layer;
    long block_stride, block_size, num_kv_heads, head_dim;

    T* keys(long block, long head) const { return layer + block * block_stride + head * block_size * head_dim; }
    T* values(long block, long head) const { return keys(block, head + num_kv_heads); }
    bool in_pairs() const { return block_size % (2 * TILE) == 0; }
};

template <class T>
void store_kv(const DecoderLayer& layer, const Step& step, const T* key_value, const KVPlace<T>& kv) {
    const long D = layer.head_dim, width = 2 * layer.num_kv_heads * D;
    for_each(layer.num_kv_heads, [&](long head) {
        T key[1024];
        for (long row = 0; row < step.num_rows; ++row) {
            const T* source = key_value + row * width + head * D;
            if (row + ROWS_AHEAD < step.num_rows) {
                prefetch_row(source + ROWS_AHEAD * width, D);
                prefetch_row(source + ROWS_AHEAD * width + layer.num_kv_heads * D, D);
            }
            if (layer.key_norm)
                rms_norm(source, static_cast<const T*>(layer.key_norm), D, layer.norm_eps,
                         [&](long d) { return key + d; });
            rotate(layer.key_norm ? key : source, step.cos + row * D, step.sin + row * D, D, key);
            const long block = step.slots[row] / step.block_size, offset = step.slots[row] % step.block_size;
            const long tile = offset / TILE * TILE * D;
            store_key(key, D, offset % TILE, kv.keys(block, head) + tile);
            store_value(source + layer.num_kv_heads * D, D, offset, kv.in_pairs(), kv.values(block, head) + tile);
        }
    });
}

// Query rows [n, heads, D] normed, rotated and regrouped as [KV heads, n, heads of one, D].
template <class T>
void prepare_queries(const DecoderLayer& layer, const Step& step, long n, const T* projected, T* queries) {
    const long D = layer.head_dim, group = layer.num_heads / layer.num_kv_heads;
    for_each_part(n, [&](long first, long end) {
        for (long i = first; i < end; ++i) {
            const long row = step.selected ? step.selected[i] : i;
            for (long head = 0; head < layer.num_heads; ++head) {
                const T* source = projected + (i * layer.num_heads + head) * D;
                T* target = queries + ((head / group * n + i) * group + head % group) * D;
                if (layer.query_norm)
                    rms_norm(source, static_cast<const T*>(layer.query_norm), D, layer.norm_eps,
                             [&](long d) { return target + d; });
                rotate(layer.query_norm ? target : source, step.cos + row * D, step.sin + row * D, D, target);
            }
        }
    });
}

// attended [n, heads, D]
template <class T>
void attend_blocks(const DecoderLayer& layer, const Step& step, long n, const T* queries, const KVPlace<T>& kv,
                   const Rows<T>& attended) {
    const long D = layer.head_dim, group = layer.num_heads / layer.num_kv_heads, tiles_a_block = step.block_size / TILE;
    const long num_tasks = step.num_queries * layer.num_kv_heads;
    const auto query_of = [&](long task) -> const Query& { return step.queries[task / layer.num_kv_heads]; };
    const auto tiles_of = [&](const Query& query) { return (query.context + query.num_rows + TILE - 1) / TILE; };
    const auto keys_of = [&](long task, long t) {
        const long block = step.block_table[query_of(task).first_block + t / tiles_a_block];
        return kv.keys(block, task % layer.num_kv_heads) + t % tiles_a_block * TILE * D;
    };
    const long values_apart = layer.num_kv_heads * step.block_size * D;  // of the keys of the same tokens
    for_each(num_tasks, [&](long task) {
        const Query& query = query_of(task);
        const long head = task % layer.num_kv_heads, num_tiles = tiles_of(query);
        const size_t pointer_floats = 2 * num_tiles * sizeof(T*) / sizeof(float);
        float* memory = thread_scratch().take<float>(pointer_floats + LANES + Attention<T>::scratch_floats(D));
        const T** keys = reinterpret_cast<const T**>(memory);
        const T** values = keys + num_tiles;
        for (long t = 0; t < num_tiles; ++t) {
            keys[t] = keys_of(task, t);
            values[t] = keys[t] + values_apart;
        }
        const long later = std::min(task + 1, num_tasks - 1);
        const Tiles<T> tiles{keys, values, kv.in_pairs(),
                             {keys_of(later, 0), keys_of(later, std::min(1L, tiles_of(query_of(later)) - 1))}};
        Attention<T> attention(D, layer.scale, memory + (pointer_floats + LANES - 1) / LANES * LANES);
        const long num_rows = query.num_rows * group;
        const T* rows = queries + (head * n + query.first_row) * group * D;
        const long most = Attention<T>::most_queries(D);
        for (long first = 0; first < num_rows; first += most) {
            const long count = std::min(most, num_rows - first);
            attention.attend(
                rows + first * D, count, tiles,
                [&](long i) { return query.context + (first + i) / group + 1; },
                [&](long i, long d) {
                    const long row = query.first_row + (first + i) / group;
                    return attended.at(row, (head * group + (first + i) % group) * D + d);
                });
        }
    });
}

template <class T>
void norm_rows(const T* x, long num_rows, const void* weight, const void* bias, float eps, const Rows<T>& out) {
    const long size = out.width;
    for_each_part(num_rows, [&](long first, long end) {
        for (long row = first; row < end; ++row) {
            const auto place = [&](long column) { return out.at(row, column); };
            if (bias) {
                layer_norm(x + row * size, static_cast<const T*>(weight), static_cast<const T*>(bias), size, eps, place);
            } else {
                rms_norm(x + row * size, static_cast<const T*>(weight), size, eps, place);
            }
        }
    });
}

// The selected rows, in any order, become the first rows; `copy` has room for them.
template <class T>
void select_rows(const int64_t* selected, long num_selected, long size, T* rows, T* copy) {
    for (long i = 0; i < num_selected; ++i)
        std::memcpy((void*)(copy + i * size), rows + selected[i] * size, size * sizeof(T));
    std::memcpy((void*)rows, copy, num_selected * size * sizeof(T));
}

// hidden [num_rows, hidden] -> hidden, of which the first num_selected rows count where rows are selected.
template <class T>
void decoder_layer(const DecoderLayer& layer, const Step& step, T* kv_layer, T* hidden) {
    const long n = step.selected ? step.num_selected : step.num_rows;
    const long heads_width = layer.num_heads * layer.head_dim, kv_width = 2 * layer.num_kv_heads * layer.head_dim;
    const KVPlace<T> kv{kv_layer, step.block_stride, step.block_size, layer.num_kv_heads, layer.head_dim};
    Buffers& b = buffers();
    Rows<T> normed = Rows<T>::make(b.normed, step.num_rows, layer.hidden);

    norm_rows(hidden, step.num_rows, layer.input_norm, nullptr, layer.norm_eps, normed);
    Rows<T> projected = Rows<T>::make_plain(b.projected, step.num_rows, kv_width);
    linear_to(normed, step.num_rows, layer.key_value, NONE, projected);
    store_kv(layer, step, projected.data, kv);
    if (n == 0) return;
    if (step.selected) {
        select_rows(step.selected, n, layer.hidden, hidden, b.hidden.take<T>(n * layer.hidden));
        normed = Rows<T>::make(b.normed, n, layer.hidden);
        norm_rows(hidden, n, layer.input_norm, nullptr, layer.norm_eps, normed);
    }
    T* queries = b.queries.take<T>(n * heads_width);
    const Rows<T> attended = Rows<T>::make(b.attended, n, heads_width);
    projected = Rows<T>::make_plain(b.projected, n, heads_width);
    linear_to(normed, n, layer.query, NONE, projected);
    prepare_queries(layer, step, n, projected.data, queries);
    attend_blocks(layer, step, n, queries, kv, attended);
    linear_added(attended, n, layer.output, hidden);

    const Rows<T> inner = Rows<T>::make(b.hidden, n, layer.intermediate);
    norm_rows(hidden, n, layer.output_norm, nullptr, layer.norm_eps, normed);
    gated(normed, n, layer.gate_up, inner);
    linear_added(inner, n, layer.down, hidden);
}

// -- vision block -----------------------------------------------------------------------------------------------------

// One head of rows [first, end): its keys and values go into tiles, its queries are rotated, all rows see each other.
template <class T>
void attend_window(const VisionBlock& block, const float* cos, const float* sin, const T* qkv, long first, long end,
                   long head, const Rows<T>& attended) {
    const long D = block.head_dim, width = block.num_heads * D, n = end - first;
    const long num_tiles = (n + 2 * TILE - 1) / (2 * TILE) * 2, tile_size = TILE * D;  // in pairs
    const size_t pointer_floats = 2 * num_tiles * sizeof(T*) / sizeof(float);
    const size_t tiles_floats = (2 * num_tiles * tile_size + n * D + D) * sizeof(T) / sizeof(float);
    float* memory = thread_scratch().take<float>(pointer_floats + tiles_floats + 2 * LANES +
                                                 Attention<T>::scratch_floats(D));
    const T** keys = reinterpret_cast<const T**>(memory);
    const T** values = keys + num_tiles;
    T* tiles = reinterpret_cast<T*>(memory + (pointer_floats + LANES - 1) / LANES * LANES);
    T* queries = tiles + 2 * num_tiles * tile_size;
    T* key = queries + n * D;
    for (long t = 0; t < num_tiles; ++t) {
        keys[t] = tiles + t * tile_size;
        values[t] = tiles + (num_tiles + t) * tile_size;
    }
    for (long t = n / TILE; t < num_tiles; ++t) std::memset((void*)keys[t], 0, tile_size * sizeof(T));
    for (long i = 0; i < n; ++i) {
        const T* row = qkv + (first + i) * 3 * width + head * D;
        if (i + ROWS_AHEAD < n)
            for (long part = 0; part < 3; ++part) prefetch_row(row + (ROWS_AHEAD * 3 + part) * width, D);
        const float *row_cos = cos + (first + i) * D, *row_sin = sin + (first + i) * D;
        rotate(row, row_cos, row_sin, D, queries + i * D);
        rotate(row + width, row_cos, row_sin, D, key);
        store_key(key, D, i % TILE, const_cast<T*>(keys[i / TILE]));
        store_value(row + 2 * width, D, i, true, const_cast<T*>(values[i / TILE]));
    }
    const size_t used = pointer_floats + tiles_floats + 2 * LANES - 1;
    Attention<T> attention(D, block.scale, memory + used / LANES * LANES);
    const long most = Attention<T>::most_queries(D);
    for (long from = 0; from < n; from += most) {
        const long count = std::min(most, n - from);
        attention.attend(
            queries + from * D, count, Tiles<T>{keys, values, true, {keys[0], keys[0]}}, [&](long) { return n; },
            [&](long i, long d) { return attended.at(first + from + i, head * D + d); });
    }
}

// hidden [num_rows, hidden] -> hidden; rows [bounds[w], bounds[w + 1]) see each other; cos and sin [num_rows, head_dim].
template <class T>
void vision_block(const VisionBlock& block, const float* cos, const float* sin, const int64_t* bounds,
                  long num_windows, T* hidden) {
    const long num_rows = bounds[num_windows], width = block.num_heads * block.head_dim;
    Buffers& b = buffers();
    const Rows<T> normed = Rows<T>::make(b.normed, num_rows, block.hidden);
    const Rows<T> attended = Rows<T>::make(b.attended, num_rows, width);
    const Rows<T> qkv = Rows<T>::make_plain(b.projected, num_rows, 3 * width);

    norm_rows(hidden, num_rows, block.norm1_weight, block.norm1_bias, block.norm_eps, normed);
    linear_to(normed, num_rows, block.qkv, NONE, qkv);
    for_each(num_windows * block.num_heads, [&](long task) {
        const long window = task / block.num_heads, head = task % block.num_heads;
        attend_window(block, cos, sin, qkv.data, bounds[window], bounds[window + 1], head, attended);
    });
    linear_added(attended, num_rows, block.projection, hidden);

    const Rows<T> inner = Rows<T>::make(b.hidden, num_rows, block.intermediate);
    norm_rows(hidden, num_rows, block.norm2_weight, block.norm2_bias, block.norm_eps, normed);
    if (block.gated) {
        gated(normed, num_rows, block.up, inner);
    } else {
        linear_to(normed, num_rows, block.up, static_cast<Activation>(block.activation), inner);
    }
    linear_added(inner, num_rows, block.down, hidden);
}

// -- a linear layer or a norm of its own --------------------------------------------------------------------------------

template <class T, class Out>
void linear_alone(const Linear& layer, const T* x, long num_rows, Activation activation, Out* out) {
    Rows<T> rows{const_cast<T*>(x), layer.num_inputs, 0};
    if (in_tiles<T>()) {
        rows = Rows<T>::make(buffers().normed, num_rows, layer.num_inputs);
        for_each_part(num_rows, [&](long first, long end) {
            for (long row = first; row < end; ++row) copy_row(x + row * layer.num_inputs, row, rows);
        });
    }
    linear_to(rows, num_rows, layer, activation, Rows<Out>{out, layer.num_outputs, 0});
}

}  // namespace triptych
