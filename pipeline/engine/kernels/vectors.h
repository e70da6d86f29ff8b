// Vectors of the compiler's own: 8 floats, whatever the CPU has for them.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <cstring>

constexpr int64_t LANES = 8;
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef int32_t Sums __attribute__((vector_size(LANES * 4)));
typedef int16_t Shorts __attribute__((vector_size(LANES * 4)));
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
