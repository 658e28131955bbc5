/* The CPU fast path: each operation takes one struct of 8-byte numbers, which native_*.py
 * pack, and follows the PyTorch specification in reference*.py. Plain C99 with the vector
 * extensions of GCC and Clang, and OpenMP where there is one. */
#define EXPORT __attribute__((visibility("default")))
#include "attend_blocks.h"
#include "score_anchors.h"
#include "score_sketches.h"
#include "top_pieces.h"

EXPORT void anchor_exp(float *numbers, int64_t count) {
    for (int64_t i = 0; i + LANES <= count; i += LANES)
        store_floats(numbers + i, exp_of(load_floats(numbers + i)));
}

EXPORT void anchor_log(float *numbers, int64_t count) {
    for (int64_t i = 0; i + LANES <= count; i += LANES)
        store_floats(numbers + i, log_of(load_floats(numbers + i)));
}

EXPORT void anchor_tanh(float *numbers, int64_t count) {
    for (int64_t i = 0; i + LANES <= count; i += LANES)
        store_floats(numbers + i, tanh_of(load_floats(numbers + i)));
}
