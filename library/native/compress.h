/* float32 elements as int8, for messages between hosts. Each block of 256 elements has a scale: its largest absolute
   value / 127. A message has the scales of all blocks, and then a byte for each element. */
#pragma once

#include <stddef.h>

/* The bytes of the message for `count` elements. */
size_t compressed_bytes(size_t count);

/* Write the message for `values` + `lost`, and put what rounding has lost into `lost`. If an element of a block is not
   finite, all of the block arrive as NaN, and lose nothing. */
void compress(const float *values, float *lost, void *message, size_t count);

/* Read a message into `values`, or add it to them. */
void decompress(const void *message, float *values, size_t count, int add);
