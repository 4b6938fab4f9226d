/* Collectives of the ranks of one host through memory that they share.

   Tensors travel in pieces. A rank copies a piece into a slot of its own and raises a count; the others read it there.
   In a reduction each rank reduces its shard of the piece, from the others' slots and its own tensor, into its tensor
   and a slot for results, from which the others copy it. Copying in the next piece, reducing this one and copying out
   the last one take turns, so that nobody waits for long; and the slots are so small that they stay in the processor's
   caches: memory sees each tensor read once and written once. A short message is reduced by each rank for itself.

   A slot is used again four pieces later: a rank writes piece k when all others have raised their counts for piece
   k - 2, which they do after they have read piece k - 4.

   A rank that waits for another compares what the two do, and have done before: ranks that have come apart are told so,
   at the latest when next all wait for all.

   Functions return 0, or what `poll` status when it ended a wait, or one of the codes below. After that the ranks do not
   agree any more where they are: the engine is done with, on this rank; the others are told (ABORTED). */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "counter.h"
#include "reduce.h"

enum { ABORTED = -1, MISMATCH = -2 };

/* What a rank does, as the others see it. Numbers as in smdistributed/core/native.py. */
typedef struct {
    int64_t number; /* of this collective, from 1 */
    int32_t collective, dtype, op, root;
    int64_t bytes;
    uint64_t digest; /* of this and all collectives before: a root need not wait for those who differ */
    char unused[LINE - 40];
} collective_desc_t;

typedef struct engine engine_t;

/* How many bytes `size` ranks share, with slots of `slot_bytes` (a multiple of 4096). */
size_t engine_bytes(int size, size_t slot_bytes);

/* Join in memory that was all zero when the first rank came; NULL: no memory. */
engine_t *engine_open(void *memory, int rank, int size, size_t slot_bytes, size_t piece_bytes, size_t short_bytes,
                      int spins, double poll_seconds, poll_fn poll);
void engine_close(engine_t *engine);

/* Where another rank is; `rank` may be one's own. */
void engine_last_collective(engine_t *engine, int rank, collective_desc_t *recent);
/* The rank that has differed after MISMATCH. */
int engine_mismatched_rank(engine_t *engine);
/* Tell all ranks that this one goes no further, and why; the first to do so is heard. */
#define ENGINE_REASON_BYTES 4096
void engine_abort(engine_t *engine, const char *reason);
/* What a rank has status when it broke the engine; NULL: none has. */
const char *engine_abort_reason(engine_t *engine);

/* What a rank is about, in words. Each answers in a thread that waits for questions: how many there were comes back. */
#define ENGINE_REPORT_BYTES 4096
uint32_t engine_request_report(engine_t *engine, int rank);
uint32_t engine_wait_for_request(engine_t *engine, uint32_t reported);
void engine_report(engine_t *engine, uint32_t request, const char *text);
/* NULL: there is none yet. */
const char *engine_report_of(engine_t *engine, int rank, uint32_t request);

int engine_barrier(engine_t *engine);
/* root: the rank that gets the result, in `data`; -1: all do. input: this rank's elements; it may be `data`. */
int engine_all_reduce(engine_t *engine, const void *input, void *data, size_t count, int dtype, int op, int root);
int engine_broadcast(engine_t *engine, void *data, size_t bytes, int root);
/* outputs: of each rank, `bytes`; NULL where this rank wants none (root: who wants them; -1: all). */
int engine_gather(engine_t *engine, const void *input, void *const *outputs, size_t bytes, int root);
/* inputs: for each rank, `bytes`; NULL on all ranks but the root. */
int engine_scatter(engine_t *engine, const void *const *inputs, void *output, size_t bytes, int root);
int engine_reduce_scatter(engine_t *engine, const void *const *inputs, void *output, size_t count, int dtype, int op);
/* most: the largest of all ranks' sizes, the same on all. */
int engine_all_to_all(engine_t *engine, const void *const *inputs, const size_t *input_bytes, void *const *outputs,
                      const size_t *output_bytes, size_t most);
