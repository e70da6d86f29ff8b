// y = x w^T for many rows of x (a prompt, texts to be scored, a batch) on a CPU, bound by its arithmetic.
//
// Legend: M rows of x, N outputs, K inputs, G groups of K, P panels of LANES outputs (few_rows.cpp says how codes lie
// in them). 2 LANES outputs at a time are unpacked into the nearest cache and multiplied there with 6 rows after the other
// (Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication", the roles of the operands exchanged).
// Sums run in the order of K whatever M is; those of codes are few_rows.cpp's to the bit.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "rows.h"

namespace {

constexpr int64_t WIDTH = 2 * LANES, STRIP = 6;  // outputs and rows of a tile: its 12 sums stay in registers
constexpr int64_t DEPTH = 640;                   // columns unpacked at a time: with the rows they meet, in the two caches
constexpr int64_t BAND = 40 * STRIP;             // rows that a thread goes through before it unpacks the next outputs

// Row-major bfloat16 [N, K] as float32: of each column, 2 LANES outputs.
struct Bf16 {
  const c10::BFloat16* weights;
  const float* x;
  int64_t N, K;
  static constexpr int64_t step = LANES;

  struct Panel {
    Floats column[DEPTH][2];
  };

  void unpack(int64_t n, int64_t begin, int64_t end, Panel& to) const {
    for (int64_t half = 0; half < 2; half++, n += LANES)
      for (int64_t k = begin; k < end; k += LANES) {
        Floats r[LANES];
        for (int i = 0; i < LANES; i++) r[i] = load(weights + std::min(n + i, N - 1) * K + k);  // beyond N: cut off later
        transpose(r);
        for (int i = 0; i < LANES; i++) to.column[k - begin + i][half] = r[i];
      }
  }

  template <int M>
  void add(int64_t m, int64_t begin, int64_t end, const Panel& w, Floats y[M][2]) const {
    const float* row = x + m * K;
    for (int64_t k = begin; k < end; k++) {
      const Floats a = w.column[k - begin][0], b = w.column[k - begin][1];
#pragma GCC unroll 6
      for (int i = 0; i < M; i++) {
        y[i][0] += row[i * K + k] * a;
        y[i][1] += row[i * K + k] * b;
      }
    }
  }
};

// 4-bit codes as integers of 16 bits: of 2 columns, 2 LANES outputs.
struct Int4 {
  const uint16_t* codes;
  const at::Half* scale;  // [P, G, LANES]
  const uint8_t* zero;    // [P, G, LANES]
  const FixedRows& x;
  int64_t N, K, group;
  const int64_t step = group;

  struct Panel {
    Shorts pair[DEPTH / 2][2];
    Floats scale[DEPTH / WORD][2];
    Sums zero[DEPTH / WORD][2];
  };

  void unpack(int64_t n, int64_t begin, int64_t end, Panel& to) const {
    for (int64_t half = 0; half < 2; half++) {
      const int64_t p = std::min(n / LANES + half, (N - 1) / LANES);  // beyond the last one: cut off later
      for (int64_t k = begin; k < end; k += WORD) {
        Shorts w[4];
        unpack_nibbles(codes + (p * K + k) * LANES / 4, w);
        for (int j = 0; j < 4; j++) to.pair[(k - begin) / 2 + j][half] = w[j];
      }
      for (int64_t g = begin / group; g < end / group; g++) {
        const int64_t at = (p * (K / group) + g) * LANES, i = g - begin / group;
        to.scale[i][half] = widened(scale + at);
        to.zero[i][half] = widened(zero + at);
      }
    }
  }

