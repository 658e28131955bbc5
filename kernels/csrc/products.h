/* Inner products of a few rows with a few query heads: every row is read once for all of them. */
#pragma once
#include "vectors.h"

/* Rows that are multiplied together are at most this many; lists of rows are filled up to it. */
#define ROWS_AT_ONCE 8

/* Heads that are multiplied together are at most this many. */
#define HEADS_AT_ONCE 4

INLINE int64_t padded_to(int64_t count, int64_t multiple) {
    return (count + multiple - 1) / multiple * multiple;
}

INLINE int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Rows that keep all sums of so many heads in registers. */
INLINE int rows_for(int heads) {
    int rows = ACCUMULATORS / (heads == 3 ? 4 : heads);
    return rows > ROWS_AT_ONCE ? ROWS_AT_ONCE : rows;
}

/* To sums[h * rows_for(heads) + r]. */
INLINE void add_products(vf sums[ACCUMULATORS], const char *const *rows, const char *const *next,
                         const float *queries, int64_t query_stride, int64_t channel,
                         int64_t count, int type, int heads) {
    vf query[HEADS_AT_ONCE];
    for (int h = 0; h < heads; h++) {
        query[h] = load_floats(queries + h * query_stride + channel);
        KEEP_IN_REGISTER(query[h]);
    }
    for (int r = 0; r < rows_for(heads); r++) {
        const char *from = rows[r] + channel * size_of(type);
        if (next)
            __builtin_prefetch(next[r] + channel * size_of(type));
        vf row = count == LANES ? load(from, type) : load_some(from, count, type);
        for (int h = 0; h < heads; h++)
            sums[h * rows_for(heads) + r] += row * query[h];
    }
}

/* Of the rows_for(heads) first rows. */
INLINE void multiply_few(const char *const *rows, const char *const *next, const float *queries,
                         int64_t query_stride, int64_t dim, int type, int heads, float *products,
                         int64_t stride) {
    vf sums[ACCUMULATORS] = {};
    float totals[ACCUMULATORS];
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES)
        add_products(sums, rows, next, queries, query_stride, d, LANES, type, heads);
    if (d < dim)
        add_products(sums, rows, next, queries, query_stride, d, dim - d, type, heads);
    sums_of_all(sums, totals);
    for (int h = 0; h < heads; h++)
        memcpy(products + h * stride, totals + h * rows_for(heads), (size_t)rows_for(heads) * 4);
}

/* products[h * stride + r] = row r . query h for `count` rows, a multiple of ROWS_AT_ONCE, and all
 * heads. The queries end with zeros that make them a multiple of LANES long. `next` are as many
 * rows that will be used soon, or null: asked for one by one, they come while the CPU works. */
INLINE void multiply(const char *const *rows, const char *const *next, int64_t count,
                     const float *queries, int64_t query_stride, int64_t dim, int type,
                     int64_t heads, float *products, int64_t stride) {
    for (int64_t h = 0; h < heads; h += HEADS_AT_ONCE) {
        const float *own = queries + h * query_stride;
        float *to = products + h * stride;
#define MULTIPLY(HEADS)                                                                            \
    for (int64_t r = 0; r < count; r += rows_for(HEADS))                                           \
    multiply_few(rows + r, next ? next + r : next, own, query_stride, dim, type, HEADS, to + r,    \
                 stride)
        switch (smaller(heads - h, HEADS_AT_ONCE)) {
        case 1:
            MULTIPLY(1);
            break;
        case 2:
            MULTIPLY(2);
            break;
        case 3:
            MULTIPLY(3);
            break;
        default:
            MULTIPLY(4);
        }
#undef MULTIPLY
        next = next ? rows : next;
    }
}

/* `count` numbers of any format, times `factor`, in fp32 and followed by zeros. */
static void widen(const char *from, int64_t count, int type, float factor, float *to) {
    for (int64_t i = 0; i < count; i += LANES) {
        int64_t some = smaller(count - i, LANES);
        const char *at = from + i * size_of(type);
        vf numbers = type == FP32   ? load_some(at, some, FP32)
                     : type == BF16 ? load_some(at, some, BF16)
                                    : load_some(at, some, FP16);
        store_floats(to + i, numbers * factor);
    }
}
