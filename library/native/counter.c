#define _GNU_SOURCE
#include "counter.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static inline void cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int has_reached(counter_t *counter, uint32_t value)
{
    return (int32_t)(atomic_load_explicit(&counter->value, memory_order_acquire) - value) >= 0;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static void wake(counter_t *counter)
{
    if (atomic_load(&counter->sleepers)) /* sequentially consistent with the store: no rank falls asleep in between */
        syscall(SYS_futex, &counter->value, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

uint32_t counter_set(counter_t *counter, uint32_t value)
{
    atomic_store(&counter->value, value);
    wake(counter);
    return value;
}

uint32_t counter_increment(counter_t *counter)
{
    uint32_t value = atomic_fetch_add(&counter->value, 1) + 1;
    wake(counter);
    return value;
}

static int sleep_until(counter_t *counter, uint32_t value, int rank, const wait_policy_t *policy)
{
    double began = now(), polled = began;
    struct timespec pause = {(time_t)policy->poll_seconds,
                             (long)(1e9 * (policy->poll_seconds - (time_t)policy->poll_seconds))};
    for (;;) {
        uint32_t seen = atomic_load(&counter->value);
        if ((int32_t)(seen - value) >= 0)
            return 0;
        syscall(SYS_futex, &counter->value, FUTEX_WAIT, seen, &pause, NULL, 0);
        double woken = now(); /* by the counter, the clock, or a signal, however often signals come */
        if (woken - polled >= policy->poll_seconds && !has_reached(counter, value)) {
            int status = INTERRUPTED;
            polled = woken;
            policy->poll(rank, woken - began, &status);
            if (status && !has_reached(counter, value))
                return status;
        }
    }
}

int counter_wait(counter_t *counter, uint32_t value, int rank, const wait_policy_t *policy)
{
    for (int spin = 0; spin <= policy->spins; spin++) {
        if (has_reached(counter, value))
            return 0;
        cpu_relax();
    }
    atomic_fetch_add(&counter->sleepers, 1);
    int status = sleep_until(counter, value, rank, policy);
    atomic_fetch_sub(&counter->sleepers, 1);
    return status;
}
