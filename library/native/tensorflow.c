/* Collectives, and messages from rank to rank, as operations of TensorFlow. A thread of Python's takes each, does it on
   the tensors where they lie, and says so (smdistributed/core/tensorflow/operations.py); TensorFlow's own waits. (An
   asynchronous kernel would not block it, but the C interface gives one a callback that dies when the kernel returns.)

   Written against TensorFlow's C interface (tensorflow/c/{ops,kernels,tf_tensor,tf_status}.h), whose functions are looked
   up in the TensorFlow that has loaded this: nothing of it is needed to compile, and one result serves its versions. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* TF_INTERNAL: sessions that watch themselves take up anew after TF_ABORTED, and would for ever. Input 0 of collectives
   is what keeps their order. TensorFlow's own kernels know tensors of up to 8 dimensions. */
enum { FLOAT = 1, NAME_BYTES = 32, FIRST_TENSOR = 1, MOST_DIMS = 8 };
enum { INVALID_ARGUMENT = 3, RESOURCE_EXHAUSTED = 8, INTERNAL = 13 };

#define NO_MEMORY "There is no memory for an operation of smdistributed."

typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
typedef struct TF_ShapeHandle TF_ShapeHandle;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;

typedef void *create_t(TF_OpKernelConstruction *);
typedef void compute_t(void *, TF_OpKernelContext *);
typedef void shapes_t(TF_ShapeInferenceContext *, TF_Status *);

#define FUNCTIONS(X)                                                                                                   \
    X(TF_Status *, NewStatus, (void))                                                                                  \
    X(void, DeleteStatus, (TF_Status *))                                                                               \
    X(void, SetStatus, (TF_Status *, int, const char *))                                                               \
    X(int, GetCode, (const TF_Status *))                                                                               \
    X(TF_OpDefinitionBuilder *, NewOpDefinitionBuilder, (const char *))                                                \
    X(void, OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder *, const char *))                                      \
    X(void, OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder *, const char *))                                     \
    X(void, OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder *, const char *))                                    \
    X(void, OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder *, bool))                                        \
    X(void, OpDefinitionBuilderSetShapeInferenceFunction, (TF_OpDefinitionBuilder *, shapes_t *))                      \
    X(void, RegisterOpDefinition, (TF_OpDefinitionBuilder *, TF_Status *))                                             \
    X(int64_t, ShapeInferenceContextNumInputs, (TF_ShapeInferenceContext *))                                           \
    X(TF_ShapeHandle *, NewShapeHandle, (void))                                                                        \
    X(void, DeleteShapeHandle, (TF_ShapeHandle *))                                                                     \
    X(void, ShapeInferenceContextGetInput, (TF_ShapeInferenceContext *, int, TF_ShapeHandle *, TF_Status *))           \
    X(void, ShapeInferenceContextSetOutput, (TF_ShapeInferenceContext *, int, TF_ShapeHandle *, TF_Status *))          \
    X(void, ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext *, TF_Status *))                           \
    X(TF_ShapeHandle *, ShapeInferenceContextScalar, (TF_ShapeInferenceContext *))                                     \
    X(TF_KernelBuilder *, NewKernelBuilder,                                                                            \
      (const char *, const char *, create_t *, compute_t *, void (*)(void *)))                                         \
    X(void, RegisterKernelBuilder, (const char *, TF_KernelBuilder *, TF_Status *))                                    \
    X(void, OpKernelConstruction_GetAttrString,                                                                        \
      (TF_OpKernelConstruction *, const char *, char *, size_t, TF_Status *))                                          \
    X(void, OpKernelConstruction_GetAttrInt32, (TF_OpKernelConstruction *, const char *, int32_t *, TF_Status *))      \
    X(void, OpKernelConstruction_GetAttrType, (TF_OpKernelConstruction *, const char *, int *, TF_Status *))           \
    X(void, OpKernelConstruction_Failure, (TF_OpKernelConstruction *, TF_Status *))                                    \
    X(void, OpKernelContext_Failure, (TF_OpKernelContext *, TF_Status *))                                              \
    X(int, NumInputs, (TF_OpKernelContext *))                                                                          \
    X(void, GetInput, (TF_OpKernelContext *, int, TF_Tensor **, TF_Status *))                                          \
    X(TF_Tensor *, ForwardInputOrAllocateOutput,                                                                       \
      (TF_OpKernelContext *, const int *, int, int, const int64_t *, int, int *, TF_Status *))                         \
    X(TF_Tensor *, AllocateOutput,                                                                                     \
      (TF_OpKernelContext *, int, int, const int64_t *, int, size_t, TF_Status *))                                     \
    X(size_t, DataTypeSize, (int))                                                                                     \
    X(void, DeleteTensor, (TF_Tensor *))                                                                               \
    X(int, TensorType, (const TF_Tensor *))                                                                            \
    X(int, NumDims, (const TF_Tensor *))                                                                               \
    X(int64_t, Dim, (const TF_Tensor *, int))                                                                          \
    X(int64_t, TensorElementCount, (const TF_Tensor *))                                                                \
    X(void *, TensorData, (const TF_Tensor *))

