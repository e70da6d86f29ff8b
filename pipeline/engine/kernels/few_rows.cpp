// y = x w^T for few rows of x (decoding, verifying a draft) on a CPU, bound by reading w once.
//
// Legend: M rows of x, N outputs, K inputs, G groups of K, P panels of LANES outputs. Each weight is unpacked once and used
// for several rows, so verifying several tokens costs little more than producing one. Every row's sums run in the same
// order whatever M is: a token verified among others gets the logits, to the bit, that it would get alone.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "rows.h"

namespace {

constexpr int64_t MAX_ROWS = 6, GRAIN = 2;

// Weights come from memory in order, but faster than the CPU looks ahead by itself: it stops at the end of a page.
inline void expect(const void* p) { __builtin_prefetch((const char*)p + 4096); }

// Row-major bfloat16: the even and the odd columns of 2 LANES are each a shift or a mask away from float32. One output after
// the other: reading several at once is faster from a cache, and slower from memory.
struct Bf16 {
  const uint16_t* weights;
  int64_t N, K;

  template <int M>
  void panel(int64_t p, const float* const* x, Floats* y) const {
    for (int64_t r = 0; r < std::min(LANES, N - p * LANES); r++) {
      const uint16_t* w = weights + (p * LANES + r) * K;
      Floats acc[M][2] = {};
      for (int64_t k = 0; k < K; k += 2 * LANES) {
        expect(w + k);
        const Words pairs = raw<Words>(w + k);
        const Floats even = (Floats)(pairs << 16), odd = (Floats)(pairs & 0xFFFF0000u);
        for (int m = 0; m < M; m++) {
          acc[m][0] += even * load(x[m] + k);
          acc[m][1] += odd * load(x[m] + k + LANES);
        }
      }
      for (int m = 0; m < M; m++) y[m][r] = sum(acc[m][0] + acc[m][1]);
    }
  }
};

struct FixedRow {
  const int16_t* x;
  const float* step_G;
  const int32_t* total_G;
};

// Codes lie in panels: a vector holds two columns of each of LANES outputs, and its product with two columns of x is a sum
// for each of them. w = (code - zero) * scale.
struct Int4 {
  const uint16_t* codes;
  const at::Half* scale;  // [P, G, LANES]
  const uint8_t* zero;    // [P, G, LANES]
  int64_t N, K, group;

  template <int M>
  void panel(int64_t p, const FixedRow* x, Floats* y) const {
    const int64_t groups = K / group;
    for (int m = 0; m < M; m++) y[m] = Floats{};
    for (int64_t g = 0; g < groups; g++) {
      Sums dot[M][2] = {};  // in turns: one product does not wait for the last
      for (int64_t k = g * group; k < (g + 1) * group; k += WORD) {
        const uint16_t* words = codes + (p * K + k) * LANES / 4;
        expect(words);
        Shorts w[4];
        unpack_nibbles(words, w);
        for (int m = 0; m < M; m++)
          for (int j = 0; j < 4; j++) dot[m][j & 1] = add_pairs(dot[m][j & 1], w[j], pair(x[m].x + k + 2 * j));
      }
      const int64_t at = (p * groups + g) * LANES;
      const Floats scales = widened(scale + at);
      const Sums zeros = widened(zero + at);
      for (int m = 0; m < M; m++)
        y[m] += __builtin_convertvector(dot[m][0] + dot[m][1] - zeros * x[m].total_G[g], Floats) * (scales * x[m].step_G[g]);
    }
  }
};

// 8-bit codes, one scale an output, in panels: of 2 columns, all outputs; x in groups of 64
struct Int8 {
  const int8_t* codes;
  const float* scale;  // [P, LANES]
  int64_t N, K;

