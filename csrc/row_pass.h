// What happens to one row of a tile once the matrix library has filled it. The code is compiled once per instruction set and
// chosen at run time; a row is always worked on by one thread, column after column, so its bits depend on no thread count.
#pragma once

#include <cstdint>

namespace datc {

// Sums of a set of columns relative to its most likely one, as datc_kernels/anchored_state.py defines them.
// z_t = -inf with zero sums is the empty set.
struct Sums {
  float z_t = -__builtin_inff();
  float Q = 0, R = 0, H = 0;
  float u_t = 0, S1 = 0, S2 = 0, S3 = 0;
};

// From what the LM head gives to the policy's logits: z = factor * x, and x = softcap * tanh(logit_scale * (raw + bias) /
// softcap), or raw + bias where softcap is 0 (then logit_scale is part of factor).
struct Head {
  float logit_scale;
  float softcap;
  float factor;
};

// What the gradient of log p_y needs to know of its row.
struct RowGradient {
  float logit_max, log_partition;  // p = exp((z - logit_max) - log_partition)
  float logprob, incoming;
  float chain;      // logit_scale / temperature
  int64_t sampled;  // column of y within the tile, or -1
};

struct RowPass {
  const char* name;
  // raw [n] to x [n], in place; bias [n] or null.
  void (*to_logits)(float* x, const float* bias, int64_t n, const Head& head);
  // Merges the columns x [n] with rewards u [n] (or null) into `sums`; x is overwritten.
  void (*fold)(float* x, const float* u, int64_t n, float factor, Sums& sums);
  // x [n] into the gradient of incoming * log p_y with respect to raw.
  void (*gradient)(float* x, int64_t n, const Head& head, const RowGradient& row);
  void (*widen_bfloat16)(const uint16_t* from, float* to, int64_t n);
  void (*widen_float16)(const uint16_t* from, float* to, int64_t n);
};

// The union of two disjoint sets, `first` before `second`; ties keep the anchor of `first`.
Sums merge(const Sums& first, const Sums& second);

// 0: the widest instruction set of this machine; 1: portable; 2: AVX2 with FMA; 3: AVX-512. Throws where there is none.
const RowPass& row_pass(int64_t level);

extern const RowPass portable_row_pass;
#if defined(__x86_64__)
extern const RowPass avx2_row_pass;
extern const RowPass avx512_row_pass;
#endif

}  // namespace datc
