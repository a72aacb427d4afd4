#include "row_pass.h"

#include <cmath>
#include <stdexcept>

namespace datc {

namespace {

// What stands for the gap to a set whose logits are all -inf: exp of it is 0, and 0 times it is 0.
constexpr float kMasked = -1e5f;

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

}  // namespace

Sums merge(const Sums& first, const Sums& second) {
  if (first.z_t == -INFINITY) return second;
  const bool swap = second.z_t > first.z_t;  // a NaN stays where it is, its sums are NaN already
  const Sums &hi = swap ? second : first, &lo = swap ? first : second;
  const float gap = lo.z_t == -INFINITY ? kMasked : std::fmax(lo.z_t - hi.z_t, kMasked);
  const float f = std::exp(gap), f2 = f * f, D = lo.u_t - hi.u_t;
  Sums s;
  s.z_t = hi.z_t;
  s.Q = hi.Q + f * (1 + lo.Q);
  s.R = hi.R + f2 * (1 + lo.R);
  s.H = hi.H + f * (lo.H + gap * (1 + lo.Q));
  s.u_t = hi.u_t;
  s.S1 = hi.S1 + f * (D * (1 + lo.Q) + lo.S1);
  s.S2 = hi.S2 + f2 * (D * (1 + lo.R) + lo.S2);
  s.S3 = hi.S3 + f2 * (D * D * (1 + lo.R) + 2 * D * lo.S2 + lo.S3);
  return s;
}

const RowPass& row_pass(int64_t level) {
#if defined(__x86_64__)
  if (level == 3 || (level == 0 && has_avx512())) {
    if (!has_avx512()) throw std::runtime_error("level: this processor has no AVX-512");
    return avx512_row_pass;
  }
  if (level == 2 || (level == 0 && has_avx2())) {
    if (!has_avx2()) throw std::runtime_error("level: this processor has no AVX2");
    return avx2_row_pass;
  }
#endif
  if (level != 0 && level != 1) throw std::runtime_error("level: expected 0, 1, 2 or 3, the last two on x86-64");
  return portable_row_pass;
}

}  // namespace datc
