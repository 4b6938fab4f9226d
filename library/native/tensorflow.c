/* Collectives, and messages between ranks, as operations of TensorFlow. TensorFlow's thread queues an operation and
   waits; a thread of Python runs it on the tensors in place (smdistributed/core/tensorflow/operations.py). (An
   asynchronous kernel would not block TensorFlow's thread, but in the C interface its callback dies when the kernel
   returns.)

   Written against TensorFlow's C interface (tensorflow/c/{ops,kernels,tf_tensor,tf_status}.h). Its functions are looked
   up in the TensorFlow that loads this library: compiling needs no TensorFlow, and one library serves all versions. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Errors are TF_INTERNAL: monitored sessions retry after TF_ABORTED, for ever. Input 0 of a collective is the resource
   that orders collectives. TensorFlow's own kernels support up to 8 dimensions. */
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

/* The attributes of an operation in a graph. name: the reduction, or a message's label. */
typedef struct {
    enum kind kind;
    int rank, dtype;
    char name[NAME_BYTES];
} kernel_t;

/* One run of an operation, with its inputs. Python reads the fields above the line. */
typedef struct operation {
    int32_t kind, dtype, rank, count, dims;
    char name[NAME_BYTES];
    int64_t shape[MOST_DIMS]; /* of the tensor that is sent or was received */
    void **inputs;     /* of each tensor */
    void **data;       /* where its result goes: in place, if the tensor has no other reader */
    int64_t *elements; /* of each tensor */
    /* --- */
    TF_Tensor **given, **tensors;
    TF_OpKernelContext *context;
    struct operation *next;
    bool is_done;
    pthread_cond_t done;
} operation_t;

/* One for collectives, one for messages: a wait for a message must not block collectives. */
typedef struct {
    pthread_cond_t filled;
    operation_t *first, *last;
} queue_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static queue_t queues[] = {{.filled = PTHREAD_COND_INITIALIZER}, {.filled = PTHREAD_COND_INITIALIZER}};

static void enqueue(operation_t *op)
{
    queue_t *queue = &queues[op->kind >= SEND];
    pthread_mutex_lock(&lock);
    if (queue->last)
        queue->last->next = op;
    else
        queue->first = op;
    queue->last = op;
    pthread_cond_signal(&queue->filled);
    pthread_mutex_unlock(&lock);
}

/* Returns the next operation, in the order in which TensorFlow started them; waits for one. */
operation_t *operations_next(int messages)
{
    queue_t *queue = &queues[messages];
    pthread_mutex_lock(&lock);
    while (!queue->first)
        pthread_cond_wait(&queue->filled, &lock);
    operation_t *op = queue->first;
    queue->first = op->next;
    if (!queue->first)
        queue->last = NULL;
    pthread_mutex_unlock(&lock);
    return op;
}

static void fail_kernel(TF_OpKernelContext *context, TF_Status *status)
{
    tf.OpKernelContext_Failure(context, status);
    tf.DeleteStatus(status);
}

/* Returns memory for the received tensor, whose shape is in op; NULL if TensorFlow has none. */
void *operations_allocate(operation_t *op)
{
    TF_Status *status = tf.NewStatus();
    size_t bytes = tf.DataTypeSize(op->dtype);
    for (int i = 0; i < op->dims; i++)
        bytes *= (size_t)op->shape[i];
    TF_Tensor *output = tf.AllocateOutput(op->context, 0, op->dtype, op->shape, op->dims, bytes, status);
    if (tf.GetCode(status)) {
        fail_kernel(op->context, status);
        return NULL;
    }
    tf.DeleteStatus(status);
    op->tensors[op->count++] = output;
    return tf.TensorData(output);
}

/* Ends an operation. reason: why it failed; NULL: it did not. */
void operations_finish(operation_t *op, const char *reason)
{
    if (reason) {
        TF_Status *status = tf.NewStatus();
        tf.SetStatus(status, INTERNAL, reason);
        fail_kernel(op->context, status);
    }
    pthread_mutex_lock(&lock);
    op->is_done = true;
    pthread_cond_signal(&op->done);
    pthread_mutex_unlock(&lock);
}

static void wait_until_done(operation_t *op)
{
    pthread_mutex_lock(&lock);
    while (!op->is_done)
        pthread_cond_wait(&op->done, &lock);
    pthread_mutex_unlock(&lock);
}

