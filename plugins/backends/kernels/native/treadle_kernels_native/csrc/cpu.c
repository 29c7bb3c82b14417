/* Which instructions this machine has. On x86-64: cpuid, what the system saves on a switch (xgetbv), and
 * the permission for tiles. On aarch64 programs must ask the system.
 *
 * __builtin_cpu_supports is not used: it answers 0 under some compilers, and knows no permission. A
 * wrong answer here would be SIGILL, so that each level asks for every instruction that its files are
 * compiled with.
 */
#define _GNU_SOURCE
#include "internal.h"

#if defined(__x86_64__)
#include <cpuid.h>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

static uint64_t saved_state(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t)high << 32) | low;
}

static int has(uint32_t word, int bit) { return (word >> bit) & 1; }

/* Linux gives the 8 KiB of tiles only to processes that ask (5.16 and later). */
static int tiles_permitted(void) {
#if defined(__linux__) && defined(SYS_arch_prctl)
    const long request = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return 0;
#endif
}

int64_t tn_best_isa(void) {
    uint32_t a, b, c, d, b7, c7, d7, a71 = 0, unused;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, 27)) return TN_GENERIC; /* OSXSAVE */
    const int fma = has(c, 12), f16c = has(c, 29), avx = has(c, 28);
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return TN_GENERIC;
    const uint32_t sub_leaves = a;
    if (sub_leaves >= 1) __get_cpuid_count(7, 1, &a71, &unused, &unused, &unused);
    const uint64_t state = saved_state();
    const int ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6;
    if (!(ymm && avx && fma && f16c && has(b7, 5))) return TN_GENERIC;
    const int foundation = has(b7, 16), dq = has(b7, 17), bw = has(b7, 30), vl = has(b7, 31);
    if (!(zmm && foundation && dq && bw && vl)) return TN_AVX2;
    const int vnni = has(c7, 11), bfloat = has(a71, 5);
    if (!(vnni && bfloat)) return TN_AVX512;
    const int tile = has(d7, 24), tile_bf16 = has(d7, 22), tile_int8 = has(d7, 25);
    const int tiles_saved = (state & 0x60000) == 0x60000;
    if (!(tile && tile_bf16 && tile_int8 && tiles_saved && tiles_permitted())) return TN_AVX512_BF16;
    return TN_AMX;
}
#elif defined(__aarch64__)

#if defined(__linux__)
#include <sys/auxv.h>

/* The numbers of the bits are those of Linux, for systems whose headers are older. */
static int has_dotprod(void) { return getauxval(AT_HWCAP) >> 20 & 1; }
static int has_i8mm(void) { return (getauxval(AT_HWCAP2) >> 13 & 3) == 3; } /* I8MM and BF16 */
#elif defined(__APPLE__)
#include <sys/sysctl.h>

static int has(const char *name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, NULL, 0) == 0 && value != 0;
}

static int has_dotprod(void) { return has("hw.optional.arm.FEAT_DotProd"); }
static int has_i8mm(void) { return has("hw.optional.arm.FEAT_I8MM") && has("hw.optional.arm.FEAT_BF16"); }
#else
static int has_dotprod(void) { return 0; }
static int has_i8mm(void) { return 0; }
#endif

int64_t tn_best_isa(void) {
    if (!has_dotprod()) return TN_GENERIC;
    return has_i8mm() ? TN_I8MM : TN_DOTPROD;
}
#else
int64_t tn_best_isa(void) { return TN_GENERIC; }
#endif

int64_t tn_has_isa(int64_t isa) {
    const int64_t best = tn_best_isa(), first = best >= TN_DOTPROD ? TN_DOTPROD : TN_AVX2;
    return isa == TN_GENERIC || (isa >= first && isa <= best);
}

int64_t tn_abi(void) { return TN_ABI; }
