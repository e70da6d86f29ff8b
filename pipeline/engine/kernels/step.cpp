// What a decoding step does between its linear layers, in float32 on a CPU: one call each, so that a step of a small model
// is not spent in dispatching small operations. `engine/step.py` says the same in torch, and is faster for the attention
// of many rows.
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

#include "vectors.h"

namespace {

constexpr int64_t NORMS = 32;  // rows of a norm that are worth a thread

// e^x = 2^n e^r with |r| <= ln 2 / 2; the polynomial is Taylor's to the 7th power, its remainder below 2^-24 of e^r.
// Beyond what a float holds x is taken as the limit.
inline Floats exp(Floats x) {
  x = x < -87.0f ? Floats{} - 87.0f : x > 88.0f ? Floats{} + 88.0f : x;
  const Floats scaled = x * 1.44269504f;
  const Sums n = __builtin_convertvector(scaled + (scaled < 0 ? Floats{} - 0.5f : Floats{} + 0.5f), Sums);
  const Floats whole = __builtin_convertvector(n, Floats), r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Floats p = Floats{} + 1.0f / 5040;
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + c;
  return p * (Floats)((n + 127) << 23);
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

// Rotates pairs (d, d + D / 2), as transformers' Llama does.
void rotate(float* x, const float* cos, const float* sin, int64_t D) {
  for (int64_t d = 0; d < D / 2; d++) {
    const float a = x[d], b = x[d + D / 2];
    x[d] = a * cos[d] - b * sin[d];
    x[d + D / 2] = b * cos[d] + a * sin[d];
  }
}

template <class C>
struct Attention {
  int64_t B, T, H, G, D, S, window;
  const int64_t* start;  // [B]
  const float *cos, *sin;  // [P, D / 2]
  C *keys, *values;        // [B, G, S, D]

  void append(float* qkv) const {
    for (int64_t b = 0; b < B; b++)
      for (int64_t t = 0; t < T; t++) {
        float* row = qkv + (b * T + t) * (H + 2 * G) * D;
        const int64_t position = start[b] + t;
        for (int64_t h = 0; h < H + G; h++) rotate(row + h * D, cos + position * D / 2, sin + position * D / 2, D);
        for (int64_t g = 0; g < G; g++) {
          std::copy_n(row + (H + g) * D, D, keys + ((b * G + g) * S + position) * D);
          std::copy_n(row + (H + G + g) * D, D, values + ((b * G + g) * S + position) * D);
        }
      }
  }

  void head(const float* query, int64_t b, int64_t g, int64_t position, float* room, float* out) const {
    const C *key = keys + (b * G + g) * S * D, *value = values + (b * G + g) * S * D;
    const int64_t first = window ? std::max<int64_t>(0, position - window + 1) : 0, count = position - first + 1;
    const float scale = 1 / std::sqrt((float)D);
    float largest = -INFINITY;
    for (int64_t s = 0; s < count; s++) {
      Floats dot = {};
      for (int64_t d = 0; d < D; d += LANES) dot += load(query + d) * load(key + (first + s) * D + d);
      room[s] = sum(dot) * scale;
      largest = std::max(largest, room[s]);
    }
    std::fill(room + count, room + (count + LANES - 1) / LANES * LANES, -INFINITY);
    Floats total = {};
    for (int64_t s = 0; s < count; s += LANES) {
      const Floats weight = exp(load(room + s) - largest);
      store(room + s, weight);
      total += weight;
    }
    const float inverse = 1 / sum(total);
    int64_t d = 0;
    for (; d + 2 * LANES <= D; d += 2 * LANES) mix<2>(room, value + first * D + d, count, inverse, out + d);
    if (d < D) mix<1>(room, value + first * D + d, count, inverse, out + d);
  }

  // W LANES columns of the values, weighted; four sums of each take turns, so that one product does not wait for the last
  template <int W>
  void mix(const float* weight, const C* value, int64_t count, float inverse, float* out) const {
    Floats acc[4][W] = {};
    int64_t s = 0;
    const auto add = [&](int64_t turn) {
      for (int64_t i = 0; i < W; i++) acc[turn][i] += weight[s] * load(value + s * D + i * LANES);
      s++;
    };
    while (s + 4 <= count)
      for (int64_t turn = 0; turn < 4; turn++) add(turn);
    while (s < count) add(0);
    for (int64_t i = 0; i < W; i++)
      store(out + i * LANES, ((acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i])) * inverse);
  }

  void run(const float* qkv, float* out) const {
    at::parallel_for(0, B * T * H, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> room(S + LANES);
      for (int64_t i = begin; i < end; i++) {
        const int64_t row = i / H, h = i % H, b = row / T;
        head(qkv + (row * (H + 2 * G) + h) * D, b, h / (H / G), start[b] + row % T, room.data(), out + i * D);
      }
    });
  }
};

template <class C>
void attend(const Attention<C>& a, float* qkv, float* out) {
  a.append(qkv);
  a.run(qkv, out);
}

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
  float* rows = qkv.data_ptr<float>();
  for (int64_t m = 0; m < M && q_norm; m++) {
    float* row = rows + m * (H + 2 * G) * D;
    normalize_rows(row, *q_norm, eps, row, H);
    normalize_rows(row + H * D, *k_norm, eps, row + H * D, G);
  }
  at::Tensor out = at::empty({M, H * D}, qkv.options());
  const auto with = [&](auto* k, auto* v) {
    attend(Attention{B, T, H, G, D, S, window, start.const_data_ptr<int64_t>(), cos.const_data_ptr<float>(),
                     sin.const_data_ptr<float>(), k, v}, rows, out.data_ptr<float>());
  };
  if (keys.scalar_type() == at::kFloat) with(keys.data_ptr<float>(), values.data_ptr<float>());
  else with(keys.data_ptr<at::BFloat16>(), values.data_ptr<at::BFloat16>());
  return out;
}
}  // namespace

TORCH_LIBRARY(step, m) {
  m.def("add_norm(Tensor(a!) x, Tensor y, Tensor weight, float eps) -> Tensor");
  m.def("silu_mul(Tensor gate_up) -> Tensor");
  m.def("attention(Tensor(a!) qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor cos, Tensor sin, Tensor start, "
        "Tensor(b!) keys, Tensor(c!) values, int window) -> Tensor");
}
TORCH_LIBRARY_IMPL(step, CPU, m) {
  m.impl("add_norm", add_norm);
  m.impl("silu_mul", silu_mul);
  m.impl("attention", attention);
}
