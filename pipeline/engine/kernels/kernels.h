// The kernels that kernels/layers.cpp calls, each described where it is defined.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace few_rows {
at::Tensor bf16_linear(const at::Tensor& x, const at::Tensor& w);
at::Tensor int4_linear(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zero,
                       int64_t N);
}  // namespace few_rows

namespace step {
at::Tensor add_norm(at::Tensor x, const at::Tensor& y, const at::Tensor& weight, double eps);
at::Tensor silu_mul(const at::Tensor& gate_up);
at::Tensor attention(at::Tensor qkv, const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm,
                     double eps, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& start, at::Tensor keys,
                     at::Tensor values, int64_t window);
}  // namespace step
