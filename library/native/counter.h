/* Counters in shared memory, by which the ranks of one host wait for each other.

   A waiting rank spins for a moment, if every rank has a core of its own, and then sleeps in the kernel (futex). */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

#define LINE 64

/* A counter that one rank raises and the others wait for; on a cache line of its own. */
typedef struct {
    _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
    char unused[LINE - 8];
} counter_t;

/* Called every `poll_seconds` of a wait, with the rank that is waited for. A `status` other than 0 ends the wait. If
   the function is interrupted before it sets a status, the wait ends with INTERRUPTED. */
enum { INTERRUPTED = 3 };
typedef void (*poll_fn)(int rank, double waited_seconds, int *status);

typedef struct {
    int spins;
    double poll_seconds;
    poll_fn poll;
} wait_policy_t;

/* Set this rank's own counter, or add 1 to any rank's. Both wake waiting ranks and return the new value. */
uint32_t counter_set(counter_t *counter, uint32_t value);
uint32_t counter_increment(counter_t *counter);

/* Wait until `rank`'s counter is at least `value` (counters wrap at 2^32). Returns 0, or the status set by `poll`. */
int counter_wait(counter_t *counter, uint32_t value, int rank, const wait_policy_t *policy);
