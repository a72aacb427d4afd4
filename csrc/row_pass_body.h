// The row pass over vectors of LANES floats. Included once per instruction set, inside a namespace of its own, after
//   LANES, and vector_max(a, b) (b where one is NaN), vector_fma(a, b, c), any(mask) for vectors of that many lanes.
// No function of a standard header may be instantiated here: the linker could keep the copy of the wrong instruction set.

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504f;
constexpr float kLog2ELow = 1.92596303e-8f;  // what the line above lacks
constexpr float kLargest = 3.40282347e38f;
// Below 2^-126.9 an exponential is an exact zero.
constexpr float kLowest = -126.9f;

static inline F load(const float* p) {
  F v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

static inline void store(float* p, F v) { __builtin_memcpy(p, &v, sizeof v); }

static inline F all(float v) { return F{} + v; }

static inline float total(F v) {
  for (int width = LANES / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) v[i] += v[i + width];
  }
  return v[0];
}

// The last n - i < LANES entries, filled up with `fill`.
static inline F load_tail(const float* p, int64_t count, float fill) {
  float part[LANES];
  for (int i = 0; i < LANES; ++i) part[i] = i < count ? p[i] : fill;
  return load(part);
}

template <class Op>
static inline void each(float* x, int64_t n, Op op) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(x + i, op(load(x + i)));
  if (i < n) {
    float part[LANES];
    store(part, op(load_tail(x + i, n - i, 0.0f)));
    for (int64_t j = i; j < n; ++j) x[j] = part[j - i];
  }
}

// exp(d * (rate + rate_low) / log2 e) = power * (1 + rest), for kLowest / rate <= d and results up to 2^127. The product is split
// exactly into a whole number and a fraction in [-1/2, 1/2]; 2^fraction - 1 is a polynomial with an error of 2e-9.
struct Exponential {
  F power, rest;
  F value() const { return vector_fma(power, rest, power); }
  F minus_one() const { return vector_fma(power, rest, power - 1.0f); }
};

static inline Exponential exponential(F d, F rate, F rate_low) {
  const F round = all(12582912.0f + 127.0f);  // 1.5 * 2^23 rounds to a whole number; 127 is the exponent's bias
  const F shifted = vector_fma(d, rate, round);
  const F whole = shifted - round;
  F f = vector_fma(d, rate, -whole);
  f = vector_fma(d, rate_low, f);
  F p = vector_fma(f, all(1.53533605e-4f), all(1.33988750e-3f));
  p = vector_fma(f, p, all(9.61843692e-3f));
  p = vector_fma(f, p, all(5.55033237e-2f));
  p = vector_fma(f, p, all(2.40226477e-1f));
  p = vector_fma(f, p, all(6.93147182e-1f));
  return {(F)((I)shifted << 23), f * p};
}

// A NaN may get lost here; it shows in the sums.
static inline float largest(const float* x, int64_t n) {
  F a = all(-kInfinity), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES) {
    a = vector_max(a, load(x + i));
    b = vector_max(b, load(x + i + LANES));
    c = vector_max(c, load(x + i + 2 * LANES));
    d = vector_max(d, load(x + i + 3 * LANES));
  }
  a = vector_max(vector_max(a, b), vector_max(c, d));
  for (; i + LANES <= n; i += LANES) a = vector_max(a, load(x + i));
  if (i < n) a = vector_max(a, load_tail(x + i, n - i, -kInfinity));
  float most = a[0];
  for (int j = 1; j < LANES; ++j) most = most > a[j] ? most : a[j];
  return most;
}

// The first column of that value; 0 where there is none (NaN).
static inline int64_t position(const float* x, int64_t n, float value) {
  const F wanted = all(value);
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES) {
    const I here = (load(x + i) == wanted) | (load(x + i + LANES) == wanted) | (load(x + i + 2 * LANES) == wanted) |
                   (load(x + i + 3 * LANES) == wanted);
    if (any(here)) break;
  }
  for (; i < n; ++i) {
    if (x[i] == value) return i;
  }
  return 0;
}

static bool has_nan(const float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (x[i] != x[i]) return true;
  }
  return false;
}

