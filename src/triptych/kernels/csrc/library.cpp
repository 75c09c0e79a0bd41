// What Python calls, through `kernels/library.py`: plain C, one name for each element type.
//
// Every pointer is the caller's and is used only during the call. Built without a header of Python or torch.

#include "layers.h"
#include "likeliest.h"

using namespace triptych;

#define TRIPTYCH_EXPORT extern "C" __attribute__((visibility("default")))

#define TRIPTYCH_FOR(T, name)                                                                                          \
    TRIPTYCH_EXPORT void triptych_pack_##name(const void* weight, const int64_t* order, int64_t num_outputs,           \
                                              int64_t num_inputs, void* panels) {                                      \
        const T* rows = static_cast<const T*>(weight);                                                                 \
        pack_weight<T>(rows, num_outputs, num_inputs, [=](long i) { return order ? order[i] : i; },                    \
                       static_cast<T*>(panels));                                                                       \
    }                                                                                                                  \
    TRIPTYCH_EXPORT void triptych_linear_##name(const Linear* layer, const void* x, int64_t num_rows,                  \
                                                int64_t activation, void* out) {                                       \
        const Borrowed cores;                                                                                          \
        linear_alone(*layer, static_cast<const T*>(x), num_rows, static_cast<Activation>(activation),                  \
                     static_cast<T*>(out));                                                                            \
    }                                                                                                                  \
    TRIPTYCH_EXPORT void triptych_linear_float_##name(const Linear* layer, const void* x, int64_t num_rows,            \
                                                      float* out) {                                                    \
        const Borrowed cores;                                                                                          \
        linear_alone(*layer, static_cast<const T*>(x), num_rows, NONE, out);                                           \
    }                                                                                                                  \
    TRIPTYCH_EXPORT void triptych_round_##name(const void* weight, const Rounded* rounded) {                           \
        round_weight(static_cast<const T*>(weight), *rounded);                                                         \
    }                                                                                                                  \
    TRIPTYCH_EXPORT int64_t triptych_likeliest_##name(const Rounded* rounded, const Linear* head, const void* x,       \
                                                      int64_t num_rows, int64_t most, int64_t* tokens) {               \
        const Borrowed cores;                                                                                          \
        const Weight<T> weight{static_cast<const T*>(head->panels), head->num_outputs, head->num_inputs};              \
        return find_likeliest(*rounded, weight, static_cast<const T*>(x), num_rows, most, tokens);                     \
    }                                                                                                                  \
    TRIPTYCH_EXPORT void triptych_norm_##name(const void* x, int64_t num_rows, const void* weight, const void* bias,   \
                                              int64_t size, double eps, void* out) {                                   \
        norm_rows(static_cast<const T*>(x), num_rows, weight, bias, eps, Rows<T>{static_cast<T*>(out), size, 0});      \
    }                                                                                                                  \
    TRIPTYCH_EXPORT void triptych_decoder_layer_##name(const DecoderLayer* layer, const Step* step, void* kv,          \
                                                       void* hidden) {                                                 \
        const Borrowed cores;                                                                                          \
        decoder_layer(*layer, *step, static_cast<T*>(kv), static_cast<T*>(hidden));                                    \
    }                                                                                                                  \
    TRIPTYCH_EXPORT void triptych_vision_block_##name(const VisionBlock* block, const float* cos, const float* sin,    \
                                                      const int64_t* bounds, int64_t num_windows, void* hidden) {      \
        const Borrowed cores;                                                                                          \
        vision_block(*block, cos, sin, bounds, num_windows, static_cast<T*>(hidden));                                  \
    }

TRIPTYCH_FOR(float, float32)
TRIPTYCH_FOR(bf16, bfloat16)

TRIPTYCH_EXPORT int64_t triptych_packed_elements(int64_t num_outputs, int64_t num_inputs, int64_t is_bfloat16) {
    return is_bfloat16 ? packed_elements<bf16>(num_outputs, num_inputs) : packed_elements<float>(num_outputs, num_inputs);
}

TRIPTYCH_EXPORT int64_t triptych_in_tiles(int64_t is_bfloat16) {
    return is_bfloat16 ? in_tiles<bf16>() : in_tiles<float>();
}

TRIPTYCH_EXPORT void triptych_set_num_threads(int64_t count) { team().num_own = team().size = static_cast<int>(count); }

// From now on the first MOST_LENT of these `cores` may be borrowed while `uses[core]` says that they are free.
// `borrower` is this worker's number, 2 or more.
TRIPTYCH_EXPORT void triptych_borrow(uint8_t* uses, int64_t borrower, const int64_t* cores, int64_t count) {
    team().uses = uses;
    team().borrower = static_cast<uint8_t>(borrower);
    team().num_lent = static_cast<int>(count < Team::MOST_LENT ? count : Team::MOST_LENT);
    for (int i = 0; i < team().num_lent; ++i) team().lent[i] = static_cast<int>(cores[i]);
}

// Whether bf16 is multiplied in tile registers from now on; they are not used where there are none. Weights that were
// packed before, and keys and values of an earlier step, must not be used after.
TRIPTYCH_EXPORT int64_t triptych_use_tiles(int64_t wanted) {
    uses_tiles() = wanted && may_use_tiles();
    return uses_tiles();
}

// Whether this processor has every instruction that the library was built with.
TRIPTYCH_EXPORT int64_t triptych_supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}
