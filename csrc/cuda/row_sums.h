// The pass over one row of logits: what each of the block's threads adds up, and how the parts become the row's sums. The order
// is fixed by the columns alone, so a row's bits depend neither on its batch nor on the run.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../device.h"
#include "api.h"

namespace datc::cuda {

constexpr int kThreads = 256;  // of the block that takes a row; a power of two
constexpr int kTile = 8;       // columns that a thread takes at once, kThreads apart

// What stands for the gap to a masked logit: exp of it is 0, and 0 times it is 0.
constexpr float kMasked = -1e5f;

// The sums of a set of columns (datc_kernels/anchored_state.py), with x in place of z = factor x: differences of close logits
// stay exact. x_t = -inf with zero sums is the empty set.
struct Sums {
  float x_t, Q, R, H, u_t, S1, S2, S3;
};

DATC_DEVICE inline Sums nothing() { return {-INFINITY, 0, 0, 0, 0, 0, 0, 0}; }

DATC_DEVICE inline float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

struct Float32 {
  using Stored = float;
  DATC_DEVICE static float wide(float value) { return value; }
};

struct BFloat16 {
  using Stored = uint16_t;
  DATC_DEVICE static float wide(uint16_t bits) { return as_float(uint32_t(bits) << 16); }
};

struct Float16 {
  using Stored = uint16_t;
  DATC_DEVICE static float wide(uint16_t bits) {
    const uint32_t magnitude = uint32_t(bits & 0x7fff) << 13, sign = uint32_t(bits & 0x8000) << 16;
    const bool special = (bits & 0x7c00) == 0x7c00;  // infinite or NaN
    const float value = as_float(special ? magnitude | 0x7f800000 : magnitude) * (special ? 1.0f : 0x1p112f);
    return sign ? -value : value;
  }
};

struct Absent {
  using Stored = float;
  DATC_DEVICE static float wide(float) { return 0; }
};

// factor (x - top), at least kMasked; a NaN stays one.
DATC_DEVICE inline float gap(float x, float top, float factor) {
  if (x == -INFINITY) return kMasked;
  const float value = factor * (x - top);
  return value < kMasked ? kMasked : value;
}

// The sums of kTile columns. What u holds beside a masked logit, NaN included, does not count.
DATC_DEVICE inline Sums tile_sums(const float (&x)[kTile], const float (&u)[kTile], float factor) {
  Sums s = nothing();
  int t = -1;
  for (int j = 0; j < kTile; ++j) {  // passes over NaN, which shows in the sums
    if (x[j] > s.x_t) s.x_t = x[j], s.u_t = u[j], t = j;
  }
  const float top = s.x_t == -INFINITY ? 0 : s.x_t;
  s.Q = top - top;  // NaN where the top is infinite
  s.S1 = s.u_t - s.u_t;
  s.S2 = s.S3 = s.S1;
  for (int j = 0; j < kTile; ++j) {
    const float g = gap(x[j], top, factor), e = j == t ? 0 : std::exp(g), e2 = e * e;
    const float delta = x[j] == -INFINITY ? 0 : u[j] - s.u_t;
    s.Q += e;
    s.R += e2;
    s.H += e * g;
    s.S1 += e * delta;
    s.S2 += e2 * delta;
    s.S3 += e2 * delta * delta;
  }
  if (s.Q != s.Q) s.x_t = s.Q;  // the row is not one without columns
  return s;
}

// The union of two disjoint sets of columns; a NaN in either stays.
DATC_DEVICE inline Sums merge(const Sums& a, const Sums& b, float factor) {
  const bool swap = b.x_t > a.x_t || b.x_t != b.x_t;
  const Sums &hi = swap ? b : a, &lo = swap ? a : b;
  const float g = gap(lo.x_t, hi.x_t, factor), f = std::exp(g), f2 = f * f, D = lo.u_t - hi.u_t;
  return {
      hi.x_t,
      hi.Q + f * (1 + lo.Q),
      hi.R + f2 * (1 + lo.R),
      hi.H + f * (lo.H + g * (1 + lo.Q)),
      hi.u_t,
      hi.S1 + f * (D * (1 + lo.Q) + lo.S1),
      hi.S2 + f2 * (D * (1 + lo.R) + lo.S2),
      hi.S3 + f2 * (D * D * (1 + lo.R) + 2 * D * lo.S2 + lo.S3),
  };
}

// One row of a call.
template <class Logits, class Reward>
struct Row {
  const LogitsCall& call;
  int64_t row;
  float scale, softcap, factor;  // x = softcap tanh(scale raw), or raw; z = factor x

