/* The candidates with the largest shares of the attention mass, and the mass of the others. */
#pragma once
#include <stdlib.h>
#include "products.h"

struct candidates {
    const float *masses;   /* [selections][group][count], log mass, dense */
    const float *others;   /* [selections][group], log mass of what is no candidate; or null */
    const int64_t *blocks; /* [selections][count / parts], what candidates are pieces of; or null */
    int64_t *places;       /* [selections][wanted], ascending among the candidates */
    float *left;           /* [selections][group], log mass of what was not chosen; or null */
    int64_t selections, group, count, wanted, parts, threads;
};

/* Bits of a sort key that are told apart at once. */
#define DIGIT_BITS 11

/* A number as bits that are ordered as numbers are. */
INLINE uint32_t sort_key(const float *number) {
    uint32_t bits;
    memcpy(&bits, number, 4);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

/* The smallest of the `wanted` largest numbers, as its key. `ties` of those equal to it are among
 * the wanted. */
static uint32_t smallest_wanted(const float *numbers, int64_t count, int64_t wanted,
                                int64_t *ties) {
    uint32_t prefix = 0, mask = 0;
    *ties = wanted;
    for (int low = 32 - DIGIT_BITS; mask != UINT32_MAX; low = low > DIGIT_BITS ? low - DIGIT_BITS : 0) {
        uint32_t digits = ~mask >> low;
        int32_t counts[1 << DIGIT_BITS] = {0};
        for (int64_t i = 0; i < count; i++) {
            uint32_t key = sort_key(numbers + i);
            if ((key & mask) == prefix)
                counts[key >> low & digits]++;
        }
        uint32_t digit = digits;
        while (counts[digit] < *ties)
            *ties -= counts[digit--];
        prefix |= digit << low;
        mask |= digits << low;
    }
    return prefix;
}

struct numbers {
    const float *numbers; /* [rows][count], dense */
    int64_t *places;      /* [rows][wanted], ascending */
    int64_t rows, count, wanted;
};

/* Where the largest numbers stand; of equal ones the first. */
EXPORT int anchor_largest(const struct numbers *a) {
    for (int64_t row = 0; row < a->rows; row++) {
        const float *numbers = a->numbers + row * a->count;
        int64_t ties, taken = 0;
        uint32_t smallest = smallest_wanted(numbers, a->count, a->wanted, &ties);
        for (int64_t i = 0; taken < a->wanted; i++) {
            uint32_t key = sort_key(numbers + i);
            if (key > smallest || (key == smallest && ties-- > 0))
                a->places[row * a->wanted + taken++] = i;
        }
    }
    return 0;
}

/* log sum exp of a run of numbers. */
static float log_mass_of(const float *numbers, int64_t count, float more) {
    vf top = splat(more);
    int64_t whole = count / LANES * LANES, rest = count - whole;
    vf last = splat(-__builtin_inff());
    if (rest)
        memcpy(&last, numbers + whole, (size_t)rest * 4);
    for (int64_t i = 0; i < whole; i += LANES)
        top = larger(load_floats(numbers + i), top);
    float largest = largest_of(larger(last, top));
    if (largest == -__builtin_inff())
        return largest;
    vf total = exp_of(last - largest);
    for (int64_t i = 0; i < whole; i += LANES)
        total += exp_of(load_floats(numbers + i) - largest);
    float sum = sum_of(total) + exp_of(splat(more - largest))[0];
    return largest + log_of(splat(sum))[0];
}

/* Adds one query head's shares of a mass of exp(total); nan counts as none. */
static void add_shares(const float *masses, int64_t count, float total, float *shares) {
    for (int64_t i = 0; i < count; i += LANES) {
        vf mass = {};
        memcpy(&mass, masses + i, (size_t)smaller(LANES, count - i) * 4);
        vf share = exp_of(mass - total);
        store_floats(shares + i, load_floats(shares + i) + choose(share == share, share, (vf){}));
    }
}

static void choose_best(const struct candidates *c, int64_t selection, float *shares,
                        float *unread) {
    int64_t padded = padded_to(c->count, LANES);
    const float *masses = c->masses + selection * c->group * c->count;
    memset(shares, 0, (size_t)padded * 4);
    for (int64_t h = 0; h < c->group; h++) {
        float others = c->others ? c->others[selection * c->group + h] : -__builtin_inff();
        float total = log_mass_of(masses + h * c->count, c->count, others);
        add_shares(masses + h * c->count, c->count, total, shares);
    }
    int64_t ties, taken = 0, *places = c->places + selection * c->wanted;
    uint32_t smallest = smallest_wanted(shares, c->count, c->wanted, &ties);
    const int64_t *blocks = c->blocks ? c->blocks + selection * (c->count / c->parts) : NULL;
    if (c->left)
        memcpy(unread, masses, (size_t)(c->group * c->count) * 4);
    for (int64_t i = 0; taken < c->wanted; i++) {
        uint32_t key = sort_key(shares + i);
        if (key < smallest || (key == smallest && ties-- <= 0))
            continue;
        places[taken++] = blocks ? blocks[i / c->parts] * c->parts + i % c->parts : i;
        for (int64_t h = 0; c->left && h < c->group; h++)
            unread[h * c->count + i] = -__builtin_inff();
    }
    for (int64_t h = 0; c->left && h < c->group; h++)
        c->left[selection * c->group + h] =
            log_mass_of(unread + h * c->count, c->count, -__builtin_inff());
}

/* Returns 0, or 1 if there is no memory for it. */
EXPORT int anchor_best_candidates(const struct candidates *c) {
    int64_t shares = padded_to(c->count, LANES);
    int64_t each = padded_to(shares + (c->left ? c->group * c->count : 0), 16);
    float *memory = NULL;
    if (posix_memalign((void **)&memory, 64, (size_t)(c->selections * each) * 4))
        return 1;
    int threads = c->selections * c->group * c->count < 1 << 12 ? 1 : (int)c->threads;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t s = 0; s < c->selections; s++)
        choose_best(c, s, memory + s * each, memory + s * each + shares);
    free(memory);
    return 0;
}
