#include "ops.h"

namespace datc {

Tensor linear_credit(
    Tensor hidden, Tensor weight, Tensor token_ids, std::optional<Tensor> reward_grad, std::optional<Tensor> reward_embedding,
    std::optional<Tensor> bias, std::optional<Tensor> row_temperature, double temperature, double logit_scale,
    std::optional<double> softcap, int64_t vocab_size, int64_t tile_rows, int64_t tile_columns, int64_t level) {
  const RowPass& pass = row_pass(level);
  const HeadSettings head{bias, row_temperature, temperature, logit_scale, softcap};
  ProductColumns logits(pass, Matrix::of("hidden", hidden), Matrix::of("weight", weight), tile_rows, tile_columns);
  const Tiling tiling{tile_rows, tile_columns};
  if (!reward_grad || !reward_embedding) {
    return fold_rows(pass, logits, nullptr, token_ids, head, {vocab_size, 0}, tiling);
  }
  ProductColumns reward(
      pass, Matrix::of("reward_grad", *reward_grad), Matrix::of("reward_embedding", *reward_embedding), tile_rows, tile_columns);
  return fold_rows(pass, logits, &reward, token_ids, head, {vocab_size, reward_embedding->size(0)}, tiling);
}

}  // namespace datc
