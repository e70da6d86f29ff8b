// All layers of a decoding step in one call: what `LeanModel.hidden` does with the kernels of few_rows.cpp and step.cpp,
// in the same order and to the bit. Calling eight of them a layer from Python takes about 4 us each, a fifth of a small
// model's step in 4 bits.
//
// Legend: M rows of x, D features, P = 20 places of a layer: its norms of input, output, q and k, then for each of its
// products (q/k/v, o, gate/up, down) weight, scales, zeros and bias.

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "kernels.h"

namespace {
constexpr int64_t NORMS = 4, PRODUCTS = 4, PLACES = NORMS + 4 * PRODUCTS;

using Tensors = c10::List<std::optional<at::Tensor>>;

// a bfloat16 weight has no scales, one of 4-bit codes has them
at::Tensor linear(const Tensors& weights, int64_t at, int64_t outputs, const at::Tensor& x) {
  const std::optional<at::Tensor> scales = weights.get(at + 1), bias = weights.get(at + 3);
  at::Tensor y = scales ? few_rows::int4_linear(x, *weights.get(at), *scales, *weights.get(at + 2), outputs)
                        : few_rows::bf16_linear(x, *weights.get(at));
  return bias ? y.add_(*bias) : y;
}

// x [M, D] float32, changed in place: all of the sum but the last product, which is returned. weights [layers * P],
// outputs [layers * 4] of the products, windows [layers]; the rest as in `attention`.
at::Tensor layers(at::Tensor x, const Tensors& weights, at::IntArrayRef outputs, at::IntArrayRef windows, double eps,
                  const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& start, at::TensorList keys,
                  at::TensorList values) {
  const size_t count = windows.size();
  TORCH_CHECK(weights.size() == count * PLACES && outputs.size() == count * PRODUCTS && keys.size() == count &&
              values.size() == count, "layers: lists of different lengths");
  at::Tensor y = at::zeros_like(x);
  for (size_t i = 0; i < count; i++) {
    const int64_t norms = i * PLACES, products = norms + NORMS;
    const int64_t* wide = &outputs[i * PRODUCTS];
    const auto norm = [&](int64_t which) { return weights.get(norms + which); };
    const auto product = [&](int64_t which, const at::Tensor& rows) {
      return linear(weights, products + 4 * which, wide[which], rows);
    };
    const at::Tensor qkv = product(0, step::add_norm(x, y, *norm(0), eps));
    y = product(1, step::attention(qkv, norm(2), norm(3), eps, cos, sin, start, keys[i], values[i], windows[i]));
    y = product(3, step::silu_mul(product(2, step::add_norm(x, y, *norm(1), eps))));
  }
  return y;
}
}  // namespace

TORCH_LIBRARY_FRAGMENT(step, m) {
  m.def("layers(Tensor(a!) x, Tensor?[] weights, int[] outputs, int[] windows, float eps, Tensor cos, Tensor sin, "
        "Tensor start, Tensor(b!)[] keys, Tensor(c!)[] values) -> Tensor");
}
TORCH_LIBRARY_IMPL(step, CPU, m) { m.impl("layers", layers); }