  DATC_DEVICE Row(const LogitsCall& call, int64_t row) : call(call), row(row), softcap(float(call.softcap)) {
    const double temperature = call.row_temperature == nullptr ? call.temperature : double(call.row_temperature[row]);
    scale = softcap == 0 ? 1 : float(call.logit_scale / call.softcap);
    factor = float((softcap == 0 ? call.logit_scale : 1.0) / temperature);
  }

  DATC_DEVICE float raw(int64_t column) const {
    const auto* data = static_cast<const typename Logits::Stored*>(call.logits);
    return Logits::wide(data[row * call.logits_row + column * call.logits_column]);
  }

  DATC_DEVICE float capped(float raw) const { return raw == -INFINITY ? raw : softcap * std::tanh(scale * raw); }

  DATC_DEVICE float u(int64_t column) const {
    const auto* data = static_cast<const typename Reward::Stored*>(call.reward);
    return Reward::wide(data[row * call.reward_row + column * call.reward_column]);
  }

  // Of one thread's share of the columns [first, stop).
  template <bool REWARD>
  DATC_DEVICE Sums share(int64_t first, int64_t stop, int thread) const {
    Sums sums = nothing();
    for (int64_t start = first + thread; start < stop; start += int64_t(kThreads) * kTile) {
      float tile_x[kTile], tile_u[kTile];
      for (int j = 0; j < kTile; ++j) {
        const int64_t column = start + j * kThreads;
        tile_x[j] = column < stop ? raw(column) : -INFINITY;
        tile_u[j] = REWARD && column < stop ? u(column) : 0;
      }
      if (softcap != 0) {
        for (float& x : tile_x) x = capped(x);
      }
      sums = merge(sums, tile_sums(tile_x, tile_u, factor), factor);
    }
    return sums;
  }

  // From the sums of the columns with a reward and of the others.
  DATC_DEVICE void write(const Sums& rewarded, const Sums& rest) const {
    const Sums whole = merge(rewarded, rest, factor);
    const int64_t y = call.ids[row], n = call.rows;
    float* out = call.sums + row;
    const auto put = [&](int field, float value) { out[field * n] = value; };
    put(0, whole.x_t * factor), put(1, whole.Q), put(2, whole.R), put(3, whole.H);
    put(4, y >= 0 && y < call.vocab_size ? (softcap == 0 ? raw(y) : capped(raw(y))) * factor : -INFINITY);
    if (call.reward == nullptr) return;
    put(5, rewarded.x_t * factor), put(6, rewarded.Q), put(7, rewarded.R), put(8, rewarded.H);
    put(9, rewarded.u_t), put(10, rewarded.S1), put(11, rewarded.S2), put(12, rewarded.S3);
    put(13, y >= 0 && y < call.rewarded ? u(y) : 0);
  }
};

// Calls launch(Logits{}, Reward{}) with the types behind the numbers of two dtypes.
template <class Launch>
void with_dtypes(int64_t logits, int64_t reward, const Launch& launch) {
  const auto second = [&](auto first) {
    if (reward < 0) return launch(first, Absent{});
    if (reward == 0) return launch(first, Float32{});
    return reward == 1 ? launch(first, BFloat16{}) : launch(first, Float16{});
  };
  if (logits == 0) return second(Float32{});
  return logits == 1 ? second(BFloat16{}) : second(Float16{});
}

}  // namespace datc::cuda
