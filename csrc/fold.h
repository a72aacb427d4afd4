// One pass over the vocabulary: tiles of columns folded in order, row by row, the sampled column picked on the way.
#pragma once

#include <functional>
#include <optional>

#include "matrices.h"

namespace datc {

// The tile of the vocabulary in which an op works: a constant of the call's widths, never of N.
constexpr int64_t kMaxTileColumns = 4096;

// One [N, V] matrix that is looked at tile by tile.
class Columns {
 public:
  virtual ~Columns() = default;
  // Rows [start, stop) are next.
  virtual void rows(int64_t start, int64_t stop) = 0;
  // Columns [lo, hi) of them are next.
  virtual void columns(int64_t lo, int64_t hi) = 0;
  // Those columns of row start + i as float32, in `buffer` or elsewhere; may be overwritten. Called on any thread.
  virtual float* row(int64_t i, float* buffer) = 0;
};

// left [N, width] times table [V, width] transposed, computed tile by tile.
class ProductColumns final : public Columns {
 public:
  ProductColumns(const RowPass& pass, Matrix left, Matrix table, int64_t tile_rows, int64_t tile_columns);
  void rows(int64_t start, int64_t stop) override;
  void columns(int64_t lo, int64_t hi) override;
  float* row(int64_t i, float*) override { return tile_ + i * count_; }

 private:
  const RowPass& pass_;
  Matrix left_, table_, block_;
  Tensor space_, left_space_, table_space_;
  float* tile_;
  int64_t count_ = 0;
};

// A matrix that exists.
class StoredColumns final : public Columns {
 public:
  StoredColumns(const RowPass& pass, Matrix matrix) : pass_(pass), matrix_(matrix) {}
  void rows(int64_t start, int64_t) override { start_ = start; }
  void columns(int64_t lo, int64_t hi) override { lo_ = lo, count_ = hi - lo; }
  float* row(int64_t i, float* buffer) override {
    read_row(pass_, matrix_, start_ + i, lo_, count_, buffer);
    return buffer;
  }

 private:
  const RowPass& pass_;
  Matrix matrix_;
  int64_t start_ = 0, lo_ = 0, count_ = 0;
};

// From what the head gives to logits, row by row. Tensors are contiguous: bias [V] and temperatures [N] float32.
struct HeadSettings {
  std::optional<Tensor> bias, row_temperature;
  double temperature, logit_scale;
  std::optional<double> softcap;

  Head of_row(int64_t row) const;
  float chain_of_row(int64_t row) const;  // logit_scale / temperature
  float temperature_of_row(int64_t row) const;
  const float* bias_from(int64_t column) const;
};

struct Tiling {
  int64_t rows, columns;
};

// What a pass is over.
struct Support {
  int64_t vocab_size;
  int64_t rewarded;  // columns below it have a reward row
};

// Called for every row of every tile before it is folded: row, first column, number of columns, x, u (or null), factor.
using Visit = std::function<void(int64_t, int64_t, int64_t, const float*, const float*, float)>;

// [5, N] z_t, Q, R, H of all columns and z_y; with rewards [14, N]: then z_t, Q, R, H, u_t, S1, S2, S3 of the rewarded columns
// and u_y. token_ids is int64, contiguous.
Tensor fold_rows(
    const RowPass& pass, Columns& logits, Columns* reward, const Tensor& token_ids, const HeadSettings& head,
    const Support& support, const Tiling& tiling, const Visit& visit = nullptr);

}  // namespace datc
