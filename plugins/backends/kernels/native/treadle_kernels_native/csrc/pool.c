/* The threads of an engine.
 *
 * A step is one job that every thread runs from beginning to end, with barriers between operations:
 * a barrier costs a fraction of a microsecond where every thread has a core. A thread that waits spins
 * for some 50 us, longer than any wait within a step on a quiet machine, and then sleeps on a futex (where
 * there is none, on a condition), so that it takes no core from others on a busy one. For the next step it spins
 * longer where the last one came that soon, because to wake up takes as long as some layers of a small model. If the
 * system took its core away for another thread, the machine is busy, and it does not spin longer for some steps.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "internal.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define SPIN_NANOSECONDS 50000
#define LONG_SPIN_NANOSECONDS 500000 /* a host that has nothing else to do needs less between two steps */
#define BUSY_JOBS 4
#define PAUSES 32

struct tn_pool {
    _Alignas(64) atomic_int phase; /* of barriers */
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_llong next;
    _Alignas(64) atomic_int job_number; /* grows by one for each job; negative: the threads end */
    _Alignas(64) atomic_int sleepers;
#if !defined(__linux__)
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* some word */
#endif
    tn_job job;
    void *context;
    int threads, started, pin;
    pthread_t *handles;
};

typedef struct {
    tn_pool *pool;
    int number;
} tn_worker;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void sleep_on(tn_pool *pool, atomic_int *word, int value) {
#if defined(__linux__)
    (void)pool;
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
    pthread_mutex_lock(&pool->mutex);
    while (atomic_load(word) == value) pthread_cond_wait(&pool->changed, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
#endif
}

static void wake(tn_pool *pool, atomic_int *word) {
    if (atomic_load(&pool->sleepers) == 0) return;
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 30, NULL, NULL, 0);
#else
    (void)word;
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->mutex);
#endif
}

/* Return once *word is not value, after spinning for so long at most. What comes back is how long that took. */
static int64_t wait_while(tn_pool *pool, atomic_int *word, int value, int64_t spin) {
    int64_t begin = 0, time = 0;
    for (;;) {
        for (int i = 0; i < PAUSES; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != value) return time - begin;
            relax();
        }
        time = now();
        if (begin == 0) begin = time;
        if (time - begin > spin) break;
    }
    /* Counted before the kernel compares the word: whoever changes it afterwards sees the sleeper. */
    atomic_fetch_add(&pool->sleepers, 1);
    while (atomic_load(word) == value) sleep_on(pool, word, value);
    atomic_fetch_sub(&pool->sleepers, 1);
    return now() - begin;
}

/* How often the system took the core of this thread for another one. */
static int64_t losses(void) {
#if defined(__linux__)
    struct rusage usage;
    if (getrusage(RUSAGE_THREAD, &usage) == 0) return usage.ru_nivcsw;
#endif
    return 0;
}

void tn_barrier(tn_pool *pool) {
    if (pool->threads == 1) {
        atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
        return;
    }
    const int phase = atomic_load_explicit(&pool->phase, memory_order_relaxed);
    if (atomic_fetch_add(&pool->arrived, 1) + 1 < pool->threads) {
        wait_while(pool, &pool->phase, phase, SPIN_NANOSECONDS);
        return;
    }
    atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    atomic_store(&pool->phase, (int)((unsigned)phase + 1u));
    wake(pool, &pool->phase);
}

int64_t tn_next(tn_pool *pool) { return atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed); }

int tn_pool_threads(const tn_pool *pool) { return pool->threads; }

static void bind_to_core(int number) {
#if defined(__linux__)
    cpu_set_t allowed, chosen;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    int left = number % CPU_COUNT(&allowed);
    for (int core = 0; core < CPU_SETSIZE; core++) {
        if (!CPU_ISSET(core, &allowed) || left-- > 0) continue;
        CPU_ZERO(&chosen);
        CPU_SET(core, &chosen);
        sched_setaffinity(0, sizeof chosen, &chosen);
        return;
    }
#else
    (void)number;
#endif
}

static void *work(void *argument) {
    tn_worker worker = *(tn_worker *)argument;
    tn_pool *pool = worker.pool;
    free(argument);
    if (pool->pin) bind_to_core(worker.number);
    int64_t spin = SPIN_NANOSECONDS, lost = 0;
    for (int done = 0, busy = 0;;) {
        const int64_t waited = wait_while(pool, &pool->job_number, done, spin);
        done = atomic_load(&pool->job_number);
        if (done < 0) return NULL;
        pool->job(pool->context, worker.number);
        tn_barrier(pool);
        const int64_t before = lost;
        lost = losses();
        busy = lost > before ? BUSY_JOBS : busy - (busy > 0);
        spin = busy == 0 && waited < LONG_SPIN_NANOSECONDS ? LONG_SPIN_NANOSECONDS : SPIN_NANOSECONDS;
    }
}

tn_pool *tn_pool_create(int threads, int pin) {
    tn_pool *pool = aligned_alloc(64, (sizeof *pool + 63) / 64 * 64);
    if (pool == NULL) return NULL;
    *pool = (tn_pool){.threads = threads, .pin = pin};
#if !defined(__linux__)
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->changed, NULL);
#endif
    pool->handles = calloc((size_t)threads, sizeof *pool->handles);
    for (int i = 1; pool->handles != NULL && i < threads; i++) {
        tn_worker *worker = malloc(sizeof *worker);
        if (worker == NULL) break;
        *worker = (tn_worker){pool, i};
        if (pthread_create(&pool->handles[i], NULL, work, worker) != 0) {
            free(worker);
            break;
        }
        pool->started++;
    }
    if (pool->handles == NULL || pool->started < threads - 1) {
        tn_pool_destroy(pool);
        return NULL;
    }
    return pool;
}

void tn_pool_destroy(tn_pool *pool) {
    if (pool == NULL) return;
    atomic_store(&pool->job_number, -1);
    wake(pool, &pool->job_number);
    for (int i = 1; i <= pool->started; i++) pthread_join(pool->handles[i], NULL);
    free(pool->handles);
    free(pool);
}

void tn_pool_run(tn_pool *pool, tn_job job, void *context) {
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    pool->job = job;
    pool->context = context;
    const int number = atomic_load_explicit(&pool->job_number, memory_order_relaxed);
    atomic_store(&pool->job_number, number == INT32_MAX ? 1 : number + 1);
    wake(pool, &pool->job_number);
    job(context, 0);
    tn_barrier(pool);
}
