// y = x w^T for few rows of x (decoding, verifying a draft) on a CPU, bound by reading w once.
//
// Legend: M rows of x, N outputs, K inputs, G groups of K. Products and sums are in float32. Weights are spread to
// float32 lanes once and used for all M rows, so verifying several tokens costs little more than producing one.
// Vectors are the compiler's own (8 floats), so the same source serves AVX2, AVX-512 and NEON.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t LANES = 8, MAX_ROWS = 8, GRAIN = 32;
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));

inline Words words(const void* p) { Words v; std::memcpy(&v, p, sizeof v); return v; }
inline Floats floats(const float* p) { Floats v; std::memcpy(&v, p, sizeof v); return v; }
inline float sum(Floats v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

// R outputs at a time keep enough independent sums in flight; the last outputs of a range are computed twice, not read past.
template <int M, int R>
void bf16_outputs(const uint16_t* w, const float* x, float* y, int64_t N, int64_t K, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; n += R) {
    Floats acc[R][M] = {};
    for (int64_t k = 0; k < K; k += 2 * LANES)
      for (int r = 0; r < R; r++) {
        const Words pairs = words(w + std::min(n + r, end - 1) * K + k);
        const Floats even = (Floats)(pairs << 16), odd = (Floats)(pairs & 0xFFFF0000u);
        for (int m = 0; m < M; m++)
          acc[r][m] += even * floats(x + m * K + k) + odd * floats(x + m * K + k + LANES);
      }
    for (int r = 0; r < R && n + r < end; r++)
      for (int m = 0; m < M; m++) y[m * N + n + r] = sum(acc[r][m]);
  }
}

struct Int4 {
  const uint32_t* codes;  // 64 weights are 8 words: nibble j of word i is weight 8 j + i
  const float* scale;     // [N, G]
  const uint8_t* zero;    // [N, G]
  int64_t group;          // weights in a group, a multiple of 64
};

// A nibble c becomes the float 1 + c / 16 by standing in the mantissa, so that one fused multiply-add gives the weight:
// (c - zero) * scale = 16 * scale * (1 + c / 16) - (16 + zero) * scale.
// S sums take turns, so that one product does not wait for the last.
template <int M, int R, int S>
void int4_outputs(const Int4& w, const float* x, float* y, int64_t N, int64_t K, int64_t begin, int64_t end) {
  const int64_t groups = K / w.group;
  for (int64_t n = begin; n < end; n += R) {
    Floats acc[R][M][S] = {};
    for (int64_t g = 0; g < groups; g++) {
      Floats slope[R], offset[R];
      for (int r = 0; r < R; r++) {
        const int64_t at = std::min(n + r, end - 1) * groups + g;
        slope[r] = Floats{} + 16 * w.scale[at];
        offset[r] = Floats{} - w.scale[at] * (16 + w.zero[at]);
      }
      for (int64_t k = g * w.group; k < (g + 1) * w.group; k += 8 * LANES)
        for (int r = 0; r < R; r++) {
          const Words raw = words(w.codes + (std::min(n + r, end - 1) * K + k) / 8);
#pragma GCC unroll 8
          for (int j = 0; j < 8; j++) {
            const Words bits = j < 5 ? raw << (19 - 4 * j) : raw >> (4 * j - 19);
            const Floats weight = (Floats)((bits & 0x00780000u) | 0x3F800000u) * slope[r] + offset[r];
            for (int m = 0; m < M; m++) acc[r][m][j % S] += weight * floats(x + m * K + k + j * LANES);
          }
        }
    }
    for (int r = 0; r < R && n + r < end; r++)
      for (int m = 0; m < M; m++) {
        for (int s = 1; s < S; s++) acc[r][m][0] += acc[r][m][s];
        y[m * N + n + r] = sum(acc[r][m][0]);
      }
  }
}

std::vector<float> rows_of(const at::Tensor& x) {
  std::vector<float> out(x.numel());
  if (x.scalar_type() == at::kFloat) std::copy_n(x.const_data_ptr<float>(), out.size(), out.data());
  else std::copy_n(x.const_data_ptr<at::BFloat16>(), out.size(), out.data());
  return out;
}

void store(const std::vector<float>& y, at::Tensor& out) {
  if (out.scalar_type() == at::kFloat) std::copy(y.begin(), y.end(), out.data_ptr<float>());
  else std::copy(y.begin(), y.end(), out.data_ptr<at::BFloat16>());
}

