#define _GNU_SOURCE
#include "engine.h"

#include <stdlib.h>
#include <string.h>

#define DEPTH 4  /* slots of a rank */
#define ALIGN 64 /* bytes: shards start at cache lines */

enum collective { BARRIER, ALL_REDUCE, REDUCE, BROADCAST, GATHER, SCATTER, REDUCE_SCATTER, ALL_TO_ALL };

typedef struct {
    _Atomic int32_t aborted; /* 1: a rank writes the reason, 2: the reason is complete */
    char unused[LINE - 4];
    char reason[ENGINE_REASON_BYTES];
} group_state_t;

typedef struct {
    counter_t progress, reduced, requested, reported;
    collective_desc_t recent[DEPTH]; /* a rank that no other waits for may be three collectives ahead */
    char report[ENGINE_REPORT_BYTES];
} rank_area_t;

struct engine {
    int rank, size;
    size_t slot_bytes, piece_bytes, short_bytes;
    uint32_t progress, reduced, first; /* this rank's counters, and `progress` when this collective began */
    int64_t number;
    uint64_t digest; /* of all collectives until now */
    int mismatched_rank;
    wait_policy_t policy;
    group_state_t *state;
    rank_area_t *areas;
    char *slots, *results;
};

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t round_to_pages(size_t bytes)
{
    return (bytes + 4095) & ~(size_t)4095;
}

size_t engine_bytes(int size, size_t slot_bytes)
{
    return round_to_pages(sizeof(group_state_t) + sizeof(rank_area_t) * size) + DEPTH * slot_bytes * (size + 1);
}

engine_t *engine_open(void *memory, int rank, int size, size_t slot_bytes, size_t piece_bytes, size_t short_bytes,
                      int spins, double poll_seconds, poll_fn poll)
{
    engine_t *e = calloc(1, sizeof *e);
    if (!e)
        return NULL;
    e->rank = rank;
    e->size = size;
    e->slot_bytes = slot_bytes;
    e->piece_bytes = min_size(piece_bytes, slot_bytes);
    e->short_bytes = min_size(short_bytes, slot_bytes);
    e->policy = (wait_policy_t){spins, poll_seconds, poll};
    e->state = memory;
    e->areas = (rank_area_t *)(e->state + 1);
    e->slots = (char *)memory + round_to_pages(sizeof(group_state_t) + sizeof(rank_area_t) * size);
    e->results = e->slots + DEPTH * slot_bytes * size;
    return e;
}

void engine_close(engine_t *engine)
{
    free(engine);
}

void engine_last_collective(engine_t *e, int rank, collective_desc_t *desc)
{
    collective_desc_t *recent = e->areas[rank].recent;
    *desc = recent[0];
    for (int i = 1; i < DEPTH; i++)
        if (recent[i].number > desc->number)
            *desc = recent[i];
}

int engine_mismatched_rank(engine_t *e)
{
    return e->mismatched_rank;
}

void engine_abort(engine_t *e, const char *reason)
{
    int32_t running = 0;
    if (atomic_compare_exchange_strong(&e->state->aborted, &running, 1)) {
        strncpy(e->state->reason, reason, sizeof e->state->reason - 1);
        atomic_store(&e->state->aborted, 2);
    }
}

const char *engine_abort_reason(engine_t *e)
{
    return atomic_load(&e->state->aborted) == 2 ? e->state->reason : NULL;
}

/* reports */

uint32_t engine_request_report(engine_t *e, int rank)
{
    return counter_increment(&e->areas[rank].requested);
}

static void keep_waiting(int rank, double seconds, int *status)
{
    (void)rank;
    (void)seconds;
    *status = 0;
}

uint32_t engine_wait_for_request(engine_t *e, uint32_t reported)
{
    wait_policy_t policy = {0, 3600, keep_waiting};
    counter_t *requested = &e->areas[e->rank].requested;
    counter_wait(requested, reported + 1, e->rank, &policy);
    return atomic_load(&requested->value);
}

void engine_report(engine_t *e, uint32_t request, const char *text)
{
    rank_area_t *mine = &e->areas[e->rank];
    strncpy(mine->report, text, sizeof mine->report - 1);
    counter_set(&mine->reported, request);
}

