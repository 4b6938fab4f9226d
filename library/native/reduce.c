#include "reduce.h"

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
/* A function for each kind of processor; loading the library selects one. */
#define VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORS
#endif

#define BLOCK 1024 /* elements; two sources of them fit into the first-level cache */

typedef void combine_t(void *total, const void *source, size_t count);

#define COMBINE(name, type, expression)                                           \
    VECTORS static void name(void *total, const void *source, size_t count)      \
    {                                                                             \
        type *restrict a = total;                                                 \
        const type *restrict b = source;                                          \
        for (size_t i = 0; i < count; i++)                                        \
            a[i] = (type)(expression);                                            \
    }

#define LESS(a, b) ((a) < (b) ? (a) : (b))
#define MORE(a, b) ((a) > (b) ? (a) : (b))
/* NaN stays NaN, as in torch. */
#define LESS_OR_NAN(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))
#define MORE_OR_NAN(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))

#define FLOAT_OPS(name, type)                            \
    COMBINE(name##_sum, type, a[i] + b[i])               \
    COMBINE(name##_product, type, a[i] * b[i])           \
    COMBINE(name##_min, type, LESS_OR_NAN(a[i], b[i]))   \
    COMBINE(name##_max, type, MORE_OR_NAN(a[i], b[i]))

/* `wide` is unsigned: an overflow wraps. */
#define INTEGER_OPS(name, type, wide)                    \
    COMBINE(name##_sum, type, (wide)a[i] + (wide)b[i])   \
    COMBINE(name##_product, type, (wide)a[i] * (wide)b[i]) \
    COMBINE(name##_min, type, LESS(a[i], b[i]))          \
    COMBINE(name##_max, type, MORE(a[i], b[i]))          \
    COMBINE(name##_band, type, a[i] & b[i])              \
    COMBINE(name##_bor, type, a[i] | b[i])               \
    COMBINE(name##_bxor, type, a[i] ^ b[i])

FLOAT_OPS(f32, float)
FLOAT_OPS(f64, double)
INTEGER_OPS(i8, int8_t, uint32_t)
INTEGER_OPS(u8, uint8_t, uint32_t)
INTEGER_OPS(i16, int16_t, uint32_t)
INTEGER_OPS(u16, uint16_t, uint32_t)
INTEGER_OPS(i32, int32_t, uint32_t)
INTEGER_OPS(u32, uint32_t, uint32_t)
INTEGER_OPS(i64, int64_t, uint64_t)
INTEGER_OPS(u64, uint64_t, uint64_t)

#define FLOAT_ROW(name) {name##_sum, name##_sum, name##_product, name##_min, name##_max, NULL, NULL, NULL}
#define INTEGER_ROW(name) \
    {name##_sum, name##_sum, name##_product, name##_min, name##_max, name##_band, name##_bor, name##_bxor}

static combine_t *const COMBINERS[DTYPES][OPS] = {
    [F32] = FLOAT_ROW(f32), [F64] = FLOAT_ROW(f64), [F16] = FLOAT_ROW(f32), [BF16] = FLOAT_ROW(f32),
    [I8] = INTEGER_ROW(i8), [U8] = INTEGER_ROW(u8), [I16] = INTEGER_ROW(i16), [U16] = INTEGER_ROW(u16),
    [I32] = INTEGER_ROW(i32), [U32] = INTEGER_ROW(u32), [I64] = INTEGER_ROW(i64), [U64] = INTEGER_ROW(u64),
    /* true + true is true */
    [BOOL] = {u8_bor, NULL, u8_band, u8_band, u8_bor, u8_band, u8_bor, u8_bxor},
};

static const size_t DTYPE_BYTES[DTYPES] = {[F32] = 4, [F64] = 8, [F16] = 2, [BF16] = 2, [I8] = 1, [U8] = 1, [I16] = 2,
                                     [U16] = 2, [I32] = 4, [U32] = 4, [I64] = 8, [U64] = 8, [BOOL] = 1};

size_t dtype_bytes(enum dtype dtype)
{
    return DTYPE_BYTES[dtype];
}

/* Whether elements of this dtype are widened to float32 for a reduction. */
static int reduces_in_float32(enum dtype dtype)
{
    return dtype == F16 || dtype == BF16;
}

int supports_reduction(enum dtype dtype, enum op op)
{
    return dtype < DTYPES && op < OPS && COMBINERS[dtype][op] != NULL;
}

/* float16 and bfloat16, to and from float32; rounded to nearest, ties to even */

static float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

VECTORS static void widen_bf16(float *restrict wide, const uint16_t *restrict narrow, size_t count)
{
    for (size_t i = 0; i < count; i++)
        wide[i] = from_bits((uint32_t)narrow[i] << 16);
}

VECTORS static void narrow_bf16(uint16_t *restrict narrow, const float *restrict wide, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = to_bits(wide[i]);
        uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        narrow[i] = (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? (bits >> 16) | 0x40 : rounded);
    }
}

static float widen_half(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7FFF;
    if (rest >= 0x7C00) /* infinity or NaN */
        return from_bits(sign | 0x7F800000 | (rest & 0x3FF) << 13);
    if (rest < 0x400) /* subnormal: a multiple of 2^-24 */
        return from_bits(sign | to_bits((float)rest * 0x1p-24f));
    return from_bits(sign | ((rest << 13) + 0x38000000));
}

static uint16_t narrow_half(float value)
{
    uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000;
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000)
        return (uint16_t)(sign | 0x7E00);
    if (bits >= 0x477FF000) /* rounds to 65536 or more */
        return (uint16_t)(sign | 0x7C00);
    if (bits < 0x38800000) /* subnormal: the sum rounds where the last bit is 2^-24 */
        return (uint16_t)(sign | (to_bits(from_bits(bits) + 0.5f) - to_bits(0.5f)));
    return (uint16_t)(sign | ((bits - 0x38000000 + 0xFFF + ((bits >> 13) & 1)) >> 13));
}

static void widen_f16_each(float *wide, const uint16_t *narrow, size_t count)
{
    for (size_t i = 0; i < count; i++)
        wide[i] = widen_half(narrow[i]);
}

static void narrow_f16_each(uint16_t *narrow, const float *wide, size_t count)
{
    for (size_t i = 0; i < count; i++)
        narrow[i] = narrow_half(wide[i]);
}

#if defined(__x86_64__)
__attribute__((target("avx2,f16c"))) static void widen_f16_f16c(float *wide, const uint16_t *narrow, size_t count)
{
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(wide + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(narrow + i))));
    widen_f16_each(wide + i, narrow + i, count - i);
}

__attribute__((target("avx2,f16c"))) static void narrow_f16_f16c(uint16_t *narrow, const float *wide, size_t count)
{
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(narrow + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(wide + i), _MM_FROUND_TO_NEAREST_INT));
    narrow_f16_each(narrow + i, wide + i, count - i);
}

static int has_f16c(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
}
#else
#define has_f16c() 0
#define widen_f16_f16c widen_f16_each
#define narrow_f16_f16c narrow_f16_each
#endif

static void widen(float *wide, const void *narrow, size_t count, enum dtype dtype)
{
    if (dtype == BF16)
        widen_bf16(wide, narrow, count);
    else
        (has_f16c() ? widen_f16_f16c : widen_f16_each)(wide, narrow, count);
}

static void narrow(void *narrow, const float *wide, size_t count, enum dtype dtype)
{
    if (dtype == BF16)
        narrow_bf16(narrow, wide, count);
    else
        (has_f16c() ? narrow_f16_f16c : narrow_f16_each)(narrow, wide, count);
}

/* averages */

#define DIVIDE(type, wide)                             \
    do {                                               \
        type *each = total;                            \
        for (size_t i = 0; i < count; i++)             \
            each[i] = (type)((wide)each[i] / (wide)by); \
    } while (0)

static void divide_total(void *total, int by, size_t count, enum dtype dtype)
{
    switch (dtype) {
    case F32: case F16: case BF16: DIVIDE(float, float); break;
    case F64: DIVIDE(double, double); break;
    case I8: DIVIDE(int8_t, int32_t); break;
    case U8: DIVIDE(uint8_t, int32_t); break;
    case I16: DIVIDE(int16_t, int32_t); break;
    case U16: DIVIDE(uint16_t, int32_t); break;
    case I32: DIVIDE(int32_t, int32_t); break;
    case U32: DIVIDE(uint32_t, uint32_t); break;
    case I64: DIVIDE(int64_t, int64_t); break;
    case U64: DIVIDE(uint64_t, uint64_t); break;
    default: break;
    }
}

static void divide_wide(char *data, int by, size_t count, enum dtype dtype)
{
    float total[BLOCK];
    for (size_t done = 0; done < count; done += BLOCK) {
        size_t block = count - done < BLOCK ? count - done : BLOCK;
        widen(total, data + 2 * done, block, dtype);
        divide_total(total, by, block, dtype);
        narrow(data + 2 * done, total, block, dtype);
    }
}

void divide(void *data, int by, size_t count, enum dtype dtype)
{
    if (reduces_in_float32(dtype))
        divide_wide(data, by, count, dtype);
    else
        divide_total(data, by, count, dtype);
}

static void reduce_wide(char *result, char *copy, const void *const *sources, int size, size_t offset, size_t count,
                        enum dtype dtype, enum op op)
{
    float total[BLOCK], source[BLOCK];
    widen(total, (const char *)sources[0] + offset, count, dtype);
    for (int s = 1; s < size; s++) {
        widen(source, (const char *)sources[s] + offset, count, dtype);
        COMBINERS[dtype][op](total, source, count);
    }
    if (op == AVG)
        divide_total(total, size, count, dtype);
    narrow(result + offset, total, count, dtype);
    if (copy)
        memcpy(copy + offset, result + offset, 2 * count);
}

static void reduce_block(char *result, char *copy, const void *const *sources, int size, size_t offset, size_t count,
                         enum dtype dtype, enum op op)
{
    _Alignas(64) char total[BLOCK * 8];
    size_t bytes = count * DTYPE_BYTES[dtype];
    memcpy(total, (const char *)sources[0] + offset, bytes);
    for (int s = 1; s < size; s++)
        COMBINERS[dtype][op](total, (const char *)sources[s] + offset, count);
    if (op == AVG)
        divide_total(total, size, count, dtype);
    memcpy(result + offset, total, bytes);
    if (copy)
        memcpy(copy + offset, total, bytes);
}

void reduce(void *result, void *copy, const void *const *sources, int size, size_t count, enum dtype dtype, enum op op)
{
    for (size_t done = 0; done < count; done += BLOCK) {
        size_t block = count - done < BLOCK ? count - done : BLOCK;
        size_t offset = done * DTYPE_BYTES[dtype];
        (reduces_in_float32(dtype) ? reduce_wide : reduce_block)(result, copy, sources, size, offset, block, dtype, op);
    }
}
