// A block a response.
#include "../allocation.h"

#include "block.h"
#include "responses.h"

namespace datc::cuda {

struct Block {
  double* shared;  // [kThreads]
  int64_t length;

  template <class F>
  __device__ double sum(const F& f) const {
    double total = 0;
    each([&](int64_t t) { total += f(t); });
    return fold_block(shared, total, [](double a, double b) { return a + b; });
  }

  template <class F>
  __device__ double max(const F& f) const {
    double most = -INFINITY;
    each([&](int64_t t) { most = fmax(most, f(t)); });
    return fold_block(shared, most, [](double a, double b) { return fmax(a, b); });
  }

  template <class F>
  __device__ double min(const F& f) const {
    return -max([&](int64_t t) { return -f(t); });
  }

  template <class F>
  __device__ void each(const F& f) const {
    for (int64_t t = threadIdx.x; t < length; t += kThreads) f(t);
  }
};

__global__ void __launch_bounds__(kThreads, 1) allocate_weights_kernel(AllocateCall call) {
  __shared__ double shared[kThreads];
  for (int64_t b = blockIdx.x; b < call.responses; b += gridDim.x) {
    const int64_t at = first_token(call, b);
    const Response response = response_of(call, b, at);
    const double tau = allocate(Block{shared, response.length}, response, call.ceiling, call.sign != 0, call.weight + at);
    if (threadIdx.x == 0) call.temperature[b] = tau;
  }
}

}  // namespace datc::cuda

const char* datc_allocate_weights(const datc::cuda::AllocateCall* call, int64_t device, void* stream) {
  return datc::cuda::launch(datc::cuda::allocate_weights_kernel, *call, call->responses, device, stream);
}
