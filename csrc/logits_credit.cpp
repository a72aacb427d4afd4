#include "ops.h"

namespace datc {

Tensor logits_credit(
    Tensor logits, Tensor token_ids, std::optional<Tensor> reward_grad, std::optional<Tensor> reward_embedding,
    std::optional<Tensor> reward, std::optional<Tensor> row_temperature, double temperature, double logit_scale,
    std::optional<double> softcap, int64_t vocab_size, int64_t tile_rows, int64_t tile_columns, int64_t level) {
  const RowPass& pass = row_pass(level);
  const HeadSettings head{std::nullopt, row_temperature, temperature, logit_scale, softcap};
  StoredColumns columns(pass, Matrix::of("logits", logits));
  const Tiling tiling{tile_rows, tile_columns};
  if (reward) {
    StoredColumns given(pass, Matrix::of("reward", *reward));
    return fold_rows(pass, columns, &given, token_ids, head, {vocab_size, reward->size(1)}, tiling);
  }
  if (reward_grad && reward_embedding) {
    ProductColumns product(
        pass, Matrix::of("reward_grad", *reward_grad), Matrix::of("reward_embedding", *reward_embedding), tile_rows,
        tile_columns);
    return fold_rows(pass, columns, &product, token_ids, head, {vocab_size, reward_embedding->size(0)}, tiling);
  }
  return fold_rows(pass, columns, nullptr, token_ids, head, {vocab_size, 0}, tiling);
}

Tensor logits_credit_backward(
    Tensor incoming, Tensor logprob, Tensor saved, Tensor logits, Tensor token_ids, std::optional<Tensor> row_temperature,
    double temperature, double logit_scale, std::optional<double> softcap, int64_t vocab_size, int64_t ignore_index,
    int64_t tile_columns, int64_t level) {
  const RowPass& pass = row_pass(level);
  const HeadSettings head{std::nullopt, row_temperature, temperature, logit_scale, softcap};
  const Matrix from = Matrix::of("logits", logits);
  const int64_t n = from.rows;
  STD_TORCH_CHECK(tile_columns > 0 && tile_columns <= kMaxTileColumns, "tile: expected 1 to ", kMaxTileColumns, " columns");
  const auto* ids = static_cast<const int64_t*>(token_ids.const_data_ptr());
  const float *max = floats(saved) + 3 * n, *partition = floats(saved) + 4 * n;
  Tensor gradient = torch::stable::empty({n, from.columns}, from.dtype);
  const Matrix out = Matrix::of("gradient", gradient);
  parallel(n, from.columns, [&](int64_t begin, int64_t end) {
    alignas(64) float x[kMaxTileColumns];
    for (int64_t row = begin; row < end; ++row) {
      const Head to = head.of_row(row);
      const bool ignored = ids[row] == ignore_index;
      for (int64_t lo = 0; lo < from.columns;) {
        // Columns beyond the support are tiles of their own.
        const int64_t bound = lo < vocab_size ? vocab_size : from.columns, hi = std::min(bound, lo + tile_columns);
        const int64_t count = hi - lo;
        if (ignored || lo >= vocab_size) {
          std::fill(x, x + count, 0.0f);
        } else {
          read_row(pass, from, row, lo, count, x);
          pass.to_logits(x, nullptr, count, to);
          pass.gradient(
              x, count, to,
              {max[row], partition[row], floats(logprob)[row], floats(incoming)[row], head.chain_of_row(row),
               place_of(ids[row], lo, count)});
        }
        write_row(x, count, out.dtype, out.at(row, lo));
        lo = hi;
      }
    }
  });
  return gradient;
}

}  // namespace datc
