// Probabilities again, tile by tile: the product of the forward, (onehot(y) - p) in its place, and the products with it.
#include "ops.h"

namespace datc {

namespace {

// x [rows, count] into gradients of the raw logits; rows from `start` on, columns from `lo` on.
void gradient_tile(
    const RowPass& pass, const HeadSettings& head, const int64_t* ids, int64_t ignore_index, const float* incoming,
    const float* logprob, const float* saved, int64_t n, int64_t start, int64_t rows, int64_t lo, int64_t count, float* tile) {
  parallel(rows, count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = start + i;
      float* x = tile + i * count;
      if (ids[row] == ignore_index) {
        std::fill(x, x + count, 0.0f);
        continue;
      }
      const Head to = head.of_row(row);
      pass.to_logits(x, head.bias_from(lo), count, to);
      pass.gradient(
          x, count, to,
          {saved[3 * n + row], saved[4 * n + row], logprob[row], incoming[row], head.chain_of_row(row),
           place_of(ids[row], lo, count)});
    }
  });
}

// sum += the columns' sums of tile [rows, count].
void add_column_sums(const float* tile, int64_t rows, int64_t count, float* sum) {
  parallel(count, rows, [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = begin; j < end; ++j) sum[j] += tile[i * count + j];
    }
  });
}

// Rows from `start` on as the library takes them; those that are ignored are zeros where `clean`: zero times a NaN that lies in one
// would spoil the weight's gradient.
Matrix block_of_hidden(
    const RowPass& pass, const Matrix& rows, const int64_t* ids, int64_t ignore_index, bool clean, Tensor& space) {
  if (!clean || std::find(ids, ids + rows.rows, ignore_index) == ids + rows.rows) return operand(pass, rows, space);
  const Matrix copy = float_copy(pass, rows, space);
  for (int64_t i = 0; i < rows.rows; ++i) {
    if (ids[i] == ignore_index) std::memset(copy.at(i, 0), 0, copy.columns * sizeof(float));
  }
  return copy;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> linear_credit_backward(
    Tensor incoming, Tensor logprob, Tensor saved, Tensor hidden, Tensor weight, Tensor token_ids, std::optional<Tensor> bias,
    std::optional<Tensor> row_temperature, double temperature, double logit_scale, std::optional<double> softcap,
    int64_t vocab_size, int64_t ignore_index, bool hidden_needed, bool weight_needed, bool bias_needed, int64_t tile_rows,
    int64_t tile_columns, int64_t level) {
  const RowPass& pass = row_pass(level);
  const HeadSettings head{bias, row_temperature, temperature, logit_scale, softcap};
  const Matrix left = Matrix::of("hidden", hidden), table = Matrix::of("weight", weight);
  const int64_t n = left.rows, width = left.columns, most = std::min(tile_rows, n);
  const auto* ids = static_cast<const int64_t*>(token_ids.const_data_ptr());
  Tensor tile_space = empty_floats(std::max<int64_t>(1, most * tile_columns)), hidden_space, table_space, sum_space;
  float* tile = floats(tile_space);

  Tensor grad_hidden = empty_floats(hidden_needed ? n : 0, width);
  torch::stable::zero_(grad_hidden);
  Tensor grad_weight = weight_needed ? torch::stable::empty({table.rows, width}, table.dtype) : empty_floats(0);
  Tensor grad_bias = empty_floats(bias_needed ? table.rows : 0);
  torch::stable::zero_(grad_weight);
  torch::stable::zero_(grad_bias);
  // Columns of a float32 weight are summed where they belong, others in float32 and rounded once.
  const bool in_place = weight_needed && table.dtype == ScalarType::Float;
  if (weight_needed && !in_place) sum_space = empty_floats(tile_columns, width);
  const Matrix weight_out = weight_needed ? Matrix::of("weight", grad_weight) : table;

  for (int64_t lo = 0; lo < vocab_size; lo += tile_columns) {
    const int64_t hi = std::min(vocab_size, lo + tile_columns), count = hi - lo;
    const Matrix rows_of_table = operand(pass, table.slice(lo, hi), table_space);
    const Matrix sum = in_place ? weight_out.slice(lo, hi)
                                : (weight_needed ? Matrix::of(floats(sum_space), count, width) : rows_of_table);
    for (int64_t start = 0; start < n; start += tile_rows) {
      const int64_t stop = std::min(n, start + tile_rows);
      const Matrix block = block_of_hidden(pass, left.slice(start, stop), ids + start, ignore_index, weight_needed, hidden_space);
      const Matrix out = Matrix::of(tile, stop - start, count);
      multiply(block, rows_of_table.transposed(), out);
      gradient_tile(
          pass, head, ids, ignore_index, floats(incoming), floats(logprob), floats(saved), n, start, stop - start, lo, count,
          tile);
      if (hidden_needed) {
        multiply(out, rows_of_table, Matrix::of("hidden", grad_hidden).slice(start, stop), true);
      }
      if (weight_needed) multiply(out.transposed(), block, sum, start > 0);
      if (bias_needed) add_column_sums(tile, stop - start, count, floats(grad_bias) + lo);
    }
    if (weight_needed && !in_place && n > 0) {
      parallel(count, width, [&](int64_t begin, int64_t end) {
        for (int64_t j = begin; j < end; ++j) {
          write_row(floats(sum_space) + j * width, width, table.dtype, weight_out.at(lo + j, 0));
        }
      });
    }
  }
  return {grad_hidden, grad_weight, grad_bias};
}

}  // namespace datc
