/* Reductions, element by element. Sources are combined in the given order, so equal sources give equal bits.
   float16 and bfloat16 are combined in float32, and rounded once. */
#pragma once

#include <stddef.h>

/* Numbers as in smdistributed/core/native.py. */
enum dtype { F32, F64, F16, BF16, I8, U8, I16, U16, I32, U32, I64, U64, BOOL, DTYPES };
enum op { SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, OPS };

size_t dtype_bytes(enum dtype dtype);

/* Whether `op` is defined for elements of `dtype`. */
int supports_reduction(enum dtype dtype, enum op op);

/* Combine `count` elements of each of the `size` sources into `result`, and into `copy` unless that is NULL. Both may
   be one of the sources, from its first element on. */
void reduce(void *result, void *copy, const void *const *sources, int size, size_t count, enum dtype dtype, enum op op);

/* Divide `count` elements in place: integers towards zero, float16 and bfloat16 in float32. */
void divide(void *data, int by, size_t count, enum dtype dtype);