  template <int M>
  void panel(int64_t p, const FixedRow* x, Floats* y) const {
    for (int m = 0; m < M; m++) y[m] = Floats{};
    for (int64_t g = 0; g < K / BLOCK; g++) {
      Sums dot[M][2] = {};
      for (int64_t k = g * BLOCK; k < (g + 1) * BLOCK; k += 4) {
        expect(codes + (p * K + k) * LANES);
        Shorts w[2];
        for (int j = 0; j < 2; j++) w[j] = widened(codes + (p * K + k + 2 * j) * LANES);
        for (int m = 0; m < M; m++)
          for (int j = 0; j < 2; j++) dot[m][j] = add_pairs(dot[m][j], w[j], pair(x[m].x + k + 2 * j));
      }
      for (int m = 0; m < M; m++) y[m] += __builtin_convertvector(dot[m][0] + dot[m][1], Floats) * x[m].step_G[g];
    }
    for (int m = 0; m < M; m++) y[m] *= load(scale + p * LANES);
  }
};

template <int M, class Weight, class Row>
void outputs(const Weight& w, const Row* x, float* y, int64_t begin, int64_t end) {
  for (int64_t p = begin; p < end; p++) {
    Floats out[M];
    w.template panel<M>(p, x, out);
    const int64_t n = p * LANES, count = std::min(LANES, w.N - n);
    for (int m = 0; m < M; m++) std::memcpy(y + m * w.N + n, &out[m], count * sizeof(float));
  }
}

// y [M, N]: panels in parallel, GRAIN at a time so that further rows find the weights in the cache
template <class Weight, class Row>
void multiply(const Weight& w, const std::vector<Row>& rows, float* y) {
  const int64_t M = rows.size(), passes = (M + MAX_ROWS - 1) / MAX_ROWS;  // of about equal size
  const int64_t panels = (w.N + LANES - 1) / LANES;
  at::parallel_for(0, (panels + GRAIN - 1) / GRAIN, 1, [&](int64_t first, int64_t last) {
    for (int64_t begin = first * GRAIN; begin < std::min(panels, last * GRAIN); begin += GRAIN)
      for (int64_t pass = 0, m = 0; pass < passes; pass++) {
        const int64_t count = (M - m) / (passes - pass), end = std::min(panels, begin + GRAIN);
        switch (count) {
#define ROWS(R) case R: outputs<R>(w, rows.data() + m, y + m * w.N, begin, end); break;
          ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#undef ROWS
        }
        m += count;
      }
  });
}

template <class Weight, class Row>
at::Tensor product(const Weight& w, const std::vector<Row>& rows, const at::Tensor& x) {
  at::Tensor out = at::empty({x.size(0), w.N}, x.options());
  if (x.scalar_type() == at::kFloat) {
    multiply(w, rows, out.data_ptr<float>());
  } else {
    std::vector<float> y(out.numel());
    multiply(w, rows, y.data());
    std::copy(y.begin(), y.end(), out.data_ptr<at::BFloat16>());
  }
  return out;
}

std::vector<FixedRow> pointers(const FixedRows& x, int64_t M) {
  std::vector<FixedRow> rows;
  for (int64_t m = 0; m < M; m++) {
    const int64_t k = m * (x.fixed.size() / M), g = m * (x.steps.size() / M);
    rows.push_back({x.fixed.data() + k, x.steps.data() + g, x.totals.data() + g});
  }
  return rows;
}

}  // namespace

namespace few_rows {
at::Tensor bf16_linear(const at::Tensor& x, const at::Tensor& w) {
  check_bf16(x, w);
  const int64_t M = x.size(0), K = w.size(1);
  std::vector<float> room, split(x.numel());
  const float* from = as_float(x, room);
  for (int64_t i = 0; i < x.numel(); i += 2 * LANES)  // even columns first, then the odd ones
    for (int64_t l = 0; l < LANES; l++) {
      split[i + l] = from[i + 2 * l];
      split[i + LANES + l] = from[i + 2 * l + 1];
    }
  std::vector<const float*> rows;
  for (int64_t m = 0; m < M; m++) rows.push_back(split.data() + m * K);
  return product(Bf16{static_cast<const uint16_t*>(w.const_data_ptr()), w.size(0), K}, rows, x);
}

at::Tensor int4_linear(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zero,
                       int64_t N) {
  const int64_t group = check_int4(x, codes, scale, zero, N);
  const FixedRows fixed(x, group);
  const Int4 w{static_cast<const uint16_t*>(codes.const_data_ptr()), scale.const_data_ptr<at::Half>(),
               zero.const_data_ptr<uint8_t>(), N, x.size(1), group};
  return product(w, pointers(fixed, x.size(0)), x);
}

at::Tensor int8_linear(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scale, int64_t N) {
  check_int8(x, codes, scale, N);
  const FixedRows fixed(x, BLOCK);
  const Int8 w{codes.const_data_ptr<int8_t>(), scale.const_data_ptr<float>(), N, x.size(1)};
  return product(w, pointers(fixed, x.size(0)), x);
}
}  // namespace few_rows

TORCH_LIBRARY(few_rows, m) {
  m.def("lanes() -> int", [] { return LANES; });  // outputs of a panel
  m.def("bf16_linear(Tensor x, Tensor w) -> Tensor");
  m.def("int4_linear(Tensor x, Tensor codes, Tensor scale, Tensor zero, int outputs) -> Tensor");
  m.def("int8_linear(Tensor x, Tensor codes, Tensor scale, int outputs) -> Tensor");
}
TORCH_LIBRARY_IMPL(few_rows, CPU, m) {
  m.impl("bf16_linear", few_rows::bf16_linear);
  m.impl("int4_linear", few_rows::int4_linear);
  m.impl("int8_linear", few_rows::int8_linear);
}
