/* The loops with AVX2 and FMA: sixteen lanes are two registers. */
#include "internal.h"

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define FN(name) name##_avx2
#define ROWS 2
#define COLUMNS 2
#include "vectors.inc"
#endif
