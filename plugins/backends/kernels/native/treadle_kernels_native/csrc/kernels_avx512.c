/* The loops with AVX-512: 24 of the 32 registers hold results. */
#include "internal.h"

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define FN(name) name##_avx512
#define ROWS 6
#define COLUMNS 4
#include "vectors.inc"
#endif
