// One response after the other on each thread.
#include "allocation.h"

#include <numeric>
#include <vector>

#include "ops.h"

namespace datc {

namespace {

struct OneThread {
  int64_t length;

  template <class F>
  double sum(const F& f) const {
    double total = 0;
    for (int64_t t = 0; t < length; ++t) total += f(t);
    return total;
  }

  template <class F>
  double max(const F& f) const {
    double most = -INFINITY;
    for (int64_t t = 0; t < length; ++t) {
      const double value = f(t);
      most = value > most ? value : most;
    }
    return most;
  }

  template <class F>
  double min(const F& f) const {
    return -max([&](int64_t t) { return -f(t); });
  }

  template <class F>
  void each(const F& f) const {
    for (int64_t t = 0; t < length; ++t) f(t);
  }
};

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
  Tensor weight = torch::stable::empty({n}, ScalarType::Double);
  Tensor temperature = torch::stable::empty({responses}, ScalarType::Double);
  torch::stable::fill_(weight, 1.0);
  const auto* d = static_cast<const double*>(credit.const_data_ptr());
  const auto* A = static_cast<const double*>(advantage.const_data_ptr());
  const auto* flags = frozen ? static_cast<const bool*>(frozen->const_data_ptr()) : nullptr;
  auto* w = static_cast<double*>(weight.mutable_data_ptr());
  auto* tau = static_cast<double*>(temperature.mutable_data_ptr());
  parallel(responses, responses == 0 ? 1 : 16 * n / responses, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t at = start[b];
      const Response response{d + at, flags == nullptr ? nullptr : flags + at, length[b], A[b]};
      tau[b] = allocate(OneThread{length[b]}, response, ceiling, sign, w + at);
    }
  });
  return {weight, temperature};
}

}  // namespace datc
