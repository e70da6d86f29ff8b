// What a decoding step does between its linear layers, in float32 on a CPU: one call each, so that a step of a small model
// is not spent in dispatching small operations. `engine/step.py` says the same in torch.
//
// Legend: M = B T rows (T tokens of each of B sequences), D features of a row or of a head, H query heads, G key/value
// heads, S positions of the cache, P positions of the rotary tables. The cache is bfloat16 or float32.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "vectors.h"

namespace {

constexpr int64_t NORMS = 32, ROTATIONS = 16;  // rows of a norm, or to be rotated, that are worth a thread

// e^x = 2^n e^r with |r| <= ln 2 / 2; the polynomial is Taylor's to the 7th power, its remainder below 2^-24 of e^r.
// Below what a float holds it is 0; above x is taken as the limit.
inline Floats exp(Floats x) {
  const auto none = x < -87.0f;
  x = none ? Floats{} : x > 88.0f ? Floats{} + 88.0f : x;
  const Floats scaled = x * 1.44269504f;
  const Sums n = __builtin_convertvector(scaled + (scaled < 0 ? Floats{} - 0.5f : Floats{} + 0.5f), Sums);
  const Floats whole = __builtin_convertvector(n, Floats), r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Floats p = Floats{} + 1.0f / 5040;
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + c;
  return none ? Floats{} : p * (Floats)((n + 127) << 23);
}

template <class W>
void normalize(const float* x, const W* weight, float eps, float* y, int64_t D) {
  Floats squares = {};
  for (int64_t d = 0; d < D; d += LANES) squares += load(x + d) * load(x + d);
  const float inverse = 1 / std::sqrt(sum(squares) / D + eps);
  for (int64_t d = 0; d < D; d += LANES) store(y + d, load(x + d) * inverse * load(weight + d));
}

void normalize_rows(const float* x, const at::Tensor& weight, double eps, float* y, int64_t rows) {
  const int64_t D = weight.numel();
  for (int64_t m = 0; m < rows; m++) {
    if (weight.scalar_type() == at::kFloat) normalize(x + m * D, weight.const_data_ptr<float>(), eps, y + m * D, D);
    else normalize(x + m * D, weight.const_data_ptr<at::BFloat16>(), eps, y + m * D, D);
  }
}

}  // namespace

namespace step {
// x_MD += y_MD; returns the root-mean-square norm of x times weight_D
at::Tensor add_norm(at::Tensor x, const at::Tensor& y, const at::Tensor& weight, double eps) {
  const int64_t M = x.size(0), D = x.size(1);
  TORCH_CHECK(x.is_contiguous() && y.is_contiguous() && weight.numel() == D && D % LANES == 0, "step: wrong shape");
  const float* more = y.const_data_ptr<float>();
  at::Tensor out = at::empty({M, D}, x.options());
  float *sum = x.data_ptr<float>(), *to = out.data_ptr<float>();
  at::parallel_for(0, M, NORMS, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * D; i < end * D; i++) sum[i] += more[i];
    normalize_rows(sum + begin * D, weight, eps, to + begin * D, end - begin);
  });
  return out;
}

// gate and up side by side [M, 2 D] -> silu(gate) * up [M, D]
at::Tensor silu_mul(const at::Tensor& gate_up) {
  const int64_t M = gate_up.size(0), D = gate_up.size(1) / 2;
  TORCH_CHECK(gate_up.is_contiguous() && D % LANES == 0, "step: wrong shape");
  at::Tensor out = at::empty({M, D}, gate_up.options());
  const float* from = gate_up.const_data_ptr<float>();
  float* to = out.data_ptr<float>();
  at::parallel_for(0, M, 2, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++)
      for (int64_t d = 0; d < D; d += LANES) {
        const Floats gate = load(from + 2 * m * D + d), up = load(from + (2 * m + 1) * D + d);
        store(to + m * D + d, gate / (1 + exp(-gate)) * up);
      }
  });
  return out;
}

}  // namespace step

namespace {
// Rotates pairs (d, d + D / 2), as transformers' Llama does.
void rotate(float* x, const float* cos, const float* sin, int64_t D) {
  for (int64_t d = 0; d < D / 2; d++) {
    const float a = x[d], b = x[d + D / 2];
    x[d] = a * cos[d] - b * sin[d];
    x[d + D / 2] = b * cos[d] + a * sin[d];
  }
}

// TOKENS of a sequence attend together, with all the heads that share keys: each key is read once for them. Blocks of keys
// start at multiples of WIDTH, and what a row does not see weighs exactly 0: a token's sums run in the same order whatever
// is computed beside it.
template <class C>
struct Attention {
  static constexpr int64_t WIDTH = 2 * LANES, STRIP = 6, TOKENS = 32;
  int64_t B, T, H, G, D, S, window;
  const int64_t* start;    // [B]
  const float *cos, *sin;  // [P, D / 2]
  C *keys, *values;        // [B, G, S, D]

