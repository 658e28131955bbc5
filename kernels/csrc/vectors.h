/* Vectors of fp32 as wide as the CPU's registers: loads from every number format that is stored,
 * sums, exp, log and tanh.
 *
 * In the vector extensions of GCC and Clang; intrinsics only where these have no words for what
 * the CPU can do. Constant `type` arguments vanish when the functions are inlined. */
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

/* Sums that fit in registers next to what is added to them. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define ACCUMULATORS 16
#else
#define ACCUMULATORS 8
#endif

#define INLINE static inline __attribute__((always_inline))

/* Compilers would load an operand anew for every use, which takes the place of other loads. */
#if defined(__AVX512F__)
#define KEEP_IN_REGISTER(vector) __asm__("" : "+v"(vector))
#else
#define KEEP_IN_REGISTER(vector)
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef int8_t vb __attribute__((vector_size(LANES)));

/* Number formats, numbered as in native_calls.py. */
enum { FP32, BF16, FP16, INT8 };

INLINE int64_t size_of(int type) {
    return type == FP32 ? 4 : type == INT8 ? 1 : 2;
}

INLINE vf splat(float x) {
    return x - (vf){};
}

INLINE vf choose(vi condition, vf yes, vf no) {
    return (vf)((condition & (vi)yes) | (~condition & (vi)no));
}

INLINE vf larger(vf a, vf b) {
    return choose(a > b, a, b);
}

/* GCC makes several instructions of a conversion to wider numbers where the CPU has one. */
INLINE vu from_16_bits(vh halves) {
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu16_epi32((__m256i)halves);
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu16_epi32((__m128i)halves);
#else
    return __builtin_convertvector(halves, vu);
#endif
}

INLINE vi from_8_bits(const char *from) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    vb bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, vi);
#endif
}

INLINE vf from_fp16(vh half) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps((__m256i)half);
#elif defined(__AVX2__) && defined(__F16C__)
    return _mm256_cvtph_ps((__m128i)half);
#else
    /* Exponents differ by 112; a multiplication also puts subnormal numbers right. */
    vu wide = from_16_bits(half);
    vu magnitude = (wide & 0x7fff) << 13;
    vu number = (vu)((vf)magnitude * 0x1p112f);
    vu special = (vu)(magnitude >= 0x0f800000u) & 0x7f800000u;
    return (vf)(number | special | ((wide & 0x8000) << 16));
#endif
}

INLINE vf load(const char *from, int type) {
    if (type == FP32) {
        vf numbers;
        memcpy(&numbers, from, sizeof numbers);
        return numbers;
    }
    if (type == INT8)
        return __builtin_convertvector(from_8_bits(from), vf);
    vh halves;
    memcpy(&halves, from, sizeof halves);
    return type == FP16 ? from_fp16(halves) : (vf)(from_16_bits(halves) << 16);
}

/* The first `count` numbers, then zeros; nothing behind them is read. */
INLINE vf load_some(const char *from, int64_t count, int type) {
    char numbers[4 * LANES] = {0};
    memcpy(numbers, from, (size_t)(count * size_of(type)));
    return load(numbers, type);
}

INLINE vf load_floats(const float *from) {
    return load((const char *)from, FP32);
}

INLINE void store_floats(float *to, vf numbers) {
    memcpy(to, &numbers, sizeof numbers);
}

/* To the nearest, ties to even. */
INLINE uint16_t to_half(float number, int type) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (type == BF16) {
        if (magnitude > 0x7f800000)
            return 0x7fc0 | sign;
        return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    if (magnitude > 0x7f800000)
        return 0x7e00 | sign;
    if (magnitude >= 0x477ff000) /* 65520 and more */
        return 0x7c00 | sign;
    if (magnitude < 0x38800000) { /* below 2^-14: the adder's mantissa ends where fp16's does */
        float small;
        memcpy(&small, &magnitude, 4);
        small += 0.5f;
        memcpy(&bits, &small, 4);
        return (uint16_t)((bits - 0x3f000000) | sign);
    }
    magnitude -= 112u << 23;
    return (uint16_t)(((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) | sign);
}

INLINE float sum_of(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(v);
#elif defined(__AVX2__)
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#elif defined(__aarch64__)
    return vaddvq_f32((float32x4_t)v);
#else
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += v[lane];
    return sum;
#endif
}

/* sums[i] = sum_of(v[i]) for all ACCUMULATORS vectors. */
INLINE void sums_of_all(const vf *v, float *sums) {
#if defined(__AVX512F__)
    __m512 pairs[8], fours[4], halves[2];
    for (int i = 0; i < 8; i++)
        pairs[i] = _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]) +
                   _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]);
    for (int i = 0; i < 4; i++) {
        __m512d a = (__m512d)pairs[2 * i], b = (__m512d)pairs[2 * i + 1];
        fours[i] = (__m512)_mm512_unpacklo_pd(a, b) + (__m512)_mm512_unpackhi_pd(a, b);
    }
    for (int i = 0; i < 2; i++)
        halves[i] = _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88) +
                    _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd);
    _mm512_storeu_ps(sums, _mm512_shuffle_f32x4(halves[0], halves[1], 0x88) +
                               _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
#else
    for (int i = 0; i < ACCUMULATORS; i++)
        sums[i] = sum_of(v[i]);
#endif
}

INLINE float largest_of(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(v);
#else
    float largest = v[0];
    for (int lane = 1; lane < LANES; lane++)
        largest = v[lane] > largest ? v[lane] : largest;
    return largest;
#endif
}

/* Polynomials of Cephes (single precision), whose errors are near one unit in the last place. */
INLINE vf exp_of(vf x) {
    const vf magic = splat(0x1.8p23f); /* adding it rounds to whole numbers */
    vf clamped = choose(x < -87.0f, splat(-87.0f), x);
    clamped = choose(x > 88.3f, splat(88.3f), clamped);
    vf shifted = clamped * 1.44269504f + magic;
    vf power = shifted - magic;
    vf r = clamped - power * 0.693359375f - power * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    p = (vf)((vi)p + ((vi)shifted << 23));
    p = choose(x > 88.3f, splat(__builtin_inff()), p);
    p = choose(x < -87.0f, splat(0.0f), p);
    return choose(x != x, x, p);
}

/* Of positive normal numbers. */
INLINE vf log_of(vf x) {
    vi bits = (vi)x;
    vi exponent = (bits - 0x3f3504f3) >> 23; /* so that the mantissa lies around 1 */
    vf f = (vf)(bits - (exponent << 23)) - 1.0f;
    vf e = __builtin_convertvector(exponent, vf);
    vf p = splat(7.0376836292e-2f);
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    vf z = f * f;
    vf small = p * f * z + e * -2.12194440e-4f - 0.5f * z;
    vf log = f + small + e * 0.693359375f;
    return choose(x - x == 0.0f, log, x); /* infinity and nan are their own logarithms */
}

INLINE vf tanh_of(vf x) {
    vf z = x * x;
    vf p = splat(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    vf near = p * z * x + x;
    vf magnitude = (vf)((vi)x & 0x7fffffff);
    vf far = 1.0f - 2.0f / (exp_of(2.0f * magnitude) + 1.0f);
    far = (vf)((vi)far | ((vi)x & INT32_MIN));
    return choose(magnitude < 0.625f, near, far);
}

/* Of logits, if the model has one; 0 for none. */
INLINE vf capped(vf logits, float softcap) {
    return softcap == 0 ? logits : softcap * tanh_of(logits / softcap);
}
