/* Collectives as operations of TensorFlow. A thread of Python's takes each, does it on the tensors where they lie, and
   says so (smdistributed/core/tensorflow/operations.py); TensorFlow's own waits. (An asynchronous kernel would not block
   it, but the C interface gives one a callback that dies when the kernel returns.)

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

/* TF_INTERNAL: sessions that watch themselves take up anew after TF_ABORTED, and would for ever. Input 0 is what keeps
   the order. */
enum { INTERNAL = 13, NAME_BYTES = 16, FIRST_TENSOR = 1 };

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
    X(TF_KernelBuilder *, NewKernelBuilder,                                                                            \
      (const char *, const char *, create_t *, compute_t *, void (*)(void *)))                                         \
    X(void, RegisterKernelBuilder, (const char *, TF_KernelBuilder *, TF_Status *))                                    \
    X(void, OpKernelConstruction_GetAttrString,                                                                        \
      (TF_OpKernelConstruction *, const char *, char *, size_t, TF_Status *))                                          \
    X(void, OpKernelConstruction_GetAttrInt32, (TF_OpKernelConstruction *, const char *, int32_t *, TF_Status *))      \
    X(void, OpKernelConstruction_Failure, (TF_OpKernelConstruction *, TF_Status *))                                    \
    X(void, OpKernelContext_Failure, (TF_OpKernelContext *, TF_Status *))                                              \
    X(int, NumInputs, (TF_OpKernelContext *))                                                                          \
    X(void, GetInput, (TF_OpKernelContext *, int, TF_Tensor **, TF_Status *))                                          \
    X(TF_Tensor *, ForwardInputOrAllocateOutput,                                                                       \
      (TF_OpKernelContext *, const int *, int, int, const int64_t *, int, int *, TF_Status *))                         \
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

enum kind { ALL_REDUCE, BROADCAST };
static const char *const NAMES[] = {"SmddpAllReduce", "SmddpBroadcast"};

/* What a node of a graph does. */
typedef struct {
    enum kind kind;
    int root;
    char reduction[NAME_BYTES];
} node_t;

/* A node that has its inputs. The first fields are what Python sees. */
typedef struct work {
    int32_t kind, dtype, root, count;
    char reduction[NAME_BYTES];
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

static struct {
    pthread_mutex_t lock;
    pthread_cond_t filled;
    work_t *first, *last;
} queue = {.lock = PTHREAD_MUTEX_INITIALIZER, .filled = PTHREAD_COND_INITIALIZER};

static void put(work_t *work)
{
    pthread_mutex_lock(&queue.lock);
    if (queue.last)
        queue.last->next = work;
    else
        queue.first = work;
    queue.last = work;
    pthread_cond_signal(&queue.filled);
    pthread_mutex_unlock(&queue.lock);
}

/* The next piece of work, in the order in which TensorFlow has come to them; waits for one. */
work_t *operations_next(void)
{
    pthread_mutex_lock(&queue.lock);
    while (!queue.first)
        pthread_cond_wait(&queue.filled, &queue.lock);
    work_t *work = queue.first;
    queue.first = work->next;
    if (!queue.first)
        queue.last = NULL;
    pthread_mutex_unlock(&queue.lock);
    return work;
}

static void fail(TF_OpKernelContext *context, TF_Status *status)
{
    tf.OpKernelContext_Failure(context, status);
    tf.DeleteStatus(status);
}

/* The work is done, or has failed for that reason (NULL: it has not). */
void operations_finish(work_t *work, const char *reason)
{
    if (reason) {
        TF_Status *status = tf.NewStatus();
        tf.SetStatus(status, INTERNAL, reason);
        fail(work->context, status);
    }
    pthread_mutex_lock(&queue.lock);
    work->is_done = true;
    pthread_cond_signal(&work->done);
    pthread_mutex_unlock(&queue.lock);
}

static void wait_for(work_t *work)
{
    pthread_mutex_lock(&queue.lock);
    while (!work->is_done)
        pthread_cond_wait(&work->done, &queue.lock);
    pthread_mutex_unlock(&queue.lock);
}

static void forget(work_t *work)
{
    for (int i = 0; i < work->count; i++) {
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
    node->kind = kind;
    if (kind == ALL_REDUCE)
        tf.OpKernelConstruction_GetAttrString(construction, "reduction", node->reduction, NAME_BYTES - 1, status);
    else
        tf.OpKernelConstruction_GetAttrInt32(construction, "root", &node->root, status);
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

static work_t *new_work(const node_t *node, int count)
{
    size_t pointers = (size_t)count * sizeof(void *);
    char *memory = calloc(1, sizeof(work_t) + 4 * pointers + (size_t)count * sizeof(int64_t));
    work_t *work = (work_t *)memory;
    work->kind = node->kind;
    work->root = node->root;
    memcpy(work->reduction, node->reduction, NAME_BYTES);
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

static void compute(void *node, TF_OpKernelContext *context)
{
    int count = tf.NumInputs(context) - FIRST_TENSOR;
    work_t *work = new_work(node, count);
    TF_Status *status = tf.NewStatus();
    work->context = context;
    for (int i = 0; i < count && !tf.GetCode(status); i++)
        take(work, i, status);
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

static void define(enum kind kind, const char *attribute, create_t *create_node, TF_Status *status)
{
    TF_OpDefinitionBuilder *builder = tf.NewOpDefinitionBuilder(NAMES[kind]);
    tf.OpDefinitionBuilderAddInput(builder, "order: resource");
    tf.OpDefinitionBuilderAddInput(builder, "tensors: N * T");
    tf.OpDefinitionBuilderAddOutput(builder, "results: N * T");
    tf.OpDefinitionBuilderAddAttr(builder, "N: int >= 1");
    tf.OpDefinitionBuilderAddAttr(builder, "T: {float, double, half, bfloat16, int8, uint8, int16, uint16, int32, "
                                           "uint32, int64, uint64, bool}");
    tf.OpDefinitionBuilderAddAttr(builder, attribute);
    tf.OpDefinitionBuilderSetIsStateful(builder, true);
    tf.OpDefinitionBuilderSetShapeInferenceFunction(builder, infer);
    tf.RegisterOpDefinition(builder, status);
    if (!tf.GetCode(status))
        tf.RegisterKernelBuilder(NAMES[kind], tf.NewKernelBuilder(NAMES[kind], "CPU", create_node, compute, free),
                                 status);
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
    define(ALL_REDUCE, "reduction: string", create_all_reduce, status);
    if (!tf.GetCode(status))
        define(BROADCAST, "root: int", create_broadcast, status);
    registered = tf.GetCode(status) ? 2 : 0;
    tf.DeleteStatus(status);
}

int operations_registered(void)
{
    return registered;
}
