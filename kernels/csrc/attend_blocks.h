/* Attention of one query token over chosen blocks: tiles of the tokens that are seen, an online
 * softmax over them, and a merge of the parts into which a head's blocks are divided. */
#pragma once
#include <stdlib.h>
#include "seen_tokens.h"

struct attention {
    const char *query, *keys, *values;
    const int64_t *blocks;
    const int64_t *shifts;  /* or null */
    const uint8_t *visible; /* or null */
    const int64_t *length;  /* or null */
    const float *sinks;     /* or null */
    char *output;
    float *mass;
    int64_t batch, heads, selections, kv_heads, capacity, dim, value_dim;
    int64_t n_blocks, block_size, window;
    int64_t query_stride[2], key_stride[3], value_stride[3], block_stride[3], visible_stride[2];
    int64_t query_type, state_type, threads;
    double scaling, softcap;
};

/* One part of the blocks of one selection, and what it has added up so far, per query head. */
struct part {
    struct reading reading;
    const char *keys, *values;
    const float *queries; /* [heads][padded dim], times the softmax scale */
    int64_t heads;
    float *sums;    /* [heads][padded value_dim], of weighted values */
    float *largest; /* [heads] */
    float *totals;  /* [heads], of weights relative to the largest logit */
    float *weights; /* [heads][TILE], logits at first */
    float *changes; /* [heads], factors of the sums of earlier tiles */
};

static void weigh(struct part *p, int64_t h, int64_t count, float softcap) {
    float *weights = p->weights + h * TILE;
    for (int64_t i = 0; softcap != 0 && i < count; i += LANES)
        store_floats(weights + i, capped(load_floats(weights + i), softcap));
    for (int64_t i = count; i < padded_to(count, LANES); i++)
        weights[i] = -__builtin_inff();
    float before = p->largest[h];
    vf top = splat(before);
    for (int64_t i = 0; i < count; i += LANES)
        top = larger(load_floats(weights + i), top);
    float largest = largest_of(top);
    /* Logits of -inf alone have no weight. */
    float base = largest == -__builtin_inff() ? 0 : largest;
    vf total = {};
    for (int64_t i = 0; i < count; i += LANES) {
        vf weight = exp_of(load_floats(weights + i) - base);
        store_floats(weights + i, weight);
        total += weight;
    }
    p->changes[h] = exp_of(splat(before - base))[0];
    p->totals[h] = p->totals[h] * p->changes[h] + sum_of(total);
    p->largest[h] = largest;
}

/* Of `count` tokens: two vectors of channels at a time, whose sums stay in registers. */
INLINE void add_values(const struct part *p, const char *const *rows, const char *const *next,
                       int64_t count, int64_t head, int heads, int64_t channel, int vectors,
                       int64_t some, int64_t sum_stride, int type) {
    vf sums[HEADS_AT_ONCE][2];
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < vectors; v++)
            sums[h][v] = load_floats(p->sums + (head + h) * sum_stride + channel + v * LANES) *
                         p->changes[head + h];
    for (int64_t t = 0; t < count; t++) {
        vf value[2];
        __builtin_prefetch(next[t] + channel * size_of(type));
        for (int v = 0; v < vectors; v++) {
            const char *from = rows[t] + (channel + v * LANES) * size_of(type);
            value[v] = some == LANES ? load(from, type) : load_some(from, some, type);
        }
        for (int h = 0; h < heads; h++)
            for (int v = 0; v < vectors; v++)
                sums[h][v] += value[v] * p->weights[(head + h) * TILE + t];
    }
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < vectors; v++)
            store_floats(p->sums + (head + h) * sum_stride + channel + v * LANES, sums[h][v]);
}

INLINE void add_values_of_heads(const struct part *p, const char *const *rows,
                                const char *const *next, int64_t count, int64_t head, int heads,
                                int64_t dim, int64_t sum_stride, int type) {
    int64_t channel = 0;
    for (; channel + 2 * LANES <= dim; channel += 2 * LANES)
        add_values(p, rows, next, count, head, heads, channel, 2, LANES, sum_stride, type);
    for (; channel < dim; channel += LANES) {
        if (channel + LANES <= dim)
            add_values(p, rows, next, count, head, heads, channel, 1, LANES, sum_stride, type);
        else
            add_values(p, rows, next, count, head, heads, channel, 1, dim - channel, sum_stride,
                       type);
    }
}

