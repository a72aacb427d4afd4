#include "fold.h"

#include <vector>

namespace datc {

ProductColumns::ProductColumns(
    const RowPass& pass, Matrix left, Matrix table, int64_t tile_rows, int64_t tile_columns)
    : pass_(pass), left_(left), table_(table), block_(left),
      space_(empty_floats(std::max<int64_t>(1, std::min(tile_rows, left.rows) * tile_columns))), tile_(floats(space_)) {}

void ProductColumns::rows(int64_t start, int64_t stop) { block_ = operand(pass_, left_.slice(start, stop), left_space_); }

void ProductColumns::columns(int64_t lo, int64_t hi) {
  count_ = hi - lo;
  const Matrix table = operand(pass_, table_.slice(lo, hi), table_space_);
  multiply(block_, table.transposed(), Matrix::of(tile_, block_.rows, count_));
}

float HeadSettings::temperature_of_row(int64_t row) const {
  return row_temperature ? floats(*row_temperature)[row] : static_cast<float>(temperature);
}

Head HeadSettings::of_row(int64_t row) const {
  const bool capped = softcap.has_value();
  const double numerator = capped ? 1.0 : logit_scale;
  const float factor = row_temperature ? static_cast<float>(numerator / floats(*row_temperature)[row])
                                       : static_cast<float>(numerator / temperature);
  return {static_cast<float>(logit_scale), capped ? static_cast<float>(*softcap) : 0.0f, factor};
}

float HeadSettings::chain_of_row(int64_t row) const {
  return static_cast<float>(logit_scale / (row_temperature ? floats(*row_temperature)[row] : temperature));
}

const float* HeadSettings::bias_from(int64_t column) const { return bias ? floats(*bias) + column : nullptr; }

namespace {

// The running sums of a block of rows.
struct Block {
  explicit Block(int64_t rows) : rewarded(rows), rest(rows), z_y(rows, -__builtin_inff()), u_y(rows, 0.0f) {}
  std::vector<Sums> rewarded, rest;
  std::vector<float> z_y, u_y;
};

// Columns [lo, hi) of rows [start, stop).
struct Tile {
  int64_t start, stop, lo, hi;
};

void fold_tile(
    const RowPass& pass, Columns& logits, Columns* reward, const int64_t* ids, const HeadSettings& head, const Tile& tile,
    Block& block, const Visit& visit) {
  const int64_t count = tile.hi - tile.lo;
  logits.columns(tile.lo, tile.hi);
  if (reward != nullptr) reward->columns(tile.lo, tile.hi);
  const bool changes = head.bias || head.softcap;
  parallel(tile.stop - tile.start, count, [&](int64_t begin, int64_t end) {
    alignas(64) float logit_buffer[kMaxTileColumns], reward_buffer[kMaxTileColumns];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = tile.start + i;
      const Head to = head.of_row(row);
      float* x = logits.row(i, logit_buffer);
      const float* u = reward == nullptr ? nullptr : reward->row(i, reward_buffer);
      if (changes) pass.to_logits(x, head.bias_from(tile.lo), count, to);
      const int64_t y = place_of(ids[row], tile.lo, count);
      if (y >= 0) {
        block.z_y[i] = x[y] * to.factor;
        if (u != nullptr) block.u_y[i] = u[y];
      }
      if (visit) visit(row, tile.lo, count, x, u, to.factor);
      pass.fold(x, u, count, to.factor, (u == nullptr ? block.rest : block.rewarded)[i]);
    }
  });
}

void write(const Block& block, int64_t start, int64_t stop, bool reward, float* out, int64_t n) {
  for (int64_t row = start; row < stop; ++row) {
    const Sums& s = block.rewarded[row - start];
    const Sums whole = merge(s, block.rest[row - start]);
    const float fields[] = {whole.z_t, whole.Q, whole.R, whole.H, block.z_y[row - start],
                            s.z_t,     s.Q,     s.R,     s.H,     s.u_t,
                            s.S1,      s.S2,    s.S3,    block.u_y[row - start]};
    for (int64_t field = 0; field < (reward ? 14 : 5); ++field) out[field * n + row] = fields[field];
  }
}

}  // namespace

Tensor fold_rows(
    const RowPass& pass, Columns& logits, Columns* reward, const Tensor& token_ids, const HeadSettings& head,
    const Support& support, const Tiling& tiling, const Visit& visit) {
  STD_TORCH_CHECK(
      tiling.rows > 0 && tiling.columns > 0 && tiling.columns <= kMaxTileColumns, "tile: expected 1 to ", kMaxTileColumns,
      " columns and at least one row");
  STD_TORCH_CHECK(
      token_ids.is_contiguous() && token_ids.scalar_type() == ScalarType::Long, "token_ids: expected contiguous int64");
  const int64_t n = token_ids.numel(), split = reward == nullptr ? 0 : std::min(support.rewarded, support.vocab_size);
  const auto* ids = static_cast<const int64_t*>(token_ids.const_data_ptr());
  Tensor out = empty_floats(reward == nullptr ? 5 : 14, n);
  for (int64_t start = 0; start < n; start += tiling.rows) {
    const int64_t stop = std::min(n, start + tiling.rows);
    Block block(stop - start);
    logits.rows(start, stop);
    if (reward != nullptr) reward->rows(start, stop);
    // Tiles end where the reward rows end.
    for (int64_t lo = 0; lo < support.vocab_size;) {
      const int64_t bound = lo < split ? split : support.vocab_size, hi = std::min(bound, lo + tiling.columns);
      fold_tile(pass, logits, lo < split ? reward : nullptr, ids, head, {start, stop, lo, hi}, block, visit);
      lo = hi;
    }
    write(block, start, stop, reward != nullptr, floats(out), n);
  }
  return out;
}

}  // namespace datc