const char *engine_report_of(engine_t *e, int rank, uint32_t request)
{
    rank_area_t *area = &e->areas[rank];
    return (int32_t)(atomic_load(&area->reported.value) - request) >= 0 ? area->report : NULL;
}

/* slots and counters */

static char *slot(engine_t *e, int rank, uint32_t piece)
{
    return e->slots + ((size_t)rank * DEPTH + piece % DEPTH) * e->slot_bytes;
}

static char *result(engine_t *e, uint32_t piece)
{
    return e->results + (piece % DEPTH) * e->slot_bytes;
}

/* A rank's description of this collective. */
static collective_desc_t *desc_of(engine_t *e, int rank)
{
    return &e->areas[rank].recent[e->number % DEPTH];
}

/* Wait for another rank's progress. At the first piece, check that it runs the same collective. */
static int await_progress(engine_t *e, int rank, uint32_t value)
{
    rank_area_t *area = &e->areas[rank];
    int status = counter_wait(&area->progress, value, rank, &e->policy);
    if (!status && value == e->first + 1 && memcmp(desc_of(e, e->rank), desc_of(e, rank), sizeof(collective_desc_t))) {
        e->mismatched_rank = rank;
        status = MISMATCH;
    }
    return status ? status : atomic_load_explicit(&e->state->aborted, memory_order_relaxed) == 2 ? ABORTED : 0;
}

static int await_others(engine_t *e, uint32_t value)
{
    int status = 0;
    for (int rank = 0; rank < e->size && !status; rank++)
        if (rank != e->rank)
            status = await_progress(e, rank, value);
    return status;
}

static int await_reduced(engine_t *e, uint32_t value)
{
    int status = 0;
    for (int rank = 0; rank < e->size && !status; rank++)
        if (rank != e->rank)
            status = counter_wait(&e->areas[rank].reduced, value, rank, &e->policy);
    return status;
}

/* Wait until no rank reads slot `piece` any more. */
static int await_free(engine_t *e, uint32_t piece)
{
    return await_others(e, piece - 1);
}

/* Raise this rank's counter: it has filled its slot for `piece`, or read another rank's. */
static void publish_progress(engine_t *e, uint32_t piece)
{
    counter_set(&e->areas[e->rank].progress, piece + 1);
}

static uint64_t mix(uint64_t digest, uint64_t word)
{
    digest = (digest ^ word) * 0x9E3779B97F4A7C15;
    return digest ^ digest >> 32;
}

/* Describe the collective that this rank starts, for the other ranks. */
static void begin(engine_t *e, enum collective collective, int dtype, int op, int root, size_t bytes)
{
    e->number++;
    e->first = e->progress;
    uint64_t kind = (uint64_t)collective << 48 | (uint64_t)dtype << 40 | (uint64_t)op << 32 | (uint32_t)root;
    e->digest = mix(mix(e->digest, kind), bytes);
    *desc_of(e, e->rank) = (collective_desc_t){.number = e->number, .collective = collective, .dtype = dtype, .op = op,
                                               .root = root, .bytes = (int64_t)bytes, .digest = e->digest};
}

/* The number of pieces in `count`; an empty tensor has one. */
static size_t count_pieces(size_t count, size_t per_piece)
{
    return count ? (count + per_piece - 1) / per_piece : 1;
}

static int receives_result(engine_t *e, int root)
{
    return root < 0 || root == e->rank;
}

/* A collective. Stage 0 of a piece fills a slot, stage 1 reads the others' slots, stage 2 reads their results. */
typedef struct call {
    engine_t *engine;
    size_t count, per_piece; /* of the tensor, and of a piece: elements, or bytes */
    int (*stage)(const struct call *call, int stage, size_t index);
    int stages;
    const void *const *inputs;
    void *const *outputs;
    const size_t *input_bytes, *output_bytes;
    const char *input; /* of a reduction: this rank's elements */
    char *data;
    enum dtype dtype;
    enum op op;
    int root;
} call_t;

