// Sixteen lanes: AVX-512 as x86-64-v4 has it. Compiled with these instruction sets on; runs only where the processor has them.
#include "row_pass.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define LANES 16

namespace datc {
namespace avx512 {

typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));

static inline F vector_max(F a, F b) { return _mm512_max_ps(a, b); }
static inline F vector_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
static inline bool any(I mask) { return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0; }

#include "row_pass_body.h"

}  // namespace avx512

extern const RowPass avx512_row_pass = avx512::table("AVX-512");

}  // namespace datc
#endif
