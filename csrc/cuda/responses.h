// Where responses lie in what laid them end to end. Lengths that do not fit, which nobody has read back, reach no memory beyond it.
#pragma once

#include "../allocation.h"
#include "api.h"

namespace datc::cuda {

DATC_DEVICE inline int64_t within(int64_t position, int64_t last) { return position < 0 ? 0 : position < last ? position : last; }

DATC_DEVICE inline int64_t first_token(const AllocateCall& call, int64_t b) {
  return within(call.ends[b] - within(call.lengths[b], call.tokens), call.tokens);
}

DATC_DEVICE inline Response response_of(const AllocateCall& call, int64_t b, int64_t first) {
  const int64_t stop = within(call.ends[b], call.tokens);
  return {call.credit + first, call.frozen == nullptr ? nullptr : call.frozen + first, stop - first, call.advantage[b]};
}

}  // namespace datc::cuda
