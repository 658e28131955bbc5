/* The largest numbers of each row: their bits are sorted into buckets from the top, and only the
 * bucket that the last of them falls into is looked at more closely. */
#pragma once
#include <stdlib.h>
#include "products.h"

#define BUCKET_BITS 11
#define BUCKETS (1 << BUCKET_BITS)

struct selecting {
    const float *shares;
    int64_t *chosen; /* [rows][k], dense */
    int64_t batch, heads, n_pieces, k;
    int64_t stride[2]; /* of rows, which are dense */
    int64_t threads;
};

/* As integers that are ordered as the numbers are, nan being the largest of them. */
INLINE uint32_t key_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    if (number != number)
        return UINT32_MAX;
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

/* The key of the k-th largest of `count` keys, which are overwritten. `above` becomes how many are
 * larger. */
static uint32_t select_key(uint32_t *keys, int64_t count, int64_t k, int64_t *above) {
    *above = 0;
    for (int shift = 32 - BUCKET_BITS;; shift = shift > BUCKET_BITS ? shift - BUCKET_BITS : 0) {
        uint32_t in_bucket[BUCKETS] = {0};
        for (int64_t i = 0; i < count; i++)
            in_bucket[keys[i] >> shift & (BUCKETS - 1)]++;
        int64_t bucket = BUCKETS - 1;
        for (; *above + in_bucket[bucket] < k; bucket--)
            *above += in_bucket[bucket];
        int64_t left = 0;
        for (int64_t i = 0; i < count; i++) {
            keys[left] = keys[i];
            left += (keys[i] >> shift & (BUCKETS - 1)) == bucket;
        }
        count = left;
        if (shift == 0)
            return keys[0];
    }
}

/* Places in ascending order; of equal numbers the first ones. */
static void choose_row(const float *row, int64_t count, int64_t k, uint32_t *keys,
                       int64_t *chosen) {
    int64_t above, n = 0;
    for (int64_t i = 0; i < count; i++)
        keys[i] = key_of(row[i]);
    uint32_t last = select_key(keys, count, k, &above);
    int64_t equal = k - above;
    for (int64_t i = 0; i < count && n < k; i++) {
        uint32_t key = key_of(row[i]);
        int taken = key > last || (key == last && equal > 0);
        equal -= taken && key == last;
        chosen[n] = i;
        n += taken;
    }
}

/* Returns 0, or 1 if there is no memory for it. */
EXPORT int anchor_top_pieces(const struct selecting *a) {
    int64_t rows = a->batch * a->heads;
    int threads = rows * a->n_pieces < 1 << 13 ? 1 : (int)a->threads;
    uint32_t *keys = malloc((size_t)(rows * a->n_pieces) * 4);
    if (!keys)
        return 1;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < rows; i++) {
        int64_t at = i / a->heads * a->stride[0] + i % a->heads * a->stride[1];
        choose_row(a->shares + at, a->n_pieces, a->k, keys + i * a->n_pieces, a->chosen + i * a->k);
    }
    free(keys);
    return 0;
}