/* Take all pieces through all stages. Stage s of one piece alternates with stage s - 1 of the next. */
static int run(const call_t *call)
{
    engine_t *e = call->engine;
    size_t count = count_pieces(call->count, call->per_piece);
    int status = 0;
    for (size_t step = 0; step < count + call->stages - 1 && !status; step++)
        for (int stage = 0; stage < call->stages && !status; stage++)
            if (step >= (size_t)stage && step - stage < count)
                status = call->stage(call, stage, step - stage);
    e->progress += (uint32_t)count;
    if (call->stages == 3)
        e->reduced += (uint32_t)count;
    return status;
}

static size_t length(const call_t *call, size_t index)
{
    size_t done = index * call->per_piece;
    return call->count > done ? min_size(call->per_piece, call->count - done) : 0;
}

/* barrier */

int engine_barrier(engine_t *e)
{
    begin(e, BARRIER, 0, 0, 0, 0);
    publish_progress(e, e->progress);
    return await_others(e, ++e->progress);
}

/* all_reduce and reduce */

typedef struct {
    size_t low, high; /* bytes */
} shard_t;

static shard_t shard(engine_t *e, size_t bytes, int rank)
{
    size_t lines = (bytes + ALIGN - 1) / ALIGN, each = (lines + e->size - 1) / e->size * ALIGN;
    return (shard_t){min_size(bytes, each * rank), min_size(bytes, each * (rank + 1))};
}

/* Reduce one shard of a piece into the tensor, if this rank receives the result, and into the result slot.
   offset: the piece's, in bytes. */
static void reduce_shard(const call_t *call, size_t offset, char *results, shard_t part, uint32_t piece)
{
    engine_t *e = call->engine;
    const void *sources[e->size];
    for (int rank = 0; rank < e->size; rank++)
        sources[rank] = (rank == e->rank ? call->input + offset : slot(e, rank, piece)) + part.low;
    int receives = receives_result(e, call->root);
    void *first = receives ? call->data + offset + part.low : results + part.low;
    void *second = receives && results ? results + part.low : NULL;
    reduce(first, second, sources, e->size, (part.high - part.low) / dtype_bytes(call->dtype), call->dtype, call->op);
}

static int fill_for_reduction(const call_t *call, size_t offset, size_t bytes, uint32_t piece)
{
    engine_t *e = call->engine;
    shard_t mine = bytes <= e->short_bytes ? (shard_t){0, 0} : shard(e, bytes, e->rank);
    int status = await_free(e, piece);
    if (status)
        return status;
    const char *input = call->input + offset;
    memcpy(slot(e, e->rank, piece), input, mine.low);
    memcpy(slot(e, e->rank, piece) + mine.high, input + mine.high, bytes - mine.high);
    publish_progress(e, piece);
    return 0;
}

static int reduce_mine(const call_t *call, size_t offset, size_t bytes, uint32_t piece, uint32_t reduced)
{
    engine_t *e = call->engine;
    int status = await_others(e, piece + 1);
    if (!status)
        status = await_reduced(e, reduced - 1);
    if (status)
        return status;
    reduce_shard(call, offset, result(e, reduced), shard(e, bytes, e->rank), piece);
    counter_set(&e->areas[e->rank].reduced, reduced + 1);
    return 0;
}

static int copy_results(engine_t *e, char *data, size_t bytes, uint32_t reduced)
{
    shard_t mine = shard(e, bytes, e->rank);
    int status = await_reduced(e, reduced + 1);
    if (status)
        return status;
    memcpy(data, result(e, reduced), mine.low);
    memcpy(data + mine.high, result(e, reduced) + mine.high, bytes - mine.high);
    return 0;
}

static int all_reduce_stage(const call_t *call, int stage, size_t index)
{
    engine_t *e = call->engine;
    size_t bytes = length(call, index) * dtype_bytes(call->dtype);
    size_t offset = index * call->per_piece * dtype_bytes(call->dtype);
    uint32_t piece = e->progress + (uint32_t)index, reduced = e->reduced + (uint32_t)index;
    if (stage == 0)
        return fill_for_reduction(call, offset, bytes, piece);
    if (stage == 1)
        return reduce_mine(call, offset, bytes, piece, reduced);
    return receives_result(e, call->root) ? copy_results(e, call->data + offset, bytes, reduced) : 0;
}

