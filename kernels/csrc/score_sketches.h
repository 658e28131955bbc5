/* The estimated log mass of pieces of blocks from the sketches of their tokens.
 *
 * Four bits at a time look up what their signs add to the inner product, for one token per lane:
 * a table of sixteen numbers is one register. Lanes are pieces, so that a piece's tokens are added
 * up without moving anything between lanes. */
#pragma once
#include <stdlib.h>
#include "products.h"

struct sketch_scoring {
    const float *rotated; /* [batch][heads][dim], dense */
    const uint8_t *bits;
    const char *scales;
    const float *centres;
    const int64_t *slots; /* or null */
    float *scores;
    int64_t batch, heads, selections, kv_heads, dim, n_stored, n_blocks, block_size, width, planes;
    int64_t piece, padded;
    int64_t bit_stride[3], scale_stride[3], centre_stride[4], slot_stride[3];
    int64_t scale_type, threads;
    double softcap;
};

/* Words of a token's bits that are looked at in one go; longer sketches take several. */
#define WORDS_AT_ONCE 16

INLINE vf look_up(vu nibbles, const float *table) {
#if defined(__AVX512F__)
    return _mm512_permutexvar_ps((__m512i)nibbles, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)nibbles);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)nibbles);
    return _mm256_blendv_ps(low, high, (__m256)(nibbles << 28));
#else
    vf found;
    for (int lane = 0; lane < LANES; lane++)
        found[lane] = table[nibbles[lane] & 15];
    return found;
#endif
}

/* tables[h][word * 8 + nibble]: the sums of four channels of one head under all signs. Channels
 * and bytes that are not there add nothing. */
static void fill_tables(const struct sketch_scoring *a, const float *rotated, int64_t group,
                        int64_t n_words, float *tables) {
    int64_t per_plane = a->width / a->planes;
    for (int64_t h = 0; h < group; h++)
        for (int64_t i = 0; i < n_words * 8; i++) {
            int64_t byte = i / 2, plane = byte / per_plane;
            int64_t channel = 8 * (byte % per_plane) + 4 * (i % 2);
            float *table = tables + (h * n_words * 8 + i) * 16;
            float weight = plane < a->planes ? (float)(1 << (a->planes - 1 - plane)) : 0;
            table[0] = 0;
            for (int bit = 0; bit < 4; bit++, channel++) {
                float q = channel < a->dim ? rotated[h * a->dim + channel] * weight : 0;
                table[0] -= q;
                for (int j = 0; j < 1 << bit; j++) /* a sign turned is twice the number */
                    table[(1 << bit) + j] = 2 * q;
            }
            for (int bit = 0; bit < 4; bit++)
                for (int j = 1 << bit; j < 2 << bit; j++)
                    table[j] += table[j - (1 << bit)];
        }
}

/* logits[h] += what the words say, one token per lane. */
INLINE void add_words(const uint32_t words[][LANES], int64_t n_words, const float *tables,
                      int64_t table_stride, int heads, vf *logits) {
    vf sums[HEADS_AT_ONCE][2] = {};
    for (int64_t w = 0; w < n_words; w++) {
        vu bits;
        memcpy(&bits, words[w], sizeof bits);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            for (int h = 0; h < heads; h++)
                sums[h][i % 2] += look_up(LANES >= 8 ? bits : bits & 15,
                                          tables + h * table_stride + (w * 8 + i) * 16);
            bits >>= 4;
        }
    }
    for (int h = 0; h < heads; h++)
        logits[h] += sums[h][0] + sums[h][1];
}

static void add_words_of(const uint32_t words[][LANES], int64_t n_words, const float *tables,
                         int64_t table_stride, int64_t heads, vf *logits) {
    for (int64_t h = 0; h < heads; h += HEADS_AT_ONCE, tables += HEADS_AT_ONCE * table_stride) {
        switch (smaller(heads - h, HEADS_AT_ONCE)) {
        case 1:
            add_words(words, n_words, tables, table_stride, 1, logits + h);
            break;
        case 2:
            add_words(words, n_words, tables, table_stride, 2, logits + h);
            break;
        case 3:
            add_words(words, n_words, tables, table_stride, 3, logits + h);
            break;
        default:
            add_words(words, n_words, tables, table_stride, 4, logits + h);
        }
    }
}