#define DECLARE(result, name, arguments) result(*name) arguments;
static struct {
    FUNCTIONS(DECLARE)
} tf;

enum kind { ALL_REDUCE, BROADCAST, SEND, RECEIVE };
static const char *const NAMES[] = {"SmddpAllReduce", "SmddpBroadcast", "SmpSend", "SmpReceive"};
static const char *const NAME_ATTRIBUTES[] = {"reduction", NULL, "label", "label"};
static const char *const RANK_ATTRIBUTES[] = {NULL, "root", "rank", "rank"};

/* What a node of a graph does. name: the reduction, or what the message is called. */
typedef struct {
    enum kind kind;
    int rank, dtype;
    char name[NAME_BYTES];
} node_t;

/* A node that has its inputs. The first fields are what Python sees. */
typedef struct work {
    int32_t kind, dtype, rank, count, dims;
    char name[NAME_BYTES];
    int64_t shape[MOST_DIMS]; /* of what is sent or was received */
    void **inputs;     /* of each tensor */
    void **data;       /* where its result goes: to the same place, if nobody else reads it */
    int64_t *elements; /* of each */
    /* --- */
    TF_Tensor **given, **tensors;
    TF_OpKernelContext *context;
    struct work *next;
    bool is_done;
    pthread_cond_t done;
} work_t;

/* One for collectives, one for messages: what waits for a message keeps no collective. */
typedef struct {
    pthread_cond_t filled;
    work_t *first, *last;
} queue_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static queue_t queues[] = {{.filled = PTHREAD_COND_INITIALIZER}, {.filled = PTHREAD_COND_INITIALIZER}};

static void put(work_t *work)
{
    queue_t *queue = &queues[work->kind >= SEND];
    pthread_mutex_lock(&lock);
    if (queue->last)
        queue->last->next = work;
    else
        queue->first = work;
    queue->last = work;
    pthread_cond_signal(&queue->filled);
    pthread_mutex_unlock(&lock);
}

/* The next piece of work, in the order in which TensorFlow has come to them; waits for one. */
work_t *operations_next(int messages)
{
    queue_t *queue = &queues[messages];
    pthread_mutex_lock(&lock);
    while (!queue->first)
        pthread_cond_wait(&queue->filled, &lock);
    work_t *work = queue->first;
    queue->first = work->next;
    if (!queue->first)
        queue->last = NULL;
    pthread_mutex_unlock(&lock);
    return work;
}

static void fail(TF_OpKernelContext *context, TF_Status *status)
{
    tf.OpKernelContext_Failure(context, status);
    tf.DeleteStatus(status);
}

/* Memory of that shape for what was received; NULL where TensorFlow has none. */
void *operations_allocate(work_t *work)
{
    TF_Status *status = tf.NewStatus();
    size_t bytes = tf.DataTypeSize(work->dtype);
    for (int i = 0; i < work->dims; i++)
        bytes *= (size_t)work->shape[i];
    TF_Tensor *output = tf.AllocateOutput(work->context, 0, work->dtype, work->shape, work->dims, bytes, status);
    if (tf.GetCode(status)) {
        fail(work->context, status);
        return NULL;
    }
    tf.DeleteStatus(status);
    work->tensors[work->count++] = output;
    return tf.TensorData(output);
}

/* The work is done, or has failed for that reason (NULL: it has not). */
void operations_finish(work_t *work, const char *reason)
{
    if (reason) {
        TF_Status *status = tf.NewStatus();
        tf.SetStatus(status, INTERNAL, reason);
        fail(work->context, status);
    }
    pthread_mutex_lock(&lock);
    work->is_done = true;
    pthread_cond_signal(&work->done);
    pthread_mutex_unlock(&lock);
}

static void wait_for(work_t *work)
{
    pthread_mutex_lock(&lock);
    while (!work->is_done)
        pthread_cond_wait(&work->done, &lock);
    pthread_mutex_unlock(&lock);
}

static void forget(work_t *work)
{
    for (int i = 0; i < work->count; i++) {
        if (work->tensors[i])
            tf.DeleteTensor(work->tensors[i]);
        if (work->given[i])
            tf.DeleteTensor(work->given[i]);
    }
    pthread_cond_destroy(&work->done);
    free(work);
}

