// Where responses lie that were laid end to end. Nobody has read the lengths back: those that do not fit reach nothing beyond.
#pragma once

#include "../allocation.h"
#include "api.h"

namespace datc::cuda {

DATC_DEVICE inline int64_t within(int64_t position, int64_t last) { return position < 0 ? 0 : position < last ? position : last; }

DATC_DEVICE inline int64_t first_token(const AllocateCall& call, int64_t b) {
  return within(within(call.ends[b], call.tokens) - within(call.lengths[b], call.tokens), call.tokens);
}

DATC_DEVICE inline Response response_of(const AllocateCall& call, int64_t b, int64_t first) {
  const int64_t stop = within(call.ends[b], call.tokens);
  return {call.credit + first, call.frozen == nullptr ? nullptr : call.frozen + first, stop - first, call.advantage[b]};
}

}  // namespace datc::cuda
