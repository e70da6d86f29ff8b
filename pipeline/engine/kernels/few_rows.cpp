// y = x w^T for few rows of x (decoding, verifying a draft) on a CPU, bound by reading w once.
//
// Legend: M rows of x, N outputs, K inputs, G groups of K. Each weight is unpacked once and used for all M rows, so
// verifying several tokens costs little more than producing one. Every row's sums run in the same order whatever M is:
// a token verified among others gets the logits, to the bit, that it would get alone.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t BLOCK = 64, MAX_ROWS = 6, GRAIN = 16;

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

inline Shorts widened(const int8_t* p) {
#ifdef __AVX2__
  return (Shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#else
  Shorts v;
  for (int i = 0; i < 2 * LANES; i++) v[i] = p[i];
  return v;
#endif
}

// bfloat16 weights: the even and the odd columns of 16 are each a shift or a mask away from float32.
struct Bf16 {
  const uint16_t* weights;
  int64_t K;

  template <int M>
  void output(int64_t n, const float* const* x, float* y) const {
    const uint16_t* w = weights + n * K;
    Floats acc[M][2] = {};
    for (int64_t k = 0; k < K; k += 2 * LANES) {
      const Words pairs = raw<Words>(w + k);
      const Floats even = (Floats)(pairs << 16), odd = (Floats)(pairs & 0xFFFF0000u);
      for (int m = 0; m < M; m++) {
        acc[m][0] += even * load(x[m] + k);
        acc[m][1] += odd * load(x[m] + k + LANES);
      }
    }
    for (int m = 0; m < M; m++) y[m] = sum(acc[m][0] + acc[m][1]);
  }
};

// x in 16-bit fixed point, one step a group: finer than bfloat16 by a factor of 2^7 of the group's largest value, and
// sums of products with small integers are exact.
struct FixedRow {
  const int16_t* x;
  const float* step_G;
};

// 64 codes are 16 words of 16 bits: nibble j of word i is code 16 j + i. w = (code - zero) * scale.
struct Int4 {
  const uint16_t* codes;
  const at::Half* scale;  // [N, G]
  const uint8_t* zero;    // [N, G]
  int64_t K, group;

  template <int M>
  void output(int64_t n, const FixedRow* x, float* y) const {
    const int64_t groups = K / group;
    Floats acc[M] = {};
    for (int64_t g = 0; g < groups; g++) {
      const Shorts zeros = Shorts{} + (int16_t)zero[n * groups + g];
      Sums dot[M] = {};
      for (int64_t k = g * group; k < (g + 1) * group; k += BLOCK) {
        const Shorts four = raw<Shorts>(codes + (n * K + k) / 4);
        typedef uint16_t Bits __attribute__((vector_size(32)));
        const Shorts w[4] = {(four & 15) - zeros, ((Shorts)((Bits)four >> 4) & 15) - zeros,
                             ((Shorts)((Bits)four >> 8) & 15) - zeros, (Shorts)((Bits)four >> 12) - zeros};
        for (int m = 0; m < M; m++)
          dot[m] += (pair_sums(w[0], raw<Shorts>(x[m].x + k)) + pair_sums(w[1], raw<Shorts>(x[m].x + k + 16))) +
                    (pair_sums(w[2], raw<Shorts>(x[m].x + k + 32)) + pair_sums(w[3], raw<Shorts>(x[m].x + k + 48)));
      }
      const float s = scale[n * groups + g];
      for (int m = 0; m < M; m++) acc[m] += __builtin_convertvector(dot[m], Floats) * (s * x[m].step_G[g]);
    }
    for (int m = 0; m < M; m++) y[m] = sum(acc[m]);
  }
};

// 8-bit codes, one scale an output; x in groups of 64
struct Int8 {
  const int8_t* codes;
  const float* scale;  // [N]
  int64_t K;

  template <int M>
  void output(int64_t n, const FixedRow* x, float* y) const {
    Floats acc[M] = {};
    for (int64_t k = 0; k < K; k += BLOCK) {
      Shorts w[4];
      for (int j = 0; j < 4; j++) w[j] = widened(codes + n * K + k + 16 * j);
      for (int m = 0; m < M; m++) {
        Sums dot = {};
        for (int j = 0; j < 4; j++) dot += pair_sums(w[j], raw<Shorts>(x[m].x + k + 16 * j));
        acc[m] += __builtin_convertvector(dot, Floats) * x[m].step_G[k / BLOCK];
      }
    }
    for (int m = 0; m < M; m++) y[m] = sum(acc[m]) * scale[n];
  }
};

template <int M, class Weight, class Row>
void outputs(const Weight& w, const Row* x, float* y, int64_t N, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; n++) {
    float out[M];
    w.template output<M>(n, x, out);
    for (int m = 0; m < M; m++) y[m * N + n] = out[m];
  }
}

// y [M, N]: outputs in parallel, GRAIN at a time so that further rows find the weights in the cache
template <class Weight, class Row>
void multiply(const Weight& w, const std::vector<Row>& rows, float* y, int64_t N) {
  const int64_t M = rows.size(), passes = (M + MAX_ROWS - 1) / MAX_ROWS;  // of about equal size
  at::parallel_for(0, (N + GRAIN - 1) / GRAIN, 1, [&](int64_t first, int64_t last) {
    for (int64_t begin = first * GRAIN; begin < std::min(N, last * GRAIN); begin += GRAIN)
      for (int64_t pass = 0, m = 0; pass < passes; pass++) {
        const int64_t count = (M - m) / (passes - pass);
        const Row* x = rows.data() + m;
        float* to = y + m * N;
        const int64_t end = std::min(N, begin + GRAIN);
        switch (count) {
#define ROWS(R) case R: outputs<R>(w, x, to, N, begin, end); break;
          ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#undef ROWS
        }
        m += count;
      }
  });
}

