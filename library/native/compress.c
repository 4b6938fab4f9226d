#include "compress.h"

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#define VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORS
#endif

#define BLOCK 256
#define LARGEST 127.0f

static size_t block_count(size_t count)
{
    return (count + BLOCK - 1) / BLOCK;
}

size_t compressed_bytes(size_t count)
{
    return block_count(count) * sizeof(float) + count;
}

/* The largest absolute value of values + lost; NaN if one is not finite. Compared as integers, which has the same order
   and needs no branches. */
VECTORS static float largest(const float *restrict values, const float *restrict lost, size_t count)
{
    int32_t most = 0;
    for (size_t i = 0; i < count; i++) {
        union {
            float value;
            int32_t bits;
        } size = {fabsf(values[i] + lost[i])};
        most = size.bits > most ? size.bits : most;
    }
    float found;
    memcpy(&found, &most, sizeof found);
    return found <= FLT_MAX ? found : NAN;
}

VECTORS static void round_block(const float *restrict values, float *restrict lost, int8_t *restrict codes,
                                size_t count, float scale)
{
    float factor = scale > 0 ? 1 / scale : 0;
    for (size_t i = 0; i < count; i++) {
        float value = values[i] + lost[i];
        int32_t code = (int32_t)(value * factor + copysignf(0.5f, value));
        codes[i] = (int8_t)code;
        lost[i] = value - scale * (float)code;
    }
}

void compress(const float *values, float *lost, void *message, size_t count)
{
    size_t blocks = block_count(count);
    int8_t *codes = (int8_t *)message + blocks * sizeof(float);
    for (size_t block = 0; block < blocks; block++) {
        size_t first = block * BLOCK, length = count - first < BLOCK ? count - first : BLOCK;
        float scale = largest(values + first, lost + first, length) / LARGEST;
        if (scale < FLT_MIN) /* its inverse may not be finite; all of it stays in `lost` */
            scale = 0;
        memcpy((char *)message + block * sizeof(float), &scale, sizeof(float));
        if (isnan(scale)) {
            memset(codes + first, 1, length);
            memset(lost + first, 0, length * sizeof(float));
        } else {
            round_block(values + first, lost + first, codes + first, length, scale);
        }
    }
}

VECTORS static void read_block(const int8_t *restrict codes, float *restrict values, size_t count, float scale)
{
    for (size_t i = 0; i < count; i++)
        values[i] = scale * (float)codes[i];
}

VECTORS static void add_block(const int8_t *restrict codes, float *restrict values, size_t count, float scale)
{
    for (size_t i = 0; i < count; i++)
        values[i] += scale * (float)codes[i];
}

void decompress(const void *message, float *values, size_t count, int add)
{
    size_t blocks = block_count(count);
    const int8_t *codes = (const int8_t *)message + blocks * sizeof(float);
    for (size_t block = 0; block < blocks; block++) {
        size_t first = block * BLOCK, length = count - first < BLOCK ? count - first : BLOCK;
        float scale;
        memcpy(&scale, (const char *)message + block * sizeof(float), sizeof(float));
        (add ? add_block : read_block)(codes + first, values + first, length, scale);
    }
}
