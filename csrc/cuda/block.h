// What a block of threads does together.
#pragma once

#include "row_sums.h"

namespace datc::cuda {

// Folds every thread's value in one order, pairs half the block apart first; all threads get the result.
template <class T, class Op>
__device__ T fold_block(T* shared, const T& mine, const Op& op) {
  shared[threadIdx.x] = mine;
  __syncthreads();
  for (int width = kThreads / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) shared[threadIdx.x] = op(shared[threadIdx.x], shared[threadIdx.x + width]);
    __syncthreads();
  }
  const T result = shared[0];
  __syncthreads();
  return result;
}

// Launches `kernel` with a block of kThreads for every one of n items, on a stream of that device. Null, or what went wrong.
template <class Call>
const char* launch(void (*kernel)(Call), const Call& call, int64_t n, int64_t device, void* stream) {
  cudaError_t error = cudaSetDevice(int(device));
  if (error == cudaSuccess && n > 0) {
    const int64_t most = 0x7fffffff;
    kernel<<<unsigned(n < most ? n : most), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(call);
    error = cudaGetLastError();
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace datc::cuda
