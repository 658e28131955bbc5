/* Going over the tokens of chosen blocks that are seen. */
#pragma once
#include "products.h"

/* Tokens whose keys and values stay in the nearest cache while all query heads use them. */
#define TILE 32

/* Where a part of a selection's blocks has been read up to. */
struct reading {
    const int64_t *blocks;
    int64_t block_stride, block_size, block, stop, next, shift, oldest, end;
    const uint8_t *visible;
    int64_t visible_stride;
};

/* The next tokens that are seen, at most TILE, the last one repeated up to ROWS_AT_ONCE. */
static int64_t next_tokens(struct reading *r, int64_t *tokens) {
    int64_t count = 0;
    while (count < TILE && r->block < r->stop) {
        int64_t number = r->blocks[r->block * r->block_stride];
        int64_t token = r->next, last = 0;
        if (number >= 0 && number <= r->end) {
            int64_t first = r->shift + number * r->block_size;
            last = smaller(first + r->block_size, r->end);
            first = first < r->oldest ? r->oldest : first;
            token = token < first ? first : token;
        }
        for (; token < last && count < TILE; token++)
            if (!r->visible || r->visible[token * r->visible_stride])
                tokens[count++] = token;
        int more = token < last;
        r->next = more ? token : 0;
        r->block += !more;
    }
    for (int64_t i = count; count > 0 && i < padded_to(count, ROWS_AT_ONCE); i++)
        tokens[i] = tokens[count - 1];
    return count;
}