static void *create(TF_OpKernelConstruction *construction, enum kind kind)
{
    node_t *node = calloc(1, sizeof *node);
    TF_Status *status = tf.NewStatus();
    if (!node) {
        tf.SetStatus(status, RESOURCE_EXHAUSTED, NO_MEMORY);
        tf.OpKernelConstruction_Failure(construction, status);
        tf.DeleteStatus(status);
        return NULL;
    }
    node->kind = kind;
    if (NAME_ATTRIBUTES[kind])
        tf.OpKernelConstruction_GetAttrString(construction, NAME_ATTRIBUTES[kind], node->name, NAME_BYTES - 1, status);
    if (RANK_ATTRIBUTES[kind] && !tf.GetCode(status))
        tf.OpKernelConstruction_GetAttrInt32(construction, RANK_ATTRIBUTES[kind], &node->rank, status);
    if (kind == RECEIVE && !tf.GetCode(status))
        tf.OpKernelConstruction_GetAttrType(construction, "T", &node->dtype, status);
    if (tf.GetCode(status))
        tf.OpKernelConstruction_Failure(construction, status);
    tf.DeleteStatus(status);
    return node;
}

static void *create_all_reduce(TF_OpKernelConstruction *construction)
{
    return create(construction, ALL_REDUCE);
}

static void *create_broadcast(TF_OpKernelConstruction *construction)
{
    return create(construction, BROADCAST);
}

static void *create_send(TF_OpKernelConstruction *construction)
{
    return create(construction, SEND);
}

static void *create_receive(TF_OpKernelConstruction *construction)
{
    return create(construction, RECEIVE);
}

/* NULL: there is no memory for it. */
static work_t *new_work(const node_t *node, int count)
{
    size_t pointers = (size_t)count * sizeof(void *);
    char *memory = calloc(1, sizeof(work_t) + 4 * pointers + (size_t)count * sizeof(int64_t));
    if (!memory)
        return NULL;
    work_t *work = (work_t *)memory;
    work->kind = node->kind;
    work->rank = node->rank;
    work->dtype = node->dtype;
    memcpy(work->name, node->name, NAME_BYTES);
    pthread_cond_init(&work->done, NULL);
    work->inputs = (void **)(memory + sizeof(work_t));
    work->data = work->inputs + count;
    work->given = (TF_Tensor **)(work->data + count);
    work->tensors = work->given + count;
    work->elements = (int64_t *)(work->tensors + count);
    return work;
}

/* Take the input of that number, and its output: the same memory where nobody else reads it. */
static void take(work_t *work, int index, TF_Status *status)
{
    int number = index + FIRST_TENSOR, forwarded = -1;
    TF_Tensor *input = NULL;
    tf.GetInput(work->context, number, &input, status);
    if (tf.GetCode(status))
        return;
    int dims = tf.NumDims(input);
    int64_t shape[dims + 1];
    for (int i = 0; i < dims; i++)
        shape[i] = tf.Dim(input, i);
    tf.DeleteTensor(input); /* one reader less: it can be handed on only where there is none */
    TF_Tensor *output =
        tf.ForwardInputOrAllocateOutput(work->context, &number, 1, index, shape, dims, &forwarded, status);
    if (tf.GetCode(status))
        return;
    work->tensors[work->count++] = output;
    work->inputs[index] = work->data[index] = tf.TensorData(output);
    work->elements[index] = tf.TensorElementCount(output);
    work->dtype = tf.TensorType(output);
    if (forwarded >= 0)
        return;
    tf.GetInput(work->context, number, &work->given[index], status);
    if (!tf.GetCode(status))
        work->inputs[index] = tf.TensorData(work->given[index]);
}

/* Take the tensor to send, and make the token that says that it was sent. */
static void take_message(work_t *work, TF_Status *status)
{
    TF_Tensor *input = NULL;
    tf.GetInput(work->context, 0, &input, status);
    if (tf.GetCode(status))
        return;
    work->given[0] = input;
    work->count = 1;
    work->dims = tf.NumDims(input);
    if (work->dims > MOST_DIMS) {
        tf.SetStatus(status, INVALID_ARGUMENT, "A tensor of more than 8 dimensions cannot be sent to another stage.");
        return;
    }
    for (int i = 0; i < work->dims; i++)
        work->shape[i] = tf.Dim(input, i);
    work->dtype = tf.TensorType(input);
    work->inputs[0] = tf.TensorData(input);
    work->elements[0] = tf.TensorElementCount(input);
    work->tensors[0] = tf.AllocateOutput(work->context, 0, FLOAT, NULL, 0, sizeof(float), status);
    if (!tf.GetCode(status))
        *(float *)tf.TensorData(work->tensors[0]) = 0;
}

static void take_inputs(work_t *work, TF_Status *status)
{
    int count = tf.NumInputs(work->context) - FIRST_TENSOR;
    if (work->kind == SEND)
        take_message(work, status);
    else if (work->kind != RECEIVE)
        for (int i = 0; i < count && !tf.GetCode(status); i++)
            take(work, i, status);
}

