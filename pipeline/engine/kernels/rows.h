// The rows of x as the kernels of few_rows.cpp and many_rows.cpp take them, and what both ask of their arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

constexpr int64_t BLOCK = 64;            // columns of x with a step of their own beside 8-bit codes
constexpr int64_t LARGEST_GROUP = 4096;  // its sum, of 15 * 32767 each, is an integer of 32 bits

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
      float largest = 0;
      for (int64_t k = 0; k < group; k++) largest = std::max(largest, std::fabs(part[k]));
      // a NaN or an infinity anywhere must come out as NaN: `max` drops NaN, a sum does not
      float all = 0;
      for (int64_t k = 0; k < group; k++) all += part[k] * 0.0f;
      steps[g] = largest / 32767 + all;
      const float inverse = largest > 0 && all == 0 ? 32767 / largest : 0;
      for (int64_t k = 0; k < group; k++) fixed[g * group + k] = (int16_t)std::nearbyint(part[k] * inverse);
      for (int64_t k = 0; k < group; k++) totals[g] += fixed[g * group + k];
    }
  }
};

// 8 columns of 4-bit codes of 8 outputs, 16 words of 16 bits: nibble j of word 2 r + h is column 2 j + h of output r. w[j]
// holds columns 2 j and 2 j + 1 of each output.
inline void unpack_nibbles(const uint16_t* codes, Shorts* w) {
  const Bits four = raw<Bits>(codes);
  for (int j = 0; j < 4; j++) w[j] = (Shorts)(four >> 4 * j & 15);
}

inline void check_rows(const at::Tensor& x, int64_t K, int64_t multiple) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) == K && K % multiple == 0 && x.is_contiguous(), "linear: x of wrong shape");
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, "linear: x of wrong dtype");
}

// x [M, K] float32 or bfloat16, w [N, K] bfloat16; K a multiple of 16
inline void check_bf16(const at::Tensor& x, const at::Tensor& w) {
  check_rows(x, w.size(1), 2 * LANES);
  TORCH_CHECK(w.scalar_type() == at::kBFloat16 && w.is_contiguous(), "linear: w is not contiguous bfloat16");
}

// codes [P, 2 K] int16, scale [P, G, 8] float16, zero [P, G, 8] uint8; returns the size of a group
inline int64_t check_int4(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zero,
                          int64_t N) {
  const int64_t P = codes.size(0), K = codes.size(1) / 2, group = K / scale.size(1);
  check_rows(x, K, group);
  TORCH_CHECK(scale.dim() == 3 && scale.size(0) == P && scale.size(1) * group == K && scale.size(2) == LANES &&
              zero.sizes() == scale.sizes() && group % LANES == 0 && group <= LARGEST_GROUP, "linear: groups do not fit");
  TORCH_CHECK(P == (N + LANES - 1) / LANES, "linear: outputs do not fit");
  TORCH_CHECK(codes.is_contiguous() && scale.is_contiguous() && zero.is_contiguous(), "linear: not contiguous");
  return group;
}

// codes [P, 8 K] int8, scale [P, 8] float32; K a multiple of 64
inline void check_int8(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scale, int64_t N) {
  const int64_t P = codes.size(0);
  check_rows(x, codes.size(1) / LANES, BLOCK);
  TORCH_CHECK(P == (N + LANES - 1) / LANES && scale.numel() == P * LANES, "linear: outputs do not fit");
  TORCH_CHECK(codes.is_contiguous() && scale.is_contiguous(), "linear: not contiguous");
}
