// Vectors of floats as wide as the machine's registers, in GCC's notation.
#ifndef MOESAIC_VECTOR_H
#define MOESAIC_VECTOR_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
enum {
    LANES = 16,
    TILE_ROWS = 6,
    TILE_VECTORS = 4
};  // 24 sums, 4 factors, 1 broadcast: of 32 registers
#elif defined(__AVX2__)
enum { LANES = 8, TILE_ROWS = 6, TILE_VECTORS = 2 };
#else
enum { LANES = 4, TILE_ROWS = 6, TILE_VECTORS = 4 };
#endif
enum { PANEL = LANES * TILE_VECTORS };  // columns of a matrix that are multiplied together

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float vec_unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

// a * b + c, rounded once. The compiler fuses nothing by itself: it would do so by what surrounds a
// sum, and the sum's last bit would depend on that.
INLINE vec fma_of(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
typedef int8_t quarters __attribute__((vector_size(LANES)));

// Numbers of 16 bits as floats: IEEE's, or the first halves of floats.
INLINE vec widened_float16(halves from) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps((__m256i)from);
#elif defined(__AVX2__)
    return (vec)_mm256_cvtph_ps((__m128i)from);
#else
    const ivec bits = __builtin_convertvector(from, ivec);
    const vec size = (vec)((bits & 0x7fff) << 13);  // 2^-112 of what it shall be
    return (vec)((ivec)(size * 0x1p112f) | (bits & 0x8000) << 16);
#endif
}

// Numbers of 8 bits, e4m3, as floats, but for a factor of 2^-8.
INLINE vec widened_fp8(quarters from) {
#if defined(__AVX512F__)
    const __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16((__m128i)from), 7);
    return (vec)_mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16((short)0xbfff)));
#elif defined(__AVX2__)
    const __m128i wide = _mm_cvtepi8_epi16(_mm_cvtsi64_si128((long long)from));
    return (vec)_mm256_cvtph_ps(
        _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbfff)));
#else
    typedef int16_t wide __attribute__((vector_size(LANES * 2)));
    return widened_float16((halves)(__builtin_convertvector(from, wide) * 128 & (int16_t)0xbfff));
#endif
}

INLINE halves load_halves(const uint16_t *from) {
    halves value;
    memcpy(&value, from, sizeof value);
    return value;
}
INLINE quarters load_quarters(const uint8_t *from) {
    quarters value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE vec load(const float *from) { return *(const vec_unaligned *)from; }
INLINE void store(float *to, vec value) { *(vec_unaligned *)to = value; }
INLINE vec all(float value) { return value - (vec){0}; }  // minus: adding 0 would turn -0 into 0
INLINE vec choose(ivec where, vec yes, vec no) {
    return (vec)((where & (ivec)yes) | (~where & (ivec)no));
}
INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }

// One vector for each lane: f(lane, n).
#if defined(__AVX512F__)
#define EACH_LANE(f, n)                                                                       \
    f(0, n), f(1, n), f(2, n), f(3, n), f(4, n), f(5, n), f(6, n), f(7, n), f(8, n), f(9, n), \
        f(10, n), f(11, n), f(12, n), f(13, n), f(14, n), f(15, n)
#elif defined(__AVX2__)
#define EACH_LANE(f, n) f(0, n), f(1, n), f(2, n), f(3, n), f(4, n), f(5, n), f(6, n), f(7, n)
#else
#define EACH_LANE(f, n) f(0, n), f(1, n), f(2, n), f(3, n)
#endif
#define LANE_ACROSS(i, n) (i) ^ (n)

// All lanes together, pair by pair: v, and itself with the lanes `side` apart swapped.
#define FOLD(v, combined)                                                                      \
    do {                                                                                       \
        vec w;                                                                                 \
        if (LANES > 8)                                                                         \
            w = __builtin_shuffle(v, (ivec){EACH_LANE(LANE_ACROSS, 8 % LANES)}), v = combined; \
        if (LANES > 4)                                                                         \
            w = __builtin_shuffle(v, (ivec){EACH_LANE(LANE_ACROSS, 4 % LANES)}), v = combined; \
        w = __builtin_shuffle(v, (ivec){EACH_LANE(LANE_ACROSS, 2)}), v = combined;             \
        w = __builtin_shuffle(v, (ivec){EACH_LANE(LANE_ACROSS, 1)}), v = combined;             \
    } while (0)

INLINE float sum_of(vec v) {
    FOLD(v, v + w);
    return v[0];
}
INLINE float largest_of(vec v) {
    FOLD(v, larger(v, w));
    return v[0];
}

// The first `count` numbers, zeros behind them.
INLINE vec load_some(const float *from, long count) {
    vec value = {0};
    memcpy(&value, from, (size_t)count * 4);
    return value;
}
INLINE void store_some(float *to, vec value, long count) { memcpy(to, &value, (size_t)count * 4); }

// e^x within 2 units in the last place; NaN stays NaN, and values that would overflow stay finite.
// By x = n ln 2 + r: 2^n times a polynomial in r (Cephes' coefficients).
INLINE vec exp_of(vec x) {
    const vec low = all(-87.0f), high = all(88.0f);
    x = choose(x < low, low, x);
    x = choose(x > high, high, x);
    const vec shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const vec n = fma_of(x, all(1.44269504f), shift) - shift;
    const vec r = fma_of(n, all(2.12194440e-4f), fma_of(n, all(-0.693359375f), x));
    vec p = all(1.9875691500e-4f);
    p = fma_of(p, r, all(1.3981999507e-3f));
    p = fma_of(p, r, all(8.3334519073e-3f));
    p = fma_of(p, r, all(4.1665795894e-2f));
    p = fma_of(p, r, all(1.6666665459e-1f));
    p = fma_of(p, r, all(5.0000001201e-1f));
    p = fma_of(p * r, r, r) + 1.0f;
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return p * (vec)power;
}

INLINE vec silu_of(vec x) { return x / (1.0f + exp_of(-x)); }

#endif