INLINE void read_part(const struct attention *a, struct part *p, int type) {
    int64_t width = size_of(type), n_tokens[2], tokens[2][TILE];
    int64_t key_row = a->key_stride[2] * width, value_row = a->value_stride[2] * width;
    int64_t query_stride = padded_to(a->dim, LANES), sum_stride = padded_to(a->value_dim, LANES);
    const char *keys[TILE], *values[TILE], *next_keys[TILE], *next_values[TILE];
    int now = 0;
    n_tokens[0] = next_tokens(&p->reading, tokens[0]);
    for (; n_tokens[now] > 0; now = !now) {
        /* Tokens lie far apart: those of the next tile are fetched while this one is used. */
        int64_t count = n_tokens[now], padded = padded_to(count, ROWS_AT_ONCE);
        n_tokens[!now] = next_tokens(&p->reading, tokens[!now]);
        for (int64_t t = 0; t < padded; t++) {
            int64_t next = t < n_tokens[!now] ? tokens[!now][t] : tokens[now][t];
            keys[t] = p->keys + tokens[now][t] * key_row;
            values[t] = p->values + tokens[now][t] * value_row;
            next_keys[t] = p->keys + next * key_row;
            next_values[t] = p->values + next * value_row;
        }
        multiply(keys, next_keys, padded, p->queries, query_stride, a->dim, type, p->heads,
                 p->weights, TILE);
        for (int64_t h = 0; h < p->heads; h++)
            weigh(p, h, count, (float)a->softcap);
        const char *const *next = next_values;
        for (int64_t h = 0; h < p->heads; h += HEADS_AT_ONCE) {
#define ADD(HEADS)                                                                                 \
    add_values_of_heads(p, values, next, count, h, HEADS, a->value_dim, sum_stride, type)
            switch (smaller(p->heads - h, HEADS_AT_ONCE)) {
            case 1:
                ADD(1);
                break;
            case 2:
                ADD(2);
                break;
            case 3:
                ADD(3);
                break;
            default:
                ADD(4);
            }
#undef ADD
            next = values;
        }
    }
}

static void read_fp32(const struct attention *a, struct part *p) {
    read_part(a, p, FP32);
}

static void read_bf16(const struct attention *a, struct part *p) {
    read_part(a, p, BF16);
}

static void read_fp16(const struct attention *a, struct part *p) {
    read_part(a, p, FP16);
}

/* The memory of one part starts on a line of its own. */
static struct part part_at(const struct attention *a, float *scratch, int64_t group) {
    struct part p = {.heads = group, .sums = scratch};
    p.weights = p.sums + group * padded_to(a->value_dim, LANES);
    p.largest = p.weights + group * TILE;
    p.totals = p.largest + group;
    p.changes = p.totals + group;
    return p;
}

/* Adds the parts of one query head up. */
static void merge(const struct attention *a, float *scratch, int64_t part_floats, int64_t n_parts,
                  int64_t group, int64_t b, int64_t head) {
    int64_t h = head % group, sum_stride = padded_to(a->value_dim, LANES);
    float *own = scratch + (b * a->selections + head / group) * n_parts * part_floats;
    float largest = a->sinks ? a->sinks[head] : -__builtin_inff();
    for (int64_t i = 0; i < n_parts; i++) {
        float part_largest = part_at(a, own + i * part_floats, group).largest[h];
        largest = part_largest > largest ? part_largest : largest;
    }
    float base = largest == -__builtin_inff() ? 0 : largest;
    float total = a->sinks ? exp_of(splat(a->sinks[head] - base))[0] : 0;
    float *sums = own + h * sum_stride;
    for (int64_t i = 0; i < n_parts; i++) {
        struct part p = part_at(a, own + i * part_floats, group);
        float factor = exp_of(splat(p.largest[h] - base))[0];
        total += p.totals[h] * factor;
        for (int64_t d = 0; d < sum_stride; d += LANES) {
            vf sum = load_floats(p.sums + h * sum_stride + d) * factor;
            store_floats(sums + d, i == 0 ? sum : sum + load_floats(sums + d));
        }
    }
    a->mass[b * a->heads + head] = total == 0 ? -__builtin_inff() : base + log_of(splat(total))[0];
    float share = total == 0 ? 0 : 1 / total;
    int64_t first = (b * a->heads + head) * a->value_dim;
    for (int64_t d = 0; d < a->value_dim; d++) {
        float number = sums[d] * share;
        if (a->query_type == FP32)
            ((float *)a->output)[first + d] = number;
        else
            ((uint16_t *)a->output)[first + d] = to_half(number, (int)a->query_type);
    }
}

