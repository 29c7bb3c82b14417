/* The loops for every machine: SSE2 on x86-64, NEON on aarch64. */
#include "internal.h"

#define TARGET
#define FN(name) name##_generic
#define ROWS 2
#define COLUMNS 2
#include "vectors.inc"