  struct Room {
    std::vector<Floats> panel;      // [D, 2]: of each feature, WIDTH keys
    std::vector<float> weights;     // [rows, keys]
    std::vector<const float*> row;  // of queries
    std::vector<float*> out;
  };

  // norms of q and k where given, rotation, and their keys and values into the cache
  void append(float* qkv, const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm,
              double eps) const {
    at::parallel_for(0, B * T, ROTATIONS, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; m++) {
        const int64_t b = m / T, position = start[b] + m % T;
        float* row = qkv + m * (H + 2 * G) * D;
        if (q_norm) normalize_rows(row, *q_norm, eps, row, H);
        if (k_norm) normalize_rows(row + H * D, *k_norm, eps, row + H * D, G);
        for (int64_t h = 0; h < H + G; h++) rotate(row + h * D, cos + position * D / 2, sin + position * D / 2, D);
        for (int64_t g = 0; g < G; g++) {
          std::copy_n(row + (H + g) * D, D, keys + ((b * G + g) * S + position) * D);
          std::copy_n(row + (H + G + g) * D, D, values + ((b * G + g) * S + position) * D);
        }
      }
    });
  }

  // products of M queries with the WIDTH keys of the panel
  template <int M>
  void score(const Floats* panel, const float* const* row, float scale, float* to, int64_t stride) const {
    Floats acc[M][2] = {};
    for (int64_t d = 0; d < D; d++)
#pragma GCC unroll 6
      for (int m = 0; m < M; m++) {
        acc[m][0] += row[m][d] * panel[2 * d];
        acc[m][1] += row[m][d] * panel[2 * d + 1];
      }
    for (int m = 0; m < M; m++)
      for (int half = 0; half < 2; half++) store(to + m * stride + half * LANES, acc[m][half] * scale);
  }

  // W LANES columns of the values, weighted for M queries
  template <int M, int W>
  void mix(const float* weight, int64_t stride, const C* value, int64_t count, const float* inverse, float* const* out,
           int64_t d) const {
    Floats acc[M][W] = {};
    for (int64_t s = 0; s < count; s++) {
      Floats v[W];
      for (int w = 0; w < W; w++) v[w] = load(value + s * D + d + w * LANES);
#pragma GCC unroll 6
      for (int m = 0; m < M; m++)
        for (int w = 0; w < W; w++) acc[m][w] += weight[m * stride + s] * v[w];
    }
    for (int m = 0; m < M; m++)
      for (int w = 0; w < W; w++) store(out[m] + d + w * LANES, acc[m][w] * inverse[m]);
  }

  // tokens t..t + count of sequence b, the heads that share keys g
  void block(const float* qkv, int64_t b, int64_t g, int64_t t, int64_t count, Room& room, float* out) const {
    const int64_t heads = H / G, rows = count * heads, first = start[b] + t, end = first + count;
    const int64_t begin = window ? std::max<int64_t>(0, first - window + 1) / WIDTH * WIDTH : 0;
    const int64_t stride = (end - begin + WIDTH - 1) / WIDTH * WIDTH;
    const C *key = keys + (b * G + g) * S * D, *value = values + ((b * G + g) * S + begin) * D;
    room.panel.resize(2 * D), room.weights.resize(rows * stride), room.row.clear(), room.out.clear();
    for (int64_t i = 0; i < rows; i++) {
      const int64_t m = b * T + t + i / heads, h = g * heads + i % heads;
      room.row.push_back(qkv + (m * (H + 2 * G) + h) * D);
      room.out.push_back(out + (m * H + h) * D);
    }
    for (int64_t s = begin; s < end; s += WIDTH) {
      for (int64_t half = 0; half < 2; half++)
        for (int64_t d = 0; d < D; d += LANES) {
          Floats r[LANES];
          for (int64_t i = 0; i < LANES; i++) r[i] = load(key + std::min(s + half * LANES + i, end - 1) * D + d);
          transpose(r);
          for (int64_t i = 0; i < LANES; i++) room.panel[2 * (d + i) + half] = r[i];
        }
      strips(rows, [&]<int M>(int64_t i) {
        score<M>(room.panel.data(), &room.row[i], 1 / std::sqrt((float)D), &room.weights[i * stride + s - begin], stride);
      });
    }
    std::vector<float> inverse(rows);
    for (int64_t i = 0; i < rows; i++) {
      const int64_t seen = first + i / heads + 1 - begin;
      inverse[i] = 1 / soften(&room.weights[i * stride], window ? std::max<int64_t>(0, seen - window) : 0, seen, stride);
    }
    strips(rows, [&]<int M>(int64_t i) {
      const float* weight = &room.weights[i * stride];
      int64_t d = 0;
      for (; d + WIDTH <= D; d += WIDTH) mix<M, 2>(weight, stride, value, end - begin, &inverse[i], &room.out[i], d);
      if (d < D) mix<M, 1>(weight, stride, value, end - begin, &inverse[i], &room.out[i], d);
    });
  }

  // scores -> e^(score - largest), 0 where not from..to; returns their sum
  static float soften(float* weight, int64_t from, int64_t to, int64_t count) {
    std::fill(weight, weight + from, -INFINITY);
    std::fill(weight + to, weight + count, -INFINITY);
    Floats most = Floats{} - INFINITY, total = {};
    for (int64_t s = 0; s < count; s += LANES) {
      const Floats w = load(weight + s);
      most = w > most ? w : most;
    }
    float largest = most[0];
    for (int64_t i = 1; i < LANES; i++) largest = std::max(largest, most[i]);
    for (int64_t s = 0; s < count; s += LANES) {
      const Floats w = exp(load(weight + s) - largest);
      store(weight + s, w);
      total += w;
    }
    return sum(total);
  }

  template <class Do>
  static void strips(int64_t rows, const Do& run) {
    for (int64_t i = 0; i < rows; i += STRIP) switch (std::min(STRIP, rows - i)) {
#define ROWS(R) case R: run.template operator()<R>(i); break;
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#undef ROWS
      }
  }

  void run(const float* qkv, float* out) const {
    const int64_t blocks = (T + TOKENS - 1) / TOKENS;
    at::parallel_for(0, B * G * blocks, 1, [&](int64_t begin, int64_t end) {
      Room room;
      for (int64_t i = begin; i < end; i++) {
        // a late block sees more: first, last, second, last but one, ... so that each thread has of both
        const int64_t n = i % blocks, t = (n % 2 ? blocks - 1 - n / 2 : n / 2) * TOKENS;
        block(qkv, i / blocks / G, i / blocks % G, t, std::min(TOKENS, T - t), room, out);
      }
    });
  }
};

}  // namespace

