// Eight lanes: AVX2 with FMA. Compiled with these instruction sets on; runs only where the processor has them.
#include "row_pass.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define LANES 8

namespace datc {
namespace avx2 {

typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));

static inline F vector_max(F a, F b) { return _mm256_max_ps(a, b); }
static inline F vector_fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
static inline bool any(I mask) { return _mm256_movemask_ps((F)mask) != 0; }

#include "row_pass_body.h"

}  // namespace avx2

extern const RowPass avx2_row_pass = avx2::table("AVX2");

}  // namespace datc
#endif