static int reduce_short(const call_t *call, size_t bytes)
{
    engine_t *e = call->engine;
    int status = fill_for_reduction(call, 0, bytes, e->progress);
    if (!status && receives_result(e, call->root)) {
        status = await_others(e, e->progress + 1);
        if (!status)
            reduce_shard(call, 0, NULL, (shard_t){0, bytes}, e->progress);
    }
    e->progress++;
    return status;
}

int engine_all_reduce(engine_t *e, const void *input, void *data, size_t count, int dtype, int op, int root)
{
    size_t bytes = count * dtype_bytes(dtype);
    call_t call = {.engine = e, .count = count, .per_piece = e->piece_bytes / dtype_bytes(dtype), .stages = 3,
                   .stage = all_reduce_stage, .input = input, .data = data, .dtype = dtype, .op = op, .root = root};
    begin(e, root < 0 ? ALL_REDUCE : REDUCE, dtype, op, root, bytes);
    return bytes <= e->short_bytes ? reduce_short(&call, bytes) : run(&call);
}

/* broadcast and scatter: the root fills its slot, the others read their parts */

static int from_root_stage(const call_t *call, int stage, size_t index)
{
    engine_t *e = call->engine;
    (void)stage;
    uint32_t piece = e->progress + (uint32_t)index;
    size_t bytes = length(call, index), offset = index * call->per_piece;
    int is_scatter = call->inputs != NULL || call->outputs != NULL, is_root = call->root == e->rank;
    int status = is_root ? await_free(e, piece) : await_progress(e, call->root, piece + 1);
    if (status)
        return status;
    for (int rank = 0; is_root && is_scatter && rank < e->size; rank++)
        if (rank != e->rank)
            memcpy(slot(e, e->rank, piece) + rank * call->per_piece, (const char *)call->inputs[rank] + offset, bytes);
    if (is_root && !is_scatter)
        memcpy(slot(e, e->rank, piece), call->data + offset, bytes);
    if (!is_root)
        memcpy(call->data + offset, slot(e, call->root, piece) + (is_scatter ? e->rank * call->per_piece : 0), bytes);
    publish_progress(e, piece);
    return 0;
}

int engine_broadcast(engine_t *e, void *data, size_t bytes, int root)
{
    call_t call = {.engine = e, .count = bytes, .per_piece = e->piece_bytes, .stages = 1, .stage = from_root_stage,
                   .data = data, .root = root};
    begin(e, BROADCAST, 0, 0, root, bytes);
    return run(&call);
}

/* The largest part of a piece that each rank can have, in bytes. */
static size_t rank_share(engine_t *e)
{
    size_t each = e->piece_bytes / e->size;
    return each > ALIGN ? each / ALIGN * ALIGN : each / 8 * 8;
}

int engine_scatter(engine_t *e, const void *const *inputs, void *output, size_t bytes, int root)
{
    call_t call = {.engine = e, .count = bytes, .per_piece = rank_share(e), .stages = 1, .stage = from_root_stage,
                   .inputs = inputs, .outputs = &output, .data = output, .root = root};
    begin(e, SCATTER, 0, 0, root, bytes);
    if (root == e->rank)
        memmove(output, inputs[root], bytes);
    return run(&call);
}

/* gather, all_gather, all_to_all and reduce_scatter: each rank fills a slot, then reads its parts of the others' */

static int gather_stage(const call_t *call, int stage, size_t index)
{
    engine_t *e = call->engine;
    uint32_t piece = e->progress + (uint32_t)index;
    size_t bytes = length(call, index), offset = index * call->per_piece;
    int status = stage ? 0 : await_free(e, piece);
    if (status || (stage && !receives_result(e, call->root)))
        return status;
    if (stage == 0) {
        memcpy(slot(e, e->rank, piece), call->data + offset, bytes);
        publish_progress(e, piece);
        return 0;
    }
    for (int step = 1; step < e->size && !status; step++) {
        int rank = (e->rank + step) % e->size;
        status = await_progress(e, rank, piece + 1);
        if (!status)
            memcpy((char *)call->outputs[rank] + offset, slot(e, rank, piece), bytes);
    }
    return status;
}

