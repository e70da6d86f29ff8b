// Vectors of the compiler's own: 8 floats, whatever the CPU has for them.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

constexpr int64_t LANES = 8;
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef int32_t Sums __attribute__((vector_size(LANES * 4)));
typedef int16_t Shorts __attribute__((vector_size(LANES * 4)));
typedef uint16_t Bits __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

template <class V>
inline V raw(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Floats load(const float* p) { return raw<Floats>(p); }
inline Floats load(const c10::BFloat16* p) { return (Floats)(__builtin_convertvector(raw<Halves>(p), Words) << 16); }
inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
inline float sum(Floats v) {
  v += __builtin_shuffle(v, Sums{4, 5, 6, 7, 0, 1, 2, 3});
  v += __builtin_shuffle(v, Sums{2, 3, 0, 1, 6, 7, 4, 5});
  return v[0] + v[1];
}

// neighbouring products added: lane i is a[2i] b[2i] + a[2i+1] b[2i+1]
inline Sums pair_sums(Shorts a, Shorts b) {
#ifdef __AVX2__
  return (Sums)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  Sums v;
  for (int i = 0; i < LANES; i++) v[i] = a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
  return v;
#endif
}

// x[0], x[1] in every lane
inline Shorts pair(const int16_t* x) { return (Shorts)(Sums{} + raw<int32_t>(x)); }

inline Shorts widened(const int8_t* p) {
#ifdef __AVX2__
  return (Shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#else
  Shorts v;
  for (int i = 0; i < 2 * LANES; i++) v[i] = p[i];
  return v;
#endif
}

inline Floats widened(const c10::Half* p) {
#ifdef __F16C__
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  Floats v;
  for (int i = 0; i < LANES; i++) v[i] = p[i];
  return v;
#endif
}

inline Sums widened(const uint8_t* p) {
  typedef uint8_t Bytes __attribute__((vector_size(LANES)));
  return __builtin_convertvector(raw<Bytes>(p), Sums);
}
