#define _GNU_SOURCE
#include "meeting.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int reached(count_t *count, uint32_t value)
{
    return (int32_t)(atomic_load_explicit(&count->value, memory_order_acquire) - value) >= 0;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

void count_raise(count_t *count, uint32_t value)
{
    atomic_store(&count->value, value);
    if (atomic_load(&count->sleepers)) /* in one order with the store: nobody falls asleep in between */
        syscall(SYS_futex, &count->value, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static int sleep_until(count_t *count, uint32_t value, int rank, const patience_t *patience)
{
    double began = now();
    struct timespec pause = {(time_t)patience->look_seconds,
                             (long)(1e9 * (patience->look_seconds - (time_t)patience->look_seconds))};
    for (;;) {
        uint32_t seen = atomic_load(&count->value);
        if ((int32_t)(seen - value) >= 0)
            return 0;
        int slept = syscall(SYS_futex, &count->value, FUTEX_WAIT, seen, &pause, NULL, 0);
        if (slept < 0 && errno == ETIMEDOUT && !reached(count, value)) {
            int said = patience->look(rank, now() - began);
            if (said && !reached(count, value))
                return said;
        }
    }
}

int count_await(count_t *count, uint32_t value, int rank, const patience_t *patience)
{
    for (int spin = 0; spin <= patience->spins; spin++) {
        if (reached(count, value))
            return 0;
        relax();
    }
    atomic_fetch_add(&count->sleepers, 1);
    int said = sleep_until(count, value, rank, patience);
    atomic_fetch_sub(&count->sleepers, 1);
    return said;
}