int engine_gather(engine_t *e, const void *input, void *const *outputs, size_t bytes, int root)
{
    call_t call = {.engine = e, .count = bytes, .per_piece = e->piece_bytes, .stages = 2, .stage = gather_stage,
                   .data = (char *)input, .outputs = outputs, .root = root};
    begin(e, GATHER, 0, 0, root, bytes);
    if (receives_result(e, root))
        memmove(outputs[e->rank], input, bytes);
    return run(&call);
}

static int reduce_scatter_stage(const call_t *call, int stage, size_t index)
{
    engine_t *e = call->engine;
    uint32_t piece = e->progress + (uint32_t)index;
    size_t each = dtype_bytes(call->dtype), bytes = length(call, index) * each;
    size_t offset = index * call->per_piece * each, room = call->per_piece * each;
    int status = stage ? await_others(e, piece + 1) : await_free(e, piece);
    if (status)
        return status;
    const void *sources[e->size];
    for (int rank = 0; rank < e->size; rank++) {
        const char *mine = (const char *)call->inputs[rank] + offset;
        if (stage == 0 && rank != e->rank)
            memcpy(slot(e, e->rank, piece) + rank * room, mine, bytes);
        sources[rank] = rank == e->rank ? mine : slot(e, rank, piece) + e->rank * room;
    }
    if (stage == 0)
        publish_progress(e, piece);
    else
        reduce(call->data + offset, NULL, sources, e->size, length(call, index), call->dtype, call->op);
    return 0;
}

int engine_reduce_scatter(engine_t *e, const void *const *inputs, void *output, size_t count, int dtype, int op)
{
    call_t call = {.engine = e, .count = count, .per_piece = rank_share(e) / dtype_bytes(dtype), .stages = 2,
                   .stage = reduce_scatter_stage, .inputs = inputs, .data = output, .dtype = dtype, .op = op,
                   .root = -1};
    begin(e, REDUCE_SCATTER, dtype, op, -1, count * dtype_bytes(dtype));
    return run(&call);
}

/* The part of `bytes` that belongs to a piece. */
static size_t bytes_in_piece(const call_t *call, size_t index, size_t bytes)
{
    size_t done = index * call->per_piece;
    return bytes > done ? min_size(call->per_piece, bytes - done) : 0;
}

static int all_to_all_stage(const call_t *call, int stage, size_t index)
{
    engine_t *e = call->engine;
    uint32_t piece = e->progress + (uint32_t)index;
    size_t offset = index * call->per_piece;
    int status = stage ? await_others(e, piece + 1) : await_free(e, piece);
    for (int rank = 0; rank < e->size && !status; rank++) {
        if (rank == e->rank)
            continue;
        if (stage == 0)
            memcpy(slot(e, e->rank, piece) + rank * call->per_piece, (const char *)call->inputs[rank] + offset,
                   bytes_in_piece(call, index, call->input_bytes[rank]));
        else
            memcpy((char *)call->outputs[rank] + offset, slot(e, rank, piece) + e->rank * call->per_piece,
                   bytes_in_piece(call, index, call->output_bytes[rank]));
    }
    if (!status && stage == 0)
        publish_progress(e, piece);
    return status;
}

int engine_all_to_all(engine_t *e, const void *const *inputs, const size_t *input_bytes, void *const *outputs,
                      const size_t *output_bytes, size_t largest_bytes)
{
    call_t call = {.engine = e, .count = largest_bytes, .per_piece = rank_share(e), .stages = 2,
                   .stage = all_to_all_stage, .inputs = inputs, .outputs = outputs, .input_bytes = input_bytes,
                   .output_bytes = output_bytes};
    begin(e, ALL_TO_ALL, 0, 0, -1, largest_bytes);
    memmove(outputs[e->rank], inputs[e->rank], min_size(input_bytes[e->rank], output_bytes[e->rank]));
    return run(&call);
}
