// Every schema of the extension. The ops are called by the backends of datc_kernels, which check the arguments and know the
// shapes of the results; they are no part of the public interface.
#include "ops.h"

namespace datc {

std::string instruction_set(int64_t level) { return row_pass(level).name; }

}  // namespace datc

STABLE_TORCH_LIBRARY(datc_cpu, m) {
  m.def(
      "linear_credit(Tensor hidden, Tensor weight, Tensor token_ids, Tensor? reward_grad, Tensor? reward_embedding, "
      "Tensor? bias, Tensor? row_temperature, float temperature, float logit_scale, float? softcap, int vocab_size, "
      "int tile_rows, int tile_columns, int level) -> Tensor");
  m.def(
      "linear_credit_backward(Tensor incoming, Tensor logprob, Tensor saved, Tensor hidden, Tensor weight, Tensor token_ids, "
      "Tensor? bias, Tensor? row_temperature, float temperature, float logit_scale, float? softcap, int vocab_size, "
      "int ignore_index, bool hidden_needed, bool weight_needed, bool bias_needed, int tile_rows, int tile_columns, int level) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "logits_credit(Tensor logits, Tensor token_ids, Tensor? reward_grad, Tensor? reward_embedding, Tensor? reward, "
      "Tensor? row_temperature, float temperature, float logit_scale, float? softcap, int vocab_size, int tile_rows, "
      "int tile_columns, int level) -> Tensor");
  m.def(
      "logits_credit_backward(Tensor incoming, Tensor logprob, Tensor saved, Tensor logits, Tensor token_ids, "
      "Tensor? row_temperature, float temperature, float logit_scale, float? softcap, int vocab_size, int ignore_index, "
      "int tile_columns, int level) -> Tensor");
  m.def(
      "candidate_advantages(Tensor hidden, Tensor weight, Tensor? reward_grad, Tensor? reward_embedding, "
      "Tensor? candidate_ids, int top_k, Tensor? bias, Tensor? row_temperature, float temperature, float logit_scale, "
      "float? softcap, int vocab_size, int tile_rows, int tile_columns, int level) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "allocate_weights(Tensor credit, Tensor advantage, Tensor lengths, Tensor? frozen, float ceiling, bool sign) "
      "-> (Tensor, Tensor)");
  m.def("instruction_set(int level) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(datc_cpu, CPU, m) {
  m.impl("linear_credit", TORCH_BOX(&datc::linear_credit));
  m.impl("linear_credit_backward", TORCH_BOX(&datc::linear_credit_backward));
  m.impl("logits_credit", TORCH_BOX(&datc::logits_credit));
  m.impl("logits_credit_backward", TORCH_BOX(&datc::logits_credit_backward));
  m.impl("candidate_advantages", TORCH_BOX(&datc::candidate_advantages));
  m.impl("allocate_weights", TORCH_BOX(&datc::allocate_weights));
}

STABLE_TORCH_LIBRARY_IMPL(datc_cpu, CompositeExplicitAutograd, m) {
  m.impl("instruction_set", TORCH_BOX(&datc::instruction_set));
}
