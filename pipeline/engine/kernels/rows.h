// The rows of x as the kernels of few_rows.cpp and many_rows.cpp take them, and what both ask of their arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "vectors.h"

constexpr int64_t WORD = 8;              // columns of codes that are unpacked together
constexpr int64_t BLOCK = 64;            // columns of x with a step of their own beside 8-bit codes
constexpr int64_t LARGEST_GROUP = 4096;  // its sum, of 15 * 32767 each, is an integer of 32 bits
constexpr float SMALLEST = 1e-30f;       // a group below is zeros: the inverse of its step would be no number

// x as float32: its own memory if it is that already
inline const float* as_float(const at::Tensor& x, std::vector<float>& room) {
  if (x.scalar_type() == at::kFloat) return x.const_data_ptr<float>();
  room.assign(x.const_data_ptr<at::BFloat16>(), x.const_data_ptr<at::BFloat16>() + x.numel());
  return room.data();
}

// x in 16-bit fixed point, one step a group: finer than bfloat16 by a factor of 2^7 of the group's largest value, and
// sums of products with small integers are exact.
struct FixedRows {
  std::vector<int16_t> fixed;   // [M, K]
  std::vector<float> steps;     // [M, G]
  std::vector<int32_t> totals;  // [M, G]

  FixedRows(const at::Tensor& x, int64_t group) : fixed(x.numel()), steps(x.numel() / group), totals(steps.size()) {
    std::vector<float> room;
    const float* from = as_float(x, room);
    for (int64_t g = 0; g < (int64_t)steps.size(); g++) {
      const float* part = from + g * group;
      uint32_t top = 0;  // of magnitudes as bits: ordered as the numbers are, infinity and then NaN above all
      for (int64_t k = 0; k < group; k++) top = std::max(top, std::bit_cast<uint32_t>(part[k]) & 0x7FFFFFFF);
      const float largest = std::bit_cast<float>(top);
      const bool finite = std::isfinite(largest);
      steps[g] = finite ? largest / 32767 : NAN;
      const float inverse = finite && largest > SMALLEST ? 32767 / largest : 0;
      for (int64_t k = 0; k < group; k++) fixed[g * group + k] = (int16_t)std::nearbyint(part[k] * inverse);
      for (int64_t k = 0; k < group; k++) totals[g] += fixed[g * group + k];
    }
  }
};

// 8 columns of 4-bit codes of a panel, 2 LANES words of 16 bits: nibble j of word 2 r + h is column 2 j + h of output r.
// w[j] holds columns 2 j and 2 j + 1 of each output.
inline void unpack_nibbles(const uint16_t* codes, Shorts* w) {
  const Bits four = raw<Bits>(codes);
  for (int j = 0; j < 4; j++) w[j] = (Shorts)(four >> 4 * j & 15);
}

inline void check_rows(const at::Tensor& x, int64_t K, int64_t multiple) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) == K && K % multiple == 0 && x.is_contiguous(), "linear: x of wrong shape");
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, "linear: x of wrong dtype");
}

// x [M, K] float32 or bfloat16, w [N, K] bfloat16; K a multiple of 2 LANES
inline void check_bf16(const at::Tensor& x, const at::Tensor& w) {
  check_rows(x, w.size(1), 2 * LANES);
  TORCH_CHECK(w.scalar_type() == at::kBFloat16 && w.is_contiguous(), "linear: w is not contiguous bfloat16");
}

// codes [P, LANES K / 4] int16, scale [P, G, LANES] float16, zero [P, G, LANES] uint8; returns the size of a group
inline int64_t check_int4(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zero,
                          int64_t N) {
  const int64_t P = codes.size(0), K = codes.size(1) * 4 / LANES, group = K / scale.size(1);
  check_rows(x, K, group);
  TORCH_CHECK(scale.dim() == 3 && scale.size(0) == P && scale.size(1) * group == K && scale.size(2) == LANES &&
              zero.sizes() == scale.sizes() && group % WORD == 0 && group <= LARGEST_GROUP, "linear: groups do not fit");
  TORCH_CHECK(P == (N + LANES - 1) / LANES, "linear: outputs do not fit");
  TORCH_CHECK(codes.is_contiguous() && scale.is_contiguous() && zero.is_contiguous(), "linear: not contiguous");
  return group;
}

// codes [P, LANES K] int8, scale [P, LANES] float32; K a multiple of 64
inline void check_int8(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scale, int64_t N) {
  const int64_t P = codes.size(0);
  check_rows(x, codes.size(1) / LANES, BLOCK);
  TORCH_CHECK(P == (N + LANES - 1) / LANES && scale.numel() == P * LANES, "linear: outputs do not fit");
  TORCH_CHECK(codes.is_contiguous() && scale.is_contiguous(), "linear: not contiguous");
}
