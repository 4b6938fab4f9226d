/* Where the ranks of one host wait for each other: counts of arrivals in memory that they share.

   A rank that waits looks for a moment, where every rank has a core of its own, and then sleeps in the kernel (futex). */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

#define LINE 64

/* A count that one rank raises and the others wait for; on a cache line of its own. */
typedef struct {
    _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
    char unused[LINE - 8];
} counter_t;

/* Asked now and then while a rank waits, with the rank that it waits for. What it says, where that is not 0, ends the
   wait; a function that is interrupted before it says anything ends it with INTERRUPTED. */
enum { INTERRUPTED = 3 };
typedef void (*poll_fn)(int rank, double seconds, int *status);

typedef struct {
    int spins;
    double poll_seconds;
    poll_fn poll;
} wait_policy_t;

/* Raise a count of one's own to `value`, or that of anybody by one; returns what it is then. */
uint32_t counter_set(counter_t *count, uint32_t value);
uint32_t counter_increment(counter_t *count);

/* Wait until `rank`'s count is at least `value` (counts begin anew after 2^32); returns 0, or what `poll` has status. */
int counter_wait(counter_t *count, uint32_t value, int rank, const wait_policy_t *policy);