/* The log of the sum of the exponentials of each lane; all of -inf is -inf. */
INLINE vf log_sum(const vf *logits, int64_t count, int64_t stride) {
    if (count == 1)
        return logits[0];
    vf top = logits[0];
    for (int64_t i = 1; i < count; i++)
        top = larger(logits[i * stride], top);
    vf base = choose(top == -__builtin_inff(), splat(0), top), sum = {};
    if (count == 2) { /* one of the two terms is 1 */
        vf other = choose(logits[stride] > logits[0], logits[0], logits[stride]);
        sum = 1.0f + exp_of(other - base);
    } else
        for (int64_t i = 0; i < count; i++)
            sum += exp_of(logits[i * stride] - base);
    return choose(top == -__builtin_inff(), top, base + log_of(sum));
}

/* Where the pieces of LANES lanes lie. */
struct lanes {
    const uint8_t *bits[LANES];
    const char *scales[LANES];
    int64_t blocks[LANES];
};

/* Of `count` <= LANES pieces from `first` on, which are fetched ahead of their use: chosen blocks
 * lie far apart. Returns 0, or 2 for a slot out of range. */
static int find_lanes(const struct sketch_scoring *a, int64_t b, int64_t selection, int64_t first,
                      int64_t count, struct lanes *lanes) {
    int64_t parts = a->block_size / a->piece, scale_size = size_of((int)a->scale_type);
    int64_t kv_head = selection / (a->selections / a->kv_heads), bytes = a->piece * a->width;
    const uint8_t *bits = a->bits + b * a->bit_stride[0] + kv_head * a->bit_stride[1];
    const char *scales =
        a->scales + (b * a->scale_stride[0] + kv_head * a->scale_stride[1]) * scale_size;
    int64_t block = first / parts, token = first % parts * a->piece;
    for (int64_t lane = 0; lane < LANES; lane++) {
        int64_t slot = block;
        if (a->slots)
            slot = a->slots[b * a->slot_stride[0] + selection * a->slot_stride[1] +
                            block * a->slot_stride[2]];
        if (slot < 0 || slot >= a->n_stored)
            return 2;
        lanes->blocks[lane] = block;
        lanes->bits[lane] = bits + slot * a->bit_stride[2] + token * a->width;
        lanes->scales[lane] = scales + (slot * a->scale_stride[2] + token) * scale_size;
        for (int64_t i = 0; i < bytes; i += 64)
            __builtin_prefetch(lanes->bits[lane] + i);
        __builtin_prefetch(lanes->scales[lane]);
        if (lane + 1 >= count) /* the lanes that are left repeat the last piece */
            continue;
        token += a->piece;
        if (token == a->block_size) {
            token = 0;
            block++;
        }
    }
    return 0;
}

/* numbers[lane] = the scale of the lane's token. */
INLINE vf load_scales(const struct lanes *lanes, int64_t token, int type) {
    char numbers[LANES * 4];
    for (int64_t lane = 0; lane < LANES; lane++)
        memcpy(numbers + lane * size_of(type), lanes->scales[lane] + token * size_of(type),
               (size_t)size_of(type));
    return load(numbers, type);
}

/* words[i][lane]: bits of one token per lane, `some` words from word w on. */
static void load_words(const struct sketch_scoring *a, const struct lanes *lanes, int64_t token,
                       int64_t w, int64_t some, uint32_t words[][LANES]) {
    int64_t whole = smaller(some, a->width / 4 - w), rest = whole < some ? a->width % 4 : 0;
    for (int64_t lane = 0; lane < LANES; lane++) {
        const uint8_t *from = lanes->bits[lane] + token * a->width + 4 * w;
        for (int64_t i = 0; i < whole; i++)
            memcpy(&words[i][lane], from + 4 * i, 4);
        if (rest) {
            uint32_t word = 0;
            for (int64_t i = 0; i < rest; i++)
                word |= (uint32_t)from[4 * whole + i] << 8 * i;
            words[whole][lane] = word;
        }
    }
}