// Sums over all columns; that of the anchor itself must hold -inf, which counts as nothing. MASKED: a column at -inf counts as
// nothing whatever its reward is, NaN and infinities included.
template <bool REWARD, bool MASKED>
static inline Sums column_sums(const float* x, const float* u, int64_t n, float x_t, float u_t, float factor) {
  // Where the factor is not 1, what rounding takes from factor * log2(e) goes into the low part.
  const float rate = factor * kLog2E;
  const F high = all(rate), low = all(__builtin_fmaf(factor, kLog2E, -rate) + factor * kLog2ELow);
  const F lowest = all(kLowest / rate), top = all(x_t), top_reward = all(u_t);
  F Q = {}, R = {}, H = {}, S1 = {}, S2 = {}, S3 = {};
  auto step = [&](F column, F reward) __attribute__((always_inline)) {
    const F d = vector_max(lowest, column - top);
    const F e = exponential(d, high, low).value();
    Q += e;
    H = vector_fma(e, d, H);
    const F e2 = e * e;
    R += e2;
    if (REWARD) {
      F delta = reward - top_reward;
      if (MASKED) delta = column == all(-kInfinity) ? F{} : delta;
      S1 = vector_fma(e, delta, S1);
      const F weighted = e2 * delta;
      S2 += weighted;
      S3 = vector_fma(weighted, delta, S3);
    }
  };
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) step(load(x + i), REWARD ? load(u + i) : F{});
  if (i < n) step(load_tail(x + i, n - i, -kInfinity), REWARD ? load_tail(u + i, n - i, u_t) : F{});
  Sums s;
  s.z_t = x_t * factor;
  s.Q = total(Q);
  s.R = total(R);
  s.H = factor * total(H) + (x_t - x_t);  // NaN where the top is infinite
  if (REWARD) {
    s.u_t = u_t;
    const float undefined = u_t - u_t;  // NaN where the top's reward is NaN or infinite
    s.S1 = total(S1) + undefined;
    s.S2 = total(S2) + undefined;
    s.S3 = total(S3) + undefined;
  }
  return s;
}

static void fold(float* x, const float* u, int64_t n, float factor, Sums& sums) {
  float x_t = largest(x, n);
  if (x_t == -kInfinity) {
    if (!has_nan(x, n)) return;
    x_t = __builtin_nanf("");
  }
  const int64_t t = position(x, n, x_t);
  x[t] = -kInfinity;
  if (u == nullptr) {
    sums = merge(sums, column_sums<false, false>(x, u, n, x_t, 0.0f, factor));
    return;
  }
  Sums part = column_sums<true, false>(x, u, n, x_t, u[t], factor);
  const float sum = part.S1 + part.S2 + part.S3;
  if (!(sum >= -kLargest && sum <= kLargest)) part = column_sums<true, true>(x, u, n, x_t, u[t], factor);
  sums = merge(sums, part);
}

static void to_logits(float* x, const float* bias, int64_t n, const Head& head) {
  if (bias != nullptr) {
    for (int64_t i = 0; i < n; ++i) x[i] += bias[i];
  }
  if (head.softcap == 0.0f) return;
  const F scale = all(head.logit_scale / head.softcap), cap = all(head.softcap);
  const F high = all(kLog2E), low = all(kLog2ELow), lowest = all(kLowest / kLog2E);
  const I sign = I{} | int32_t(0x80000000);
  each(x, n, [&](F raw) __attribute__((always_inline)) {
    const F y = raw * scale;
    const F twice = -2.0f * (F)((I)y & ~sign);
    const F less = exponential(vector_max(lowest, twice), high, low).minus_one();  // exp(-2|y|) - 1
    const F size = cap * (-less / (less + 2.0f));
    const F capped = (F)((I)size | ((I)y & sign));
    return raw == all(-kInfinity) ? raw : capped;
  });
}

static void gradient(float* x, int64_t n, const Head& head, const RowGradient& row) {
  const F top = all(row.logit_max), partition = all(row.log_partition), factor = all(head.factor);
  const F high = all(kLog2E), low = all(kLog2ELow), lowest = all(kLowest / kLog2E);
  const bool capped = head.softcap != 0.0f;
  const F per_cap = all(capped ? 1.0f / head.softcap : 0.0f), least = all(-1.0f);
  auto slope = [&](F column) __attribute__((always_inline)) {
    const F tanh = vector_max(least, column * per_cap);  // -inf where masked
    return 1.0f - tanh * tanh;
  };
  const int64_t y = row.sampled;
  const float kept = y < 0 ? 0.0f : x[y];
  const F weight = all(-row.incoming), chain = all(row.chain);
  each(x, n, [&](F column) __attribute__((always_inline)) {
    const F d = (column * factor - top) - partition;
    F g = exponential(vector_max(lowest, d), high, low).value() * weight;
    if (capped) g *= slope(column);
    return g * chain;
  });
  if (y >= 0) {
    const float g = -__builtin_expm1f(row.logprob) * row.incoming;
    x[y] = (capped ? g * slope(all(kept))[0] : g) * row.chain;
  }
}

static void widen_bfloat16(const uint16_t* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = uint32_t(from[i]) << 16;
    __builtin_memcpy(to + i, &bits, sizeof bits);
  }
}

static void widen_float16(const uint16_t* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t half = from[i], exponent = half & 0x7c00, fraction = half & 0x3ff;
    const float small = float(int32_t(fraction)) * 0x1p-24f;  // what the subnormal ones are
    uint32_t subnormal;
    __builtin_memcpy(&subnormal, &small, sizeof small);
    uint32_t bits = ((half & 0x7fff) << 13) + (112u << 23);
    bits = exponent == 0x7c00 ? bits + (112u << 23) : bits;
    bits = (exponent == 0 ? subnormal : bits) | (half & 0x8000) << 16;
    __builtin_memcpy(to + i, &bits, sizeof bits);
  }
}

static constexpr RowPass table(const char* name) {
  return {name, to_logits, fold, gradient, widen_bfloat16, widen_float16};
}