// x as float32: its own memory if it is that already
const float* as_float(const at::Tensor& x, std::vector<float>& room) {
  if (x.scalar_type() == at::kFloat) return x.const_data_ptr<float>();
  room.assign(x.const_data_ptr<at::BFloat16>(), x.const_data_ptr<at::BFloat16>() + x.numel());
  return room.data();
}

template <class Weight, class Row>
at::Tensor product(const Weight& w, const std::vector<Row>& rows, int64_t N, const at::Tensor& x) {
  at::Tensor out = at::empty({x.size(0), N}, x.options());
  if (x.scalar_type() == at::kFloat) {
    multiply(w, rows, out.data_ptr<float>(), N);
  } else {
    std::vector<float> y(out.numel());
    multiply(w, rows, y.data(), N);
    std::copy(y.begin(), y.end(), out.data_ptr<at::BFloat16>());
  }
  return out;
}

class FixedRows {
 public:
  FixedRows(const at::Tensor& x, int64_t group) : fixed(x.numel()), steps(x.numel() / group) {
    std::vector<float> room;
    const float* from = as_float(x, room);
    const int64_t M = x.size(0), K = x.size(1);
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
    }
    for (int64_t m = 0; m < M; m++) rows.push_back({fixed.data() + m * K, steps.data() + m * (K / group)});
  }
  std::vector<FixedRow> rows;

 private:
  std::vector<int16_t> fixed;
  std::vector<float> steps;
};

void check(const at::Tensor& x, int64_t K, int64_t multiple) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) == K && K % multiple == 0 && x.is_contiguous(), "few_rows: x of wrong shape");
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, "few_rows: x of wrong dtype");
}

// x [M, K] float32 or bfloat16, w [N, K] bfloat16 -> [M, N] in x's dtype; K a multiple of 16
at::Tensor bf16_linear(const at::Tensor& x, const at::Tensor& w) {
  const int64_t M = x.size(0), K = w.size(1);
  check(x, K, 2 * LANES);
  TORCH_CHECK(w.scalar_type() == at::kBFloat16 && w.is_contiguous(), "few_rows: w is not contiguous bfloat16");
  std::vector<float> room, split(x.numel());
  const float* from = as_float(x, room);
  for (int64_t i = 0; i < x.numel(); i += 2 * LANES)  // even columns first, then the odd ones
    for (int64_t l = 0; l < LANES; l++) {
      split[i + l] = from[i + 2 * l];
      split[i + LANES + l] = from[i + 2 * l + 1];
    }
  std::vector<const float*> rows;
  for (int64_t m = 0; m < M; m++) rows.push_back(split.data() + m * K);
  return product(Bf16{static_cast<const uint16_t*>(w.const_data_ptr()), K}, rows, w.size(0), x);
}

// codes [N, K / 4] int16 as in Int4, scale [N, G] float16, zero [N, G] uint8 -> [M, N] in x's dtype
at::Tensor int4_linear(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zero) {
  const int64_t N = codes.size(0), K = codes.size(1) * 4, group = K / scale.size(1);
  check(x, K, group);
  TORCH_CHECK(group % BLOCK == 0 && zero.sizes() == scale.sizes() && scale.size(0) == N, "few_rows: groups do not fit");
  TORCH_CHECK(codes.is_contiguous() && scale.is_contiguous() && zero.is_contiguous(), "few_rows: not contiguous");
  const FixedRows fixed(x, group);
  const Int4 w{static_cast<const uint16_t*>(codes.const_data_ptr()), scale.const_data_ptr<at::Half>(),
               zero.const_data_ptr<uint8_t>(), K, group};
  return product(w, fixed.rows, N, x);
}

// codes [N, K] int8, scale [N] float32 -> [M, N] in x's dtype; K a multiple of 64
at::Tensor int8_linear(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scale) {
  const int64_t N = codes.size(0), K = codes.size(1);
  check(x, K, BLOCK);
  TORCH_CHECK(codes.is_contiguous() && scale.is_contiguous() && scale.numel() == N, "few_rows: scales do not fit");
  const FixedRows fixed(x, BLOCK);
  return product(Int8{codes.const_data_ptr<int8_t>(), scale.const_data_ptr<float>(), K}, fixed.rows, N, x);
}
}  // namespace

TORCH_LIBRARY(few_rows, m) {
  m.def("bf16_linear(Tensor x, Tensor w) -> Tensor");
  m.def("int4_linear(Tensor x, Tensor codes, Tensor scale, Tensor zero) -> Tensor");
  m.def("int8_linear(Tensor x, Tensor codes, Tensor scale) -> Tensor");
}
TORCH_LIBRARY_IMPL(few_rows, CPU, m) {
  m.impl("bf16_linear", bf16_linear);
  m.impl("int4_linear", int4_linear);
  m.impl("int8_linear", int8_linear);
}
