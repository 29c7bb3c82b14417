/* Weights and scratch memory on large pages.
 *
 * A step reads every weight once, and where pages are small the machine spends as long on finding them as on
 * reading them, above all a virtual one. The system is therefore asked for pages of 2 MiB. Copies in memory are
 * moved to such pages at once; a file's pages are large where its file system has them so. Nothing depends on
 * whether it is done.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "internal.h"

#define LARGE_PAGE ((uintptr_t)2 << 20)

#if defined(__linux__)
#include <sys/mman.h>

#ifndef MADV_HUGEPAGE
#define MADV_HUGEPAGE 14
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif
typedef struct {
    uintptr_t first, last;
} range;

static int by_address(const void *a, const void *b) {
    const uintptr_t left = ((const range *)a)->first, right = ((const range *)b)->first;
    return (left > right) - (left < right);
}

/* The large pages that a weight touches. */
static range range_of(const tn_linear *linear) {
    const int64_t bits = tn_weight_bits(linear);
    const uintptr_t first = (uintptr_t)linear->weight, last = first + (uintptr_t)(linear->n * linear->k * bits / 8);
    return (range){first / LARGE_PAGE * LARGE_PAGE, (last + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE};
}

void tn_use_large_pages(const tn_model *model) {
    range *ranges = malloc((size_t)(4 * model->num_layers + 1) * sizeof *ranges);
    if (ranges == NULL) return;
    int64_t count = 0, merged = 0;
    for (int64_t i = 0; i < model->num_layers; i++) {
        const tn_layer *layer = &model->layers[i];
        const tn_linear *linears[] = {&layer->qkv, &layer->o, &layer->gate_up, &layer->down};
        for (int j = 0; j < 4; j++) ranges[count++] = range_of(linears[j]);
    }
    ranges[count++] = range_of(&model->head);
    qsort(ranges, (size_t)count, sizeof *ranges, by_address);
    for (int64_t i = 1; i < count; i++) {
        if (ranges[i].first > ranges[merged].last)
            ranges[++merged] = ranges[i];
        else if (ranges[i].last > ranges[merged].last)
            ranges[merged].last = ranges[i].last;
    }
    for (int64_t i = 0; i <= merged; i++) {
        void *at = (void *)ranges[i].first;
        const size_t bytes = ranges[i].last - ranges[i].first;
        madvise(at, bytes, MADV_HUGEPAGE);
        madvise(at, bytes, MADV_COLLAPSE);
    }
    free(ranges);
}
#else
void tn_use_large_pages(const tn_model *model) { (void)model; }
#endif

void *tn_large_pages(size_t *bytes) {
    const size_t page = *bytes < LARGE_PAGE ? 4096 : LARGE_PAGE;
    *bytes = (*bytes + page - 1) / page * page;
    void *memory = aligned_alloc(page, *bytes);
#if defined(__linux__)
    if (memory != NULL && page == LARGE_PAGE) madvise(memory, *bytes, MADV_HUGEPAGE);
#endif
    return memory;
}