namespace step {
// qkv [M, (H + 2 G) D] (changed in place: norms of q and k where given, rotation), tables [P, D / 2], start [B];
// writes keys and values [B, G, S, D] at start..start + T; window 0 = all positions. Returns [M, H D].
at::Tensor attention(at::Tensor qkv, const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm,
                     double eps, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& start, at::Tensor keys,
                     at::Tensor values, int64_t window) {
  const int64_t B = keys.size(0), G = keys.size(1), S = keys.size(2), D = keys.size(3), M = qkv.size(0), T = M / B;
  const int64_t H = qkv.size(1) / D - 2 * G;
  TORCH_CHECK(qkv.is_contiguous() && keys.is_contiguous() && values.is_contiguous() && D % LANES == 0 && H % G == 0,
              "step: wrong shape");
  for (int64_t b = 0; b < B; b++) {
    const int64_t end = start.const_data_ptr<int64_t>()[b] + T;
    TORCH_CHECK(end <= S && end <= cos.size(0), "step: beyond the cache or the context");
  }
  at::Tensor out = at::empty({M, H * D}, qkv.options());
  const auto with = [&](auto* k, auto* v) {
    const Attention attention{B, T, H, G, D, S, window, start.const_data_ptr<int64_t>(), cos.const_data_ptr<float>(),
                              sin.const_data_ptr<float>(), k, v};
    attention.append(qkv.data_ptr<float>(), q_norm, k_norm, eps);
    attention.run(qkv.const_data_ptr<float>(), out.data_ptr<float>());
  };
  if (keys.scalar_type() == at::kFloat) with(keys.data_ptr<float>(), values.data_ptr<float>());
  else with(keys.data_ptr<at::BFloat16>(), values.data_ptr<at::BFloat16>());
  return out;
}
}  // namespace step

TORCH_LIBRARY(step, m) {
  m.def("add_norm(Tensor(a!) x, Tensor y, Tensor weight, float eps) -> Tensor");
  m.def("silu_mul(Tensor gate_up) -> Tensor");
  m.def("attention(Tensor(a!) qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor cos, Tensor sin, Tensor start, "
        "Tensor(b!) keys, Tensor(c!) values, int window) -> Tensor");
}
TORCH_LIBRARY_IMPL(step, CPU, m) {
  m.impl("add_norm", step::add_norm);
  m.impl("silu_mul", step::silu_mul);
  m.impl("attention", step::attention);
}