  template <int M>
  void add(int64_t m, int64_t begin, int64_t end, const Panel& w, Floats y[M][2]) const {
    const int16_t* row = x.fixed.data() + m * K;
    for (int64_t g = begin / group; g < end / group; g++) {
      Sums dot[M][2] = {};
      for (int64_t k = g * group; k < (g + 1) * group; k += 2) {
        const Shorts a = w.pair[(k - begin) / 2][0], b = w.pair[(k - begin) / 2][1];
#pragma GCC unroll 6
        for (int i = 0; i < M; i++) {
          const Shorts two = pair(row + i * K + k);
          dot[i][0] = add_pairs(dot[i][0], a, two);
          dot[i][1] = add_pairs(dot[i][1], b, two);
        }
      }
      const int64_t at = g - begin / group;
      for (int i = 0; i < M; i++) {
        const int64_t of_x = (m + i) * (K / group) + g;
        for (int half = 0; half < 2; half++)
          y[i][half] += __builtin_convertvector(dot[i][half] - w.zero[at][half] * x.totals[of_x], Floats) *
                        (w.scale[at][half] * x.steps[of_x]);
      }
    }
  }
};

template <int M, class Weight>
void tile(const Weight& w, int64_t m, int64_t begin, int64_t end, const typename Weight::Panel& panel, float* y, int64_t wide) {
  Floats sums[M][2] = {};
  for (int i = 0; i < M && begin > 0; i++)
    for (int half = 0; half < 2; half++) sums[i][half] = load(y + i * wide + half * LANES);
  w.template add<M>(m, begin, end, panel, sums);
  for (int i = 0; i < M; i++)
    for (int half = 0; half < 2; half++) store(y + i * wide + half * LANES, sums[i][half]);
}

// y [M, wide]: outputs in parallel; each thread goes through bands of rows, blocks of columns, its outputs, and strips
template <class Weight>
void multiply(const Weight& w, int64_t M, float* y, int64_t wide) {
  const int64_t blocks = (w.K + DEPTH - 1) / DEPTH, even = (w.K + blocks - 1) / blocks;
  const int64_t depth = std::min((even + w.step - 1) / w.step, DEPTH / w.step) * w.step;
  at::parallel_for(0, wide / WIDTH, 1, [&](int64_t first, int64_t last) {
    const auto panel = std::make_unique<typename Weight::Panel>();
    for (int64_t top = 0; top < M; top += BAND)
      for (int64_t begin = 0; begin < w.K; begin += depth)
        for (int64_t n = first * WIDTH; n < last * WIDTH; n += WIDTH) {
          const int64_t end = std::min(w.K, begin + depth), bottom = std::min(M, top + BAND);
          w.unpack(n, begin, end, *panel);
          for (int64_t m = top; m < bottom; m += STRIP) switch (std::min(STRIP, bottom - m)) {
#define ROWS(R) case R: tile<R>(w, m, begin, end, *panel, y + m * wide + n, wide); break;
              ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#undef ROWS
            }
        }
  });
}

template <class Weight>
at::Tensor product(const Weight& w, const at::Tensor& x) {
  const int64_t wide = (w.N + WIDTH - 1) / WIDTH * WIDTH;
  const at::Tensor y = at::empty({x.size(0), wide}, x.options().dtype(at::kFloat));
  multiply(w, x.size(0), y.data_ptr<float>(), wide);
  return y.narrow(1, 0, w.N).to(x.scalar_type()).contiguous();
}

at::Tensor bf16_linear(const at::Tensor& x, const at::Tensor& w) {
  check_bf16(x, w);
  std::vector<float> room;
  return product(Bf16{w.const_data_ptr<at::BFloat16>(), as_float(x, room), w.size(0), w.size(1)}, x);
}

at::Tensor int4_linear(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& zero,
                       int64_t N) {
  const int64_t group = check_int4(x, codes, scale, zero, N);
  TORCH_CHECK(group <= DEPTH, "many_rows: a group of more than ", DEPTH, " columns");
  const FixedRows fixed(x, group);
  return product(Int4{static_cast<const uint16_t*>(codes.const_data_ptr()), scale.const_data_ptr<at::Half>(),
                      zero.const_data_ptr<uint8_t>(), fixed, N, x.size(1), group}, x);
}
}  // namespace

TORCH_LIBRARY(many_rows, m) {
  m.def("depth() -> int", [] { return DEPTH; });  // the largest group
  m.def("bf16_linear(Tensor x, Tensor w) -> Tensor");
  m.def("int4_linear(Tensor x, Tensor codes, Tensor scale, Tensor zero, int outputs) -> Tensor");
}
TORCH_LIBRARY_IMPL(many_rows, CPU, m) {
  m.impl("bf16_linear", bf16_linear);
  m.impl("int4_linear", int4_linear);
}
