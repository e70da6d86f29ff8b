// Vectors of the compiler's own, as long as the CPU's: 16 floats with AVX-512, else 8.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX512BW__
constexpr int64_t LANES = 16;
#else
constexpr int64_t LANES = 8;
#endif
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
  typedef float Eight __attribute__((vector_size(32)));
  Eight e = raw<Eight>(&v);
  for (int64_t i = 8; i < LANES; i += 8) e += raw<Eight>((const float*)&v + i);
  e += __builtin_shuffle(e, (decltype(e < e)){4, 5, 6, 7, 0, 1, 2, 3});
  e += __builtin_shuffle(e, (decltype(e < e)){2, 3, 0, 1, 6, 7, 4, 5});
  return e[0] + e[1];
}

// of rows S apart, blocks of S columns change places
template <int S>
inline void exchange(Floats* r) {
  Sums first, second;
  for (int l = 0; l < LANES; l++) {
    first[l] = l & S ? LANES + (l ^ S) : l;
    second[l] = l & S ? LANES + l : l ^ S;
  }
  for (int i = 0; i < LANES; i++)
    if (!(i & S)) {
      const Floats low = r[i], high = r[i + S];
      r[i] = __builtin_shuffle(low, high, first);
      r[i + S] = __builtin_shuffle(low, high, second);
    }
}

// LANES x LANES floats, rows for columns
inline void transpose(Floats* r) {
  exchange<1>(r), exchange<2>(r), exchange<4>(r);
  if constexpr (LANES > 8) exchange<8>(r);
}

// to + neighbouring products: lane i is to[i] + a[2i] b[2i] + a[2i+1] b[2i+1]
inline Sums add_pairs(Sums to, Shorts a, Shorts b) {
#if defined(__AVX512VNNI__)
  return (Sums)_mm512_dpwssd_epi32((__m512i)to, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return to + (Sums)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return to + (Sums)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  for (int i = 0; i < LANES; i++) to[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
  return to;
#endif
}

// x[0], x[1] in every lane
inline Shorts pair(const int16_t* x) { return (Shorts)(Sums{} + raw<int32_t>(x)); }

inline Shorts widened(const int8_t* p) {
#if defined(__AVX512BW__)
  return (Shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (Shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#else
  Shorts v;
  for (int i = 0; i < 2 * LANES; i++) v[i] = p[i];
  return v;
#endif
}

inline Floats widened(const c10::Half* p) {
#if defined(__AVX512BW__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
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
