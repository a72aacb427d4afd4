// One response after the other on each thread, in float64: the definition is that of datc_kernels/allocate_weights.
#include <cmath>
#include <numeric>
#include <vector>

#include "ops.h"

namespace datc {

namespace {

// Each halves [1, tau_hi]; 48 leave less than 1e-14 of it.
constexpr int kBisections = 48;

struct Response {
  const double* credit;
  const bool* frozen;  // or null
  int64_t length;
  double advantage;

  bool free(int64_t t) const { return frozen == nullptr || !frozen[t]; }
};

// Weights of the free positions, into `weight` (ones so far); `utility` is space for the response. Returns its temperature.
double allocate(const Response& r, double ceiling, bool sign, double* weight, double* utility) {
  int64_t n = 0;
  double lowest = INFINITY, highest = -INFINITY, sum = 0, absolute = 0, squares = 0;
  bool finite = true;
  for (int64_t t = 0; t < r.length; ++t) {
    if (!r.free(t)) continue;
    const double d = r.credit[t];
    ++n;
    finite = finite && std::isfinite(d);
    lowest = d < lowest ? d : lowest;
    highest = d > highest ? d : highest;
    absolute += std::fabs(d);
  }
  if (n < 2 || r.advantage == 0 || ceiling == 1 || (highest == lowest && (finite || std::isinf(absolute)))) return 1;
  if (!finite || !std::isfinite(r.advantage)) {
    for (int64_t t = 0; t < r.length; ++t) {
      if (r.free(t)) weight[t] = NAN;
    }
    return NAN;
  }
  // From the smallest value on, so that a common offset costs no digits.
  for (int64_t t = 0; t < r.length; ++t) sum += r.free(t) ? r.credit[t] - lowest : 0;
  const double mean = sum / n;
  for (int64_t t = 0; t < r.length; ++t) {
    const double centred = r.credit[t] - lowest - mean;
    squares += r.free(t) ? centred * centred : 0;
  }
  const double scale = std::sqrt(squares / n) + 1e-3 * absolute / n;
  const double direction = sign ? std::copysign(1.0, r.advantage) : r.advantage;
  double top = -INFINITY, bottom = INFINITY;
  int64_t m = 0;
  for (int64_t t = 0; t < r.length; ++t) {
    if (!r.free(t)) continue;
    const double util = direction / scale * (r.credit[t] - lowest - mean);
    top = util > top ? util : top;
    bottom = util < bottom ? util : bottom;
    utility[m++] = util;
  }
  const double span = top - bottom;
  for (int64_t i = 0; i < n; ++i) utility[i] -= top;

  // The largest weight, n / sum exp((util - top) / tau); the smallest is exp(-span / tau) of it.
  const auto largest = [&](double tau) {
    double total = 0;
    for (int64_t i = 0; i < n; ++i) total += std::exp(utility[i] / tau);
    return n / total;
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
  m = 0;
  for (int64_t t = 0; t < r.length; ++t) {
    if (r.free(t)) weight[t] = std::fmin(ceiling, std::fmax(1 / ceiling, most * std::exp(utility[m++] / high)));
  }
  return high;
}

}  // namespace

std::tuple<Tensor, Tensor> allocate_weights(
    Tensor credit, Tensor advantage, Tensor lengths, std::optional<Tensor> frozen, double ceiling, bool sign) {
  const int64_t n = credit.numel(), responses = lengths.numel();
  STD_TORCH_CHECK(
      credit.scalar_type() == ScalarType::Double && advantage.scalar_type() == ScalarType::Double &&
          lengths.scalar_type() == ScalarType::Long && credit.is_contiguous() && advantage.is_contiguous() &&
          lengths.is_contiguous() && (!frozen || (frozen->is_contiguous() && frozen->numel() == n)),
      "credit: expected contiguous float64 credit and advantage, int64 lengths and frozen flags");
  const auto* length = static_cast<const int64_t*>(lengths.const_data_ptr());
  std::vector<int64_t> start(responses + 1, 0);
  std::partial_sum(length, length + responses, start.begin() + 1);
  STD_TORCH_CHECK(start.back() == n, "lengths: expected a sum of ", n);
  Tensor weight = torch::stable::empty({n}, ScalarType::Double), space = torch::stable::empty({n}, ScalarType::Double);
  Tensor temperature = torch::stable::empty({responses}, ScalarType::Double);
  torch::stable::fill_(weight, 1.0);
  const auto* d = static_cast<const double*>(credit.const_data_ptr());
  const auto* A = static_cast<const double*>(advantage.const_data_ptr());
  const auto* flags = frozen ? static_cast<const bool*>(frozen->const_data_ptr()) : nullptr;
  auto* w = static_cast<double*>(weight.mutable_data_ptr());
  auto* utility = static_cast<double*>(space.mutable_data_ptr());
  auto* tau = static_cast<double*>(temperature.mutable_data_ptr());
  parallel(responses, responses == 0 ? 1 : 16 * n / responses, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t at = start[b];
      tau[b] = allocate({d + at, flags == nullptr ? nullptr : flags + at, length[b], A[b]}, ceiling, sign, w + at, utility + at);
    }
  });
  return {weight, temperature};
}

}  // namespace datc