/* Scores of `count` <= LANES pieces from `first` on. */
static void score_pieces(const struct sketch_scoring *a, const struct lanes *lanes, int64_t b,
                         int64_t selection, const float *tables, int64_t n_words, int64_t first,
                         int64_t count, vf *logits) {
    int64_t group = a->heads / a->selections, parts = a->block_size / a->piece;
    float centres[LANES];
    const float *own = a->centres + b * a->centre_stride[0] + selection * a->centre_stride[1];
    for (int64_t token = 0; token < a->piece; token++) {
        vf *sums = logits + token * group;
        for (int64_t h = 0; h < group; h++)
            sums[h] = splat(0);
        uint32_t words[WORDS_AT_ONCE][LANES];
        for (int64_t w = 0; w < n_words; w += WORDS_AT_ONCE) {
            int64_t some = smaller(n_words - w, WORDS_AT_ONCE);
            load_words(a, lanes, token, w, some, words);
            add_words_of((const uint32_t(*)[LANES])words, some, tables + w * 8 * 16,
                         n_words * 8 * 16, group, sums);
        }
        vf scales = a->scale_type == FP16 ? load_scales(lanes, token, FP16)
                                          : load_scales(lanes, token, FP32);
        for (int64_t h = 0; h < group; h++) {
            if (a->padded)
                sums[h] = choose(scales == scales, sums[h] * scales, splat(-__builtin_inff()));
            else
                sums[h] *= scales;
        }
    }
    for (int64_t h = 0; h < group; h++) {
        for (int64_t lane = 0; lane < LANES; lane++)
            centres[lane] =
                own[h * a->centre_stride[2] + lanes->blocks[lane] * a->centre_stride[3]];
        vf centre = load_floats(centres);
        for (int64_t token = 0; token < a->piece; token++) {
            vf *logit = logits + token * group + h, sum = *logit;
            /* Padding stays -inf under a softcap. */
            vf whole = capped(sum + centre, (float)a->softcap);
            *logit = a->padded ? choose(sum == -__builtin_inff(), sum, whole) : whole;
        }
        vf score = log_sum(logits + h, a->piece, group);
        float *to = a->scores + ((b * a->selections + selection) * group + h) * a->n_blocks * parts;
        memcpy(to + first, &score, (size_t)count * 4);
    }
}

/* Returns 0, 1 if there is no memory for it, or 2 for a slot out of range. */
EXPORT int anchor_score_sketches(const struct sketch_scoring *a) {
    int64_t group = a->heads / a->selections, n_words = (a->width + 3) / 4;
    int64_t pieces = a->n_blocks * (a->block_size / a->piece);
    int64_t selections = a->batch * a->selections;
    int64_t n_runs = (pieces + LANES - 1) / LANES;
    int64_t n_parts = smaller((4 * a->threads + selections - 1) / selections, n_runs / 8 + 1);
    int64_t n_items = selections * n_parts;
    int64_t table_floats = group * n_words * 8 * 16, logit_floats = group * a->piece * LANES;
    float *memory = NULL;
    if (posix_memalign((void **)&memory, 64,
                       (size_t)(n_items * (table_floats + logit_floats)) * 4))
        return 1;
    int64_t work = selections * pieces * a->piece * n_words;
    int threads = work < 1 << 12 ? 1 : (int)a->threads, status = 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t item = 0; item < n_items; item++) {
        int64_t part = item % n_parts, selection = item / n_parts, failed = 0;
        float *tables = memory + item * (table_floats + logit_floats);
        const float *rotated = a->rotated + selection * group * a->dim;
        fill_tables(a, rotated, group, n_words, tables);
        int64_t b = selection / a->selections, own = selection % a->selections;
        int64_t run = n_runs * part / n_parts, stop = n_runs * (part + 1) / n_parts;
        struct lanes lanes[2];
        failed = run < stop ? find_lanes(a, b, own, run * LANES,
                                         smaller(LANES, pieces - run * LANES), &lanes[run % 2])
                            : 0;
        for (; run < stop && !failed; run++) {
            int64_t first = run * LANES, next = first + LANES;
            if (run + 1 < stop)
                failed = find_lanes(a, b, own, next, smaller(LANES, pieces - next),
                                    &lanes[(run + 1) % 2]);
            score_pieces(a, &lanes[run % 2], b, own, tables, n_words, first,
                         smaller(LANES, pieces - first), (vf *)(tables + table_floats));
        }
        if (failed) {
#pragma omp atomic write
            status = 2;
        }
    }
    free(memory);
    return status;
}
