// A block a row: its logits are read once, and the rewards beside them where there are any.
#include "block.h"

namespace datc::cuda {

template <class Logits, class Reward>
__global__ void __launch_bounds__(kThreads, 1) logits_credit_kernel(LogitsCall call) {
  __shared__ Sums parts[kThreads];
  for (int64_t i = blockIdx.x; i < call.rows; i += gridDim.x) {
    const Row<Logits, Reward> row(call, i);
    const auto together = [&](const Sums& a, const Sums& b) { return merge(a, b, row.factor); };
    Sums rewarded = nothing();
    if (call.rewarded > 0) {
      rewarded = fold_block(parts, row.template share<true>(0, call.rewarded, threadIdx.x), together);
    }
    const Sums rest = fold_block(parts, row.template share<false>(call.rewarded, call.vocab_size, threadIdx.x), together);
    if (threadIdx.x == 0) row.write(rewarded, rest);
  }
}

}  // namespace datc::cuda

const char* datc_logits_credit(
    const datc::cuda::LogitsCall* call, int64_t logits_dtype, int64_t reward_dtype, int64_t device, void* stream) {
  const char* error = nullptr;
  datc::cuda::with_dtypes(logits_dtype, reward_dtype, [&](auto logits, auto reward) {
    const auto kernel = datc::cuda::logits_credit_kernel<decltype(logits), decltype(reward)>;
    error = datc::cuda::launch(kernel, *call, call->rows, device, stream);
  });
  return error;
}