static void compute(void *node, TF_OpKernelContext *context)
{
    work_t *work = new_work(node, tf.NumInputs(context) + 1);
    TF_Status *status = tf.NewStatus();
    if (!work) {
        tf.SetStatus(status, RESOURCE_EXHAUSTED, NO_MEMORY);
        fail(context, status);
        return;
    }
    work->context = context;
    take_inputs(work, status);
    if (tf.GetCode(status)) {
        fail(context, status);
    } else {
        tf.DeleteStatus(status);
        put(work);
        wait_for(work);
    }
    forget(work);
}

/* Each output has the shape of its input. */
static void infer(TF_ShapeInferenceContext *context, TF_Status *status)
{
    int64_t count = tf.ShapeInferenceContextNumInputs(context) - FIRST_TENSOR;
    TF_ShapeHandle *shape = tf.NewShapeHandle();
    for (int i = 0; i < count && !tf.GetCode(status); i++) {
        tf.ShapeInferenceContextGetInput(context, i + FIRST_TENSOR, shape, status);
        if (!tf.GetCode(status))
            tf.ShapeInferenceContextSetOutput(context, i, shape, status);
    }
    tf.DeleteShapeHandle(shape);
}

/* A token is a scalar. */
static void infer_token(TF_ShapeInferenceContext *context, TF_Status *status)
{
    TF_ShapeHandle *shape = tf.ShapeInferenceContextScalar(context);
    tf.ShapeInferenceContextSetOutput(context, 0, shape, status);
    tf.DeleteShapeHandle(shape);
}

#define TYPES "{float, double, half, bfloat16, int8, uint8, int16, uint16, int32, uint32, int64, uint64, bool}"

/* parts: inputs, "->", outputs, "->", attributes. */
static void define(enum kind kind, const char *const *parts, shapes_t *shapes, create_t *create_node, TF_Status *status)
{
    void (*const add[])(TF_OpDefinitionBuilder *, const char *) = {
        tf.OpDefinitionBuilderAddInput, tf.OpDefinitionBuilderAddOutput, tf.OpDefinitionBuilderAddAttr};
    TF_OpDefinitionBuilder *builder = tf.NewOpDefinitionBuilder(NAMES[kind]);
    for (int sort = 0; *parts; parts++)
        if (strcmp(*parts, "->"))
            add[sort](builder, *parts);
        else
            sort++;
    tf.OpDefinitionBuilderSetIsStateful(builder, true);
    tf.OpDefinitionBuilderSetShapeInferenceFunction(builder, shapes);
    tf.RegisterOpDefinition(builder, status);
    if (!tf.GetCode(status))
        tf.RegisterKernelBuilder(NAMES[kind], tf.NewKernelBuilder(NAMES[kind], "CPU", create_node, compute, free),
                                 status);
}

static void define_all(TF_Status *status)
{
#define COLLECTIVE "order: resource", "tensors: N * T", "->", "results: N * T", "->", "N: int >= 1", "T: " TYPES
#define MESSAGE "T: " TYPES, "rank: int", "label: string"
    define(ALL_REDUCE, (const char *[]){COLLECTIVE, "reduction: string", NULL}, infer, create_all_reduce, status);
    if (!tf.GetCode(status))
        define(BROADCAST, (const char *[]){COLLECTIVE, "root: int", NULL}, infer, create_broadcast, status);
    if (!tf.GetCode(status))
        define(SEND, (const char *[]){"tensor: T", "->", "token: float", "->", MESSAGE, NULL}, infer_token, create_send,
               status);
    if (!tf.GetCode(status))
        define(RECEIVE,
               (const char *[]){"anchors: Anchors", "->", "tensor: T", "->", MESSAGE, "Anchors: list(type) >= 0", NULL},
               tf.ShapeInferenceContextSetUnknownShape, create_receive, status);
}

static bool find_functions(void)
{
    void *library = dlopen("libtensorflow_framework.so.2", RTLD_NOW | RTLD_NOLOAD);
    if (!library)
        return false;
#define FIND(result, name, arguments) *(void **)&tf.name = dlsym(library, "TF_" #name);
    FUNCTIONS(FIND)
#define FOUND(result, name, arguments) &&tf.name
    return true FUNCTIONS(FOUND);
}

/* 0: TensorFlow knows the operations; 1: this process has no TensorFlow of a known kind; 2: it refused them. */
static int registered = 1;

__attribute__((constructor)) static void register_operations(void)
{
    if (!find_functions())
        return;
    TF_Status *status = tf.NewStatus();
    define_all(status);
    registered = tf.GetCode(status) ? 2 : 0;
    tf.DeleteStatus(status);
}

int operations_registered(void)
{
    return registered;
}
