// Four lanes of plain arithmetic: what every compiler and processor has.
#include "row_pass.h"

#define LANES 4

namespace datc {
namespace portable {

typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));

static inline F vector_max(F a, F b) { return a > b ? a : b; }
static inline F vector_fma(F a, F b, F c) { return a * b + c; }
static inline bool any(I mask) { return (mask[0] | mask[1] | mask[2] | mask[3]) != 0; }

#include "row_pass_body.h"

}  // namespace portable

extern const RowPass portable_row_pass = portable::table("portable");

}  // namespace datc
