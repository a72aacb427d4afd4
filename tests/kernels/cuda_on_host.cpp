// The CUDA library's functions on CPU memory: a block's threads one after the other, folded in the order in which the device does.
#include <string>
#include <vector>

#include "../../csrc/allocation.h"
#include "../../csrc/cuda/responses.h"
#include "../../csrc/cuda/row_sums.h"

namespace datc::cuda {

template <class T, class Op>
T fold(std::vector<T> parts, const Op& op) {
  for (int width = kThreads / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) parts[i] = op(parts[i], parts[i + width]);
  }
  return parts[0];
}

struct Lanes {
  int64_t length;

  template <class F, class Op>
  double reduce(double start, const F& f, const Op& op) const {
    std::vector<double> parts(kThreads, start);
    for (int64_t t = 0; t < length; ++t) parts[t % kThreads] = op(parts[t % kThreads], f(t));
    return fold(parts, op);
  }

  template <class F>
  double sum(const F& f) const {
    return reduce(0, f, [](double a, double b) { return a + b; });
  }

  template <class F>
  double max(const F& f) const {
    return reduce(-INFINITY, f, [](double a, double b) { return std::fmax(a, b); });
  }

  template <class F>
  double min(const F& f) const {
    return reduce(INFINITY, f, [](double a, double b) { return std::fmin(a, b); });
  }

  template <class F>
  void each(const F& f) const {
    for (int64_t t = 0; t < length; ++t) f(t);
  }
};

template <bool REWARD, class R>
Sums fold_row(const R& row, int64_t first, int64_t stop) {
  std::vector<Sums> parts;
  for (int thread = 0; thread < kThreads; ++thread) parts.push_back(row.template share<REWARD>(first, stop, thread));
  return fold(parts, [&](const Sums& a, const Sums& b) { return merge(a, b, row.factor); });
}

}  // namespace datc::cuda

using namespace datc::cuda;

const char* datc_logits_credit(const LogitsCall* call, int64_t logits_dtype, int64_t reward_dtype, int64_t, void*) {
  with_dtypes(logits_dtype, reward_dtype, [&](auto logits, auto reward) {
    for (int64_t i = 0; i < call->rows; ++i) {
      const Row<decltype(logits), decltype(reward)> row(*call, i);
      const Sums rewarded = call->rewarded > 0 ? fold_row<true>(row, 0, call->rewarded) : nothing();
      row.write(rewarded, fold_row<false>(row, call->rewarded, call->vocab_size));
    }
  });
  return nullptr;
}

const char* datc_allocate_weights(const AllocateCall* call, int64_t device, void* stream) {
  static std::string said;  // a device and a stream, given with a call of nothing, come back
  said = "device " + std::to_string(device) + ", stream " + std::to_string(reinterpret_cast<intptr_t>(stream));
  if (call->weight == nullptr && device >= 0) return said.c_str();
  for (int64_t b = 0; b < call->responses; ++b) {
    const int64_t at = first_token(*call, b);
    const datc::Response response = response_of(*call, b, at);
    call->temperature[b] =
        datc::allocate(Lanes{response.length}, response, call->ceiling, call->sign != 0, call->weight + at);
  }
  return nullptr;
}