void check(const at::Tensor& x, int64_t K, int64_t multiple) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) == K && K % multiple == 0 && x.is_contiguous(), "few_rows: x of wrong shape");
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, "few_rows: x of wrong dtype");
}

// compute(rows, first row, begin, end) for every block of at most MAX_ROWS rows and every range of outputs
template <class Compute>
void for_blocks(int64_t M, int64_t N, const Compute& compute) {
  at::parallel_for(0, N, GRAIN, [&](int64_t begin, int64_t end) {
    for (int64_t m = 0; m < M; m += MAX_ROWS) compute(std::min(MAX_ROWS, M - m), m, begin, end);
  });
}

// (rows M, outputs R at a time): as many sums as the vector registers hold beside what is being multiplied
#define EACH_BF16(CASE) CASE(1, 4) CASE(2, 4) CASE(3, 3) CASE(4, 2) CASE(5, 2) CASE(6, 1) CASE(7, 1) CASE(8, 1)
#define EACH_INT4(CASE) \
  CASE(1, 2, 4) CASE(2, 2, 2) CASE(3, 1, 2) CASE(4, 1, 2) CASE(5, 1, 1) CASE(6, 1, 1) CASE(7, 1, 1) CASE(8, 1, 1)

// x [M, K] float32 or bfloat16, w [N, K] bfloat16 -> [M, N] in x's dtype; K a multiple of 16
at::Tensor bf16_linear(const at::Tensor& x, const at::Tensor& w) {
  const int64_t M = x.size(0), N = w.size(0), K = w.size(1);
  check(x, K, 2 * LANES);
  TORCH_CHECK(w.scalar_type() == at::kBFloat16 && w.is_contiguous(), "few_rows: w is not contiguous bfloat16");
  std::vector<float> rows = rows_of(x), split(rows.size()), y(M * N);
  for (size_t i = 0; i < rows.size(); i += 2 * LANES)  // bf16_outputs reads even columns first, then odd ones
    for (int64_t l = 0; l < LANES; l++) {
      split[i + l] = rows[i + 2 * l];
      split[i + LANES + l] = rows[i + 2 * l + 1];
    }
  const auto* weights = static_cast<const uint16_t*>(w.const_data_ptr());
  for_blocks(M, N, [&](int64_t count, int64_t m, int64_t begin, int64_t end) {
    const float* from = split.data() + m * K;
    float* to = y.data() + m * N;
    switch (count) {
#define CASE(M, R) case M: bf16_outputs<M, R>(weights, from, to, N, K, begin, end); break;
      EACH_BF16(CASE)
#undef CASE
    }
  });
  at::Tensor out = at::empty({M, N}, x.options());
  store(y, out);
  return out;
}

// codes [N, K / 8] int32 as in Int4, scale [N, G] float32, zero [N, G] uint8 -> [M, N] in x's dtype
at::Tensor int4_linear(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zero) {
  const int64_t M = x.size(0), N = codes.size(0), K = codes.size(1) * 8, groups = scale.size(1), group = K / groups;
  check(x, K, group);
  TORCH_CHECK(group % 64 == 0 && zero.sizes() == scale.sizes() && scale.size(0) == N, "few_rows: groups do not fit");
  TORCH_CHECK(codes.is_contiguous() && scale.is_contiguous() && zero.is_contiguous(), "few_rows: not contiguous");
  const std::vector<float> rows = rows_of(x);
  std::vector<float> y(M * N);
  const Int4 w{static_cast<const uint32_t*>(codes.const_data_ptr()), scale.const_data_ptr<float>(),
               zero.const_data_ptr<uint8_t>(), group};
  for_blocks(M, N, [&](int64_t count, int64_t m, int64_t begin, int64_t end) {
    const float* from = rows.data() + m * K;
    float* to = y.data() + m * N;
    switch (count) {
#define CASE(M, R, S) case M: int4_outputs<M, R, S>(w, from, to, N, K, begin, end); break;
      EACH_INT4(CASE)
#undef CASE
    }
  });
  at::Tensor out = at::empty({M, N}, x.options());
  store(y, out);
  return out;
}
}  // namespace

TORCH_LIBRARY(few_rows, m) {
  m.def("bf16_linear(Tensor x, Tensor w) -> Tensor");
  m.def("int4_linear(Tensor x, Tensor codes, Tensor scale, Tensor zero) -> Tensor");
}
TORCH_LIBRARY_IMPL(few_rows, CPU, m) {
  m.impl("bf16_linear", bf16_linear);
  m.impl("int4_linear", int4_linear);
}
