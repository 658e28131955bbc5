/* The estimated log mass of every block from its anchors, in any number format. */
#pragma once
#include <stdlib.h>
#include "products.h"

/* Anchors whose products are kept until the blocks they stand for are scored. */
#define ANCHORS_AT_ONCE 64

struct anchor_scoring {
    const char *query, *anchors;
    const float *offsets;
    const float *scales; /* or null */
    float *scores, *means;
    int64_t batch, heads, kv_heads, n_blocks, n_anchors, dim;
    int64_t query_stride[2], anchor_stride[4], offset_stride[4], scale_stride[4];
    int64_t query_type, anchor_type, threads;
    double softcap;
};

/* Scores of `count` blocks of one head: the best anchor, and the mean of all. */
static void score_blocks(const struct anchor_scoring *a, float *restrict logits,
                         const float *restrict offsets, const float *restrict scales,
                         int64_t count, float *restrict scores, float *restrict means) {
    int64_t per_block = a->n_anchors, n_logits = count * per_block;
    float share = 1.0f / per_block;
    for (int64_t i = 0; scales && i < n_logits; i++)
        logits[i] *= scales[i];
    if (per_block == 1)
        memcpy(means, logits, (size_t)count * 4);
    else
        for (int64_t n = 0; n < count; n++) {
            float sum = 0;
            for (int64_t i = 0; i < per_block; i++)
                sum += logits[n * per_block + i];
            means[n] = sum * share;
        }
    for (int64_t i = 0; a->softcap != 0 && i < n_logits; i += LANES)
        store_floats(logits + i, capped(load_floats(logits + i), (float)a->softcap));
    for (int64_t i = 0; i < n_logits; i++)
        logits[i] += offsets[i];
    if (per_block == 1)
        memcpy(scores, logits, (size_t)count * 4);
    else
        for (int64_t n = 0; n < count; n++) {
            float best = logits[n * per_block];
            for (int64_t i = n * per_block + 1; i < (n + 1) * per_block; i++)
                best = best >= logits[i] || best != best ? best : logits[i];
            scores[n] = best;
        }
}

/* One number per anchor of `count` blocks, side by side. */
static void pick(const float *numbers, const int64_t *stride, int64_t b, int64_t kv_head,
                 int64_t first, int64_t count, int64_t per_block, float *to) {
    numbers += b * stride[0] + kv_head * stride[1] + first * stride[2];
    if (stride[2] == per_block && (stride[3] == 1 || per_block == 1))
        memcpy(to, numbers, (size_t)(count * per_block) * 4);
    else
        for (int64_t n = 0; n < count; n++)
            for (int64_t p = 0; p < per_block; p++)
                *to++ = numbers[n * stride[2] + p * stride[3]];
}

/* `count` blocks of one key/value head, from block `first` on. */
INLINE void score_run(const struct anchor_scoring *a, const float *queries, int64_t b,
                      int64_t kv_head, int64_t first, int64_t count, float *scratch, int type) {
    int64_t group = a->heads / a->kv_heads, per_block = a->n_anchors;
    int64_t capacity = padded_to(count * per_block, 16);
    float *offsets = scratch, *scales = offsets + capacity, *products = scales + capacity;
    const char **rows = (const char **)(products + group * capacity);
    const int64_t *stride = a->anchor_stride;
    const char *anchors = a->anchors + (b * stride[0] + kv_head * stride[1]) * size_of(type);
    for (int64_t n = 0, i = 0; n < count; n++)
        for (int64_t p = 0; p < per_block; p++, i++)
            rows[i] = anchors + ((first + n) * stride[2] + p * stride[3]) * size_of(type);
    pick(a->offsets, a->offset_stride, b, kv_head, first, count, per_block, offsets);
    if (a->scales)
        pick(a->scales, a->scale_stride, b, kv_head, first, count, per_block, scales);
    int64_t padded = padded_to(count * per_block, ROWS_AT_ONCE);
    for (int64_t i = count * per_block; i < padded; i++)
        rows[i] = rows[i - 1];
    multiply(rows, NULL, padded, queries, padded_to(a->dim, LANES), a->dim, type, group, products,
             capacity);
    for (int64_t g = 0; g < group; g++) {
        int64_t at = (b * a->heads + kv_head * group + g) * a->n_blocks + first;
        score_blocks(a, products + g * capacity, offsets, a->scales ? scales : NULL, count,
                     a->scores + at, a->means + at);
    }
}

static void score_run_of(const struct anchor_scoring *a, const float *queries, int64_t b,
                         int64_t kv_head, int64_t first, int64_t count, float *scratch) {
    switch (a->anchor_type) {
    case FP32:
        score_run(a, queries, b, kv_head, first, count, scratch, FP32);
        break;
    case BF16:
        score_run(a, queries, b, kv_head, first, count, scratch, BF16);
        break;
    case FP16:
        score_run(a, queries, b, kv_head, first, count, scratch, FP16);
        break;
    default:
        score_run(a, queries, b, kv_head, first, count, scratch, INT8);
    }
}

/* Returns 0, or 1 if there is no memory for it. */
EXPORT int anchor_score_anchors(const struct anchor_scoring *a) {
    int64_t group = a->heads / a->kv_heads, query_stride = padded_to(a->dim, LANES);
    int64_t run = smaller(a->n_blocks, 1 + (ANCHORS_AT_ONCE - 1) / a->n_anchors);
    int64_t n_runs = (a->n_blocks + run - 1) / run, selections = a->batch * a->kv_heads;
    int64_t n_parts = smaller((4 * a->threads + selections - 1) / selections, n_runs);
    int64_t n_items = selections * n_parts;
    int64_t scratch_floats = padded_to(run * a->n_anchors, 16) * (2 + group + 2);
    int64_t n_queries = padded_to(a->batch * a->heads * query_stride, 16);
    float *memory = NULL;
    if (posix_memalign((void **)&memory, 64,
                       (size_t)(n_queries + n_items * scratch_floats) * 4))
        return 1;
    for (int64_t i = 0; i < a->batch * a->heads; i++) {
        int64_t at = i / a->heads * a->query_stride[0] + i % a->heads * a->query_stride[1];
        widen(a->query + at * size_of((int)a->query_type), a->dim, (int)a->query_type, 1,
              memory + i * query_stride);
    }
    int64_t work = selections * a->n_blocks * a->n_anchors * a->dim;
    int threads = work < 1 << 16 ? 1 : (int)a->threads;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t item = 0; item < n_items; item++) {
        int64_t part = item % n_parts, selection = item / n_parts;
        int64_t b = selection / a->kv_heads, kv_head = selection % a->kv_heads;
        const float *queries = memory + (b * a->heads + kv_head * group) * query_stride;
        for (int64_t r = n_runs * part / n_parts; r < n_runs * (part + 1) / n_parts; r++)
            score_run_of(a, queries, b, kv_head, r * run, smaller(run, a->n_blocks - r * run),
                         memory + n_queries + item * scratch_floats);
    }
    free(memory);
    return 0;
}