static void free_operation(operation_t *op)
{
    for (int i = 0; i < op->count; i++) {
        if (op->tensors[i])
            tf.DeleteTensor(op->tensors[i]);
        if (op->given[i])
            tf.DeleteTensor(op->given[i]);
    }
    pthread_cond_destroy(&op->done);
    free(op);
}

static void *create_kernel(TF_OpKernelConstruction *construction, enum kind kind)
{
    kernel_t *kernel = calloc(1, sizeof *kernel);
    TF_Status *status = tf.NewStatus();
    if (!kernel) {
        tf.SetStatus(status, RESOURCE_EXHAUSTED, NO_MEMORY);
        tf.OpKernelConstruction_Failure(construction, status);
        tf.DeleteStatus(status);
        return NULL;
    }
    kernel->kind = kind;
    if (NAME_ATTRIBUTES[kind])
        tf.OpKernelConstruction_GetAttrString(construction, NAME_ATTRIBUTES[kind], kernel->name, NAME_BYTES - 1,
                                              status);
    if (RANK_ATTRIBUTES[kind] && !tf.GetCode(status))
        tf.OpKernelConstruction_GetAttrInt32(construction, RANK_ATTRIBUTES[kind], &kernel->rank, status);
    if (kind == RECEIVE && !tf.GetCode(status))
        tf.OpKernelConstruction_GetAttrType(construction, "T", &kernel->dtype, status);
    if (tf.GetCode(status))
        tf.OpKernelConstruction_Failure(construction, status);
    tf.DeleteStatus(status);
    return kernel;
}

static void *create_all_reduce(TF_OpKernelConstruction *construction)
{
    return create_kernel(construction, ALL_REDUCE);
}

static void *create_broadcast(TF_OpKernelConstruction *construction)
{
    return create_kernel(construction, BROADCAST);
}

static void *create_send(TF_OpKernelConstruction *construction)
{
    return create_kernel(construction, SEND);
}

static void *create_receive(TF_OpKernelConstruction *construction)
{
    return create_kernel(construction, RECEIVE);
}

/* Returns NULL if there is no memory. */
static operation_t *new_operation(const kernel_t *kernel, int count)
{
    size_t pointers = (size_t)count * sizeof(void *);
    char *memory = calloc(1, sizeof(operation_t) + 4 * pointers + (size_t)count * sizeof(int64_t));
    if (!memory)
        return NULL;
    operation_t *op = (operation_t *)memory;
    op->kind = kernel->kind;
    op->rank = kernel->rank;
    op->dtype = kernel->dtype;
    memcpy(op->name, kernel->name, NAME_BYTES);
    pthread_cond_init(&op->done, NULL);
    op->inputs = (void **)(memory + sizeof(operation_t));
    op->data = op->inputs + count;
    op->given = (TF_Tensor **)(op->data + count);
    op->tensors = op->given + count;
    op->elements = (int64_t *)(op->tensors + count);
    return op;
}

/* Takes an input, and its output: the same memory if the input has no other reader. */
static void take_input(operation_t *op, int index, TF_Status *status)
{
    int number = index + FIRST_TENSOR, forwarded = -1;
    TF_Tensor *input = NULL;
    tf.GetInput(op->context, number, &input, status);
    if (tf.GetCode(status))
        return;
    int dims = tf.NumDims(input);
    int64_t shape[dims + 1];
    for (int i = 0; i < dims; i++)
        shape[i] = tf.Dim(input, i);
    tf.DeleteTensor(input); /* TensorFlow reuses its memory only without readers */
    TF_Tensor *output =
        tf.ForwardInputOrAllocateOutput(op->context, &number, 1, index, shape, dims, &forwarded, status);
    if (tf.GetCode(status))
        return;
    op->tensors[op->count++] = output;
    op->inputs[index] = op->data[index] = tf.TensorData(output);
    op->elements[index] = tf.TensorElementCount(output);
    op->dtype = tf.TensorType(output);
    if (forwarded >= 0)
        return;
    tf.GetInput(op->context, number, &op->given[index], status);
    if (!tf.GetCode(status))
        op->inputs[index] = tf.TensorData(op->given[index]);
}

