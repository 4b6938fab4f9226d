/* Collectives of the ranks of one host through shared memory.

   Tensors travel in pieces. A rank copies a piece into one of its slots and raises its progress counter; the other
   ranks read the piece there. In a reduction each rank reduces its shard of the piece, from the other ranks' slots and
   its own tensor. The result goes into its tensor and into a result slot, from which the other ranks copy it. Three stages take turns, so
   that no rank waits long: copy in the next piece, reduce this one, copy out the last one. The slots are so small that
   they stay in the processor's caches: memory sees each tensor read once and written once. Each rank reduces a short
   message for itself.

   A slot is reused four pieces later. A rank writes piece k when all others have raised their counters for piece k - 2.
   They do that after they have read piece k - 4.

   A rank that waits for another compares their collectives, and a digest of all earlier ones. So a mismatch is
   reported at the latest when all ranks next wait for each other.

   Functions return 0, or the status with which `poll` ended a wait, or one of the codes below. After a status other
   than 0 the ranks disagree about their position: this rank must stop using the C engine, and the others get ABORTED. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "counter.h"
#include "reduce.h"

enum { ABORTED = -1, MISMATCH = -2 };

/* A rank's collective, as the other ranks see it. Numbers as in smdistributed/core/native.py. */
typedef struct {
    int64_t number; /* of this collective, from 1 */
    int32_t collective, dtype, op, root;
    int64_t bytes;
    uint64_t digest; /* of this and all earlier collectives: a root does not wait for ranks that differ */
    char unused[LINE - 40];
} collective_desc_t;

typedef struct engine engine_t;

/* The bytes that `size` ranks share, with slots of `slot_bytes` (a multiple of 4096). */
size_t engine_bytes(int size, size_t slot_bytes);

/* Join the group in memory that was all zero when the first rank came. NULL: out of memory. */
engine_t *engine_open(void *memory, int rank, int size, size_t slot_bytes, size_t piece_bytes, size_t short_bytes,
                      int spins, double poll_seconds, poll_fn poll);
void engine_close(engine_t *engine);

/* The latest collective of a rank, which may be this one. */
void engine_last_collective(engine_t *engine, int rank, collective_desc_t *desc);
/* After MISMATCH: the rank that called another collective. */
int engine_mismatched_rank(engine_t *engine);
/* End the group for all ranks, with a reason; the first reason is kept. */
#define ENGINE_REASON_BYTES 4096
void engine_abort(engine_t *engine, const char *reason);
/* The reason of the rank that ended the group; NULL: no rank has. */
const char *engine_abort_reason(engine_t *engine);

/* Reports: a rank asks another one where its script is. A thread of each rank waits for requests and writes reports;
   requests are numbered from 1. */
#define ENGINE_REPORT_BYTES 4096
uint32_t engine_request_report(engine_t *engine, int rank);
/* Blocks until there are more requests than `reported`; returns their number. */
uint32_t engine_wait_for_request(engine_t *engine, uint32_t reported);
void engine_report(engine_t *engine, uint32_t request, const char *text);
/* NULL: that rank has not reported yet. */
const char *engine_report_of(engine_t *engine, int rank, uint32_t request);

int engine_barrier(engine_t *engine);
/* root: the rank that gets the result, in `data` (-1: all do). input: this rank's elements; it may be `data`. */
int engine_all_reduce(engine_t *engine, const void *input, void *data, size_t count, int dtype, int op, int root);
int engine_broadcast(engine_t *engine, void *data, size_t bytes, int root);
/* outputs: one for each rank, of `bytes`; NULL if this rank gets none. root: the rank that gets them (-1: all do). */
int engine_gather(engine_t *engine, const void *input, void *const *outputs, size_t bytes, int root);
/* inputs: one for each rank, of `bytes`; NULL on all ranks but the root. */
int engine_scatter(engine_t *engine, const void *const *inputs, void *output, size_t bytes, int root);
int engine_reduce_scatter(engine_t *engine, const void *const *inputs, void *output, size_t count, int dtype, int op);
/* largest_bytes: the largest of all ranks' sizes, the same on all. */
int engine_all_to_all(engine_t *engine, const void *const *inputs, const size_t *input_bytes, void *const *outputs,
                      const size_t *output_bytes, size_t largest_bytes);
