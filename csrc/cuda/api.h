// What the CUDA library exports; datc_kernels/native_cuda.py lays the structures out in the same order. Pointers are of the
// device, apart from those of the structures themselves. Every function returns null, or what went wrong; none waits.
#pragma once

#include <cstdint>

#define DATC_EXPORT extern "C" __attribute__((visibility("default")))

namespace datc::cuda {

struct LogitsCall {
  const void *logits, *reward;  // [N, V]; [N, rewarded] or null
  int64_t logits_row, logits_column, reward_row, reward_column;  // strides, in elements
  const int64_t* ids;           // [N]
  const float* row_temperature; // [N] or null, then `temperature` counts
  double temperature, logit_scale, softcap;  // softcap 0: none
  int64_t rows, vocab_size, rewarded;        // columns below `rewarded` have a reward
  float* sums;                  // [5, N], with a reward [14, N], as csrc/fold.h has them
};

struct AllocateCall {
  const double* credit;     // [tokens]
  const bool* frozen;       // [tokens] or null
  const double* advantage;  // [responses]
  const int64_t *ends, *lengths;  // [responses]; ends: one past each response's last token
  int64_t tokens, responses;
  double ceiling;
  int64_t sign;
  double* weight;       // [tokens], ones
  double* temperature;  // [responses]
};

}  // namespace datc::cuda

// dtypes: 0 float32, 1 bfloat16, 2 float16; -1 for a reward that is not there.
DATC_EXPORT const char* datc_logits_credit(
    const datc::cuda::LogitsCall* call, int64_t logits_dtype, int64_t reward_dtype, int64_t device, void* stream);
DATC_EXPORT const char* datc_allocate_weights(const datc::cuda::AllocateCall* call, int64_t device, void* stream);