/* Takes the tensor to send, and makes the token. */
static void take_message(operation_t *op, TF_Status *status)
{
    TF_Tensor *input = NULL;
    tf.GetInput(op->context, 0, &input, status);
    if (tf.GetCode(status))
        return;
    op->given[0] = input;
    op->count = 1;
    op->dims = tf.NumDims(input);
    if (op->dims > MOST_DIMS) {
        tf.SetStatus(status, INVALID_ARGUMENT, "A tensor of more than 8 dimensions cannot be sent to another stage.");
        return;
    }
    for (int i = 0; i < op->dims; i++)
        op->shape[i] = tf.Dim(input, i);
    op->dtype = tf.TensorType(input);
    op->inputs[0] = tf.TensorData(input);
    op->elements[0] = tf.TensorElementCount(input);
    op->tensors[0] = tf.AllocateOutput(op->context, 0, FLOAT, NULL, 0, sizeof(float), status);
    if (!tf.GetCode(status))
        *(float *)tf.TensorData(op->tensors[0]) = 0;
}

static void take_inputs(operation_t *op, TF_Status *status)
{
    int count = tf.NumInputs(op->context) - FIRST_TENSOR;
    if (op->kind == SEND)
        take_message(op, status);
    else if (op->kind != RECEIVE)
        for (int i = 0; i < count && !tf.GetCode(status); i++)
            take_input(op, i, status);
}

static void compute(void *kernel, TF_OpKernelContext *context)
{
    operation_t *op = new_operation(kernel, tf.NumInputs(context) + 1);
    TF_Status *status = tf.NewStatus();
    if (!op) {
        tf.SetStatus(status, RESOURCE_EXHAUSTED, NO_MEMORY);
        fail_kernel(context, status);
        return;
    }
    op->context = context;
    take_inputs(op, status);
    if (tf.GetCode(status)) {
        fail_kernel(context, status);
    } else {
        tf.DeleteStatus(status);
        enqueue(op);
        wait_until_done(op);
    }
    free_operation(op);
}

/* Each output has the shape of its input. */
static void infer_same_shapes(TF_ShapeInferenceContext *context, TF_Status *status)
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
static void infer_scalar(TF_ShapeInferenceContext *context, TF_Status *status)
{
    TF_ShapeHandle *shape = tf.ShapeInferenceContextScalar(context);
    tf.ShapeInferenceContextSetOutput(context, 0, shape, status);
    tf.DeleteShapeHandle(shape);
}

#define TYPES "{float, double, half, bfloat16, int8, uint8, int16, uint16, int32, uint32, int64, uint64, bool}"

/* parts: inputs, "->", outputs, "->", attributes. */
static void define_operation(enum kind kind, const char *const *parts, shapes_t *shapes, create_t *create,
                             TF_Status *status)
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
        tf.RegisterKernelBuilder(NAMES[kind], tf.NewKernelBuilder(NAMES[kind], "CPU", create, compute, free),
                                 status);
}

static void define_operations(TF_Status *status)
{
#define COLLECTIVE "order: resource", "tensors: N * T", "->", "results: N * T", "->", "N: int >= 1", "T: " TYPES
#define MESSAGE "T: " TYPES, "rank: int", "label: string"
    define_operation(ALL_REDUCE, (const char *[]){COLLECTIVE, "reduction: string", NULL}, infer_same_shapes,
                     create_all_reduce, status);
    if (!tf.GetCode(status))
        define_operation(BROADCAST, (const char *[]){COLLECTIVE, "root: int", NULL}, infer_same_shapes,
                         create_broadcast, status);
    if (!tf.GetCode(status))
        define_operation(SEND, (const char *[]){"tensor: T", "->", "token: float", "->", MESSAGE, NULL}, infer_scalar,
                         create_send, status);
    if (!tf.GetCode(status))
        define_operation(
            RECEIVE,
            (const char *[]){"anchors: Anchors", "->", "tensor: T", "->", MESSAGE, "Anchors: list(type) >= 0", NULL},
            tf.ShapeInferenceContextSetUnknownShape, create_receive, status);
}

static bool find_tensorflow_functions(void)
{
    void *library = dlopen("libtensorflow_framework.so.2", RTLD_NOW | RTLD_NOLOAD);
    if (!library)
        return false;
#define FIND(result, name, arguments) *(void **)&tf.name = dlsym(library, "TF_" #name);
    FUNCTIONS(FIND)
#define FOUND(result, name, arguments) &&tf.name
    return true FUNCTIONS(FOUND);
}

/* 0: registered; 1: this process has no TensorFlow of a known kind; 2: TensorFlow rejected the operations. */
static int registered = 1;

__attribute__((constructor)) static void register_operations(void)
{
    if (!find_tensorflow_functions())
        return;
    TF_Status *status = tf.NewStatus();
    define_operations(status);
    registered = tf.GetCode(status) ? 2 : 0;
    tf.DeleteStatus(status);
}

int operations_registered(void)
{
    return registered;
}
