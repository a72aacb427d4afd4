// The weights of one response, in float64: the definition is that of datc_kernels/allocate_weights.
//
// A Team is who works on the response: one thread of a CPU, or a block of a GPU. Its sum(f), max(f) and min(f) are over f(t) of
// all positions, a NaN counts in sums alone, and every thread gets the result; each(f) calls f(t) once for every position.
#pragma once

#include <cmath>
#include <cstdint>

#include "device.h"

namespace datc {

// Each halves [1, tau_hi]; 48 leave less than 1e-14 of it.
constexpr int kBisections = 48;

struct Response {
  const double* credit;
  const bool* frozen;  // or null
  int64_t length;
  double advantage;

  DATC_DEVICE bool free(int64_t t) const { return frozen == nullptr || !frozen[t]; }
};

// Weights of the free positions, into `weight` (ones so far). Returns the response's temperature.
template <class Team>
DATC_DEVICE double allocate(const Team& team, const Response& r, double ceiling, bool sign, double* weight) {
  const auto* d = r.credit;
  const double n = team.sum([&](int64_t t) { return r.free(t) ? 1.0 : 0.0; });
  const double lowest = team.min([&](int64_t t) { return r.free(t) ? d[t] : double(INFINITY); });
  const double highest = team.max([&](int64_t t) { return r.free(t) ? d[t] : -double(INFINITY); });
  const double absolute = team.sum([&](int64_t t) { return r.free(t) ? std::fabs(d[t]) : 0.0; });
  const bool finite =
      std::isfinite(r.advantage) && team.sum([&](int64_t t) { return r.free(t) && !std::isfinite(d[t]) ? 1.0 : 0.0; }) == 0;
  if (n < 2 || r.advantage == 0 || ceiling == 1 || (finite && highest == lowest)) return 1;
  if (!finite) {
    team.each([&](int64_t t) {
      if (r.free(t)) weight[t] = NAN;
    });
    return NAN;
  }
  // From the smallest value on, so that a common offset costs no digits.
  const double mean = team.sum([&](int64_t t) { return r.free(t) ? d[t] - lowest : 0.0; }) / n;
  const double squares = team.sum([&](int64_t t) {
    const double centred = d[t] - lowest - mean;
    return r.free(t) ? centred * centred : 0.0;
  });
  const double scale = std::sqrt(squares / n) + 1e-3 * absolute / n;
  const double slope = (sign ? std::copysign(1.0, r.advantage) : r.advantage) / scale;
  const auto utility = [&](int64_t t) { return slope * (d[t] - lowest - mean); };
  const double top = team.max([&](int64_t t) { return r.free(t) ? utility(t) : -double(INFINITY); });
  const double span = top - team.min([&](int64_t t) { return r.free(t) ? utility(t) : double(INFINITY); });

  // The largest weight, n / sum exp((util - top) / tau); the smallest is exp(-span / tau) of it.
  const auto largest = [&](double tau) {
    return n / team.sum([&](int64_t t) { return r.free(t) ? std::exp((utility(t) - top) / tau) : 0.0; });
  };
  const auto feasible = [&](double tau) {
    const double most = largest(tau);
    return most <= ceiling && most * std::exp(-span / tau) >= 1 / ceiling;
  };
  double low = 1, high = 1;
  if (!feasible(1)) {
    high = std::fmax(1.0, span / std::log(ceiling));
    for (int i = 0; i < kBisections; ++i) {
      const double middle = 0.5 * (low + high);
      (feasible(middle) ? high : low) = middle;
    }
  }
  const double most = largest(high);
  team.each([&](int64_t t) {
    if (r.free(t)) weight[t] = std::fmin(ceiling, std::fmax(1 / ceiling, most * std::exp((utility(t) - top) / high)));
  });
  return high;
}

}  // namespace datc