/* Returns 0, or 1 if there is no memory for it. */
EXPORT int anchor_attend_blocks(const struct attention *a) {
    int64_t group = a->heads / a->selections, per_kv_head = a->selections / a->kv_heads;
    int64_t selections = a->batch * a->selections, query_stride = padded_to(a->dim, LANES);
    int64_t tokens = a->n_blocks * a->block_size;
    /* Parts enough for all threads, none of them so small that merging it costs much. */
    int64_t n_parts = a->threads == 1 ? 1 : (4 * a->threads + selections - 1) / selections;
    n_parts = smaller(n_parts, smaller(tokens / 128, a->n_blocks) + 1);
    int64_t part_floats =
        padded_to(group * (padded_to(a->value_dim, LANES) + TILE + 3), 16);
    int64_t n_items = selections * n_parts;
    int64_t n_queries = a->batch * a->heads * query_stride;
    float *memory = NULL;
    if (posix_memalign((void **)&memory, 64,
                       (size_t)(padded_to(n_queries, 16) + n_items * part_floats) * 4))
        return 1;
    float *queries = memory, *scratch = memory + padded_to(n_queries, 16);
    for (int64_t i = 0; i < a->batch * a->heads; i++) {
        int64_t at = i / a->heads * a->query_stride[0] + i % a->heads * a->query_stride[1];
        widen(a->query + at * size_of((int)a->query_type), a->dim, (int)a->query_type,
              (float)a->scaling, queries + i * query_stride);
    }
    int64_t end = a->length ? smaller(*a->length, a->capacity) : a->capacity;
    int64_t width = size_of((int)a->state_type);
    int threads = tokens * selections * (a->dim + a->value_dim) < 1 << 15 ? 1 : (int)a->threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < n_items; item++) {
            int64_t i = item % n_parts, b = item / n_parts / a->selections;
            int64_t selection = item / n_parts % a->selections;
            int64_t kv_head = selection / per_kv_head;
            struct part p = part_at(a, scratch + item * part_floats, group);
            memset(p.sums, 0, (size_t)(group * padded_to(a->value_dim, LANES)) * 4);
            for (int64_t h = 0; h < group; h++) {
                p.largest[h] = -__builtin_inff();
                p.totals[h] = 0;
            }
            p.queries = queries + (b * a->heads + selection * group) * query_stride;
            p.keys = a->keys + (b * a->key_stride[0] + kv_head * a->key_stride[1]) * width;
            p.values = a->values + (b * a->value_stride[0] + kv_head * a->value_stride[1]) * width;
            p.reading = (struct reading){
                .blocks = a->blocks + b * a->block_stride[0] + selection * a->block_stride[1],
                .block_stride = a->block_stride[2],
                .block_size = a->block_size,
                .block = a->n_blocks * i / n_parts,
                .stop = a->n_blocks * (i + 1) / n_parts,
                .shift = a->shifts ? a->shifts[b] : 0,
                .oldest = a->window < end ? end - a->window : 0,
                .end = end,
                .visible = a->visible ? a->visible + b * a->visible_stride[0] : NULL,
                .visible_stride = a->visible_stride[1],
            };
            if (a->state_type == FP32)
                read_fp32(a, &p);
            else if (a->state_type == BF16)
                read_bf16(a, &p);
            else
                read_fp16(a, &p);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < a->batch * a->heads; i++)
            merge(a, scratch, part_floats, n_parts, group, i / a->heads, i % a->heads);
    }
    free(memory);
    return 0;
}
