#include <vector>

#include "ops.h"

namespace datc {

namespace {

struct Candidate {
  float z, u;
  int64_t id;
};

// Whether a comes before b: larger z, NaN above everything, of equal ones the lower id.
bool before(const Candidate& a, const Candidate& b) {
  const bool a_nan = a.z != a.z, b_nan = b.z != b.z;
  if (a_nan != b_nan) return a_nan;
  if (!a_nan && a.z != b.z) return a.z > b.z;
  return a.id < b.id;
}

// The k best candidates of one row so far; a heap whose front is the last of them.
class Best {
 public:
  void start(int64_t k) {
    heap_.clear();
    heap_.reserve(k);
    k_ = k;
  }

  void add(int64_t lo, int64_t count, const float* x, const float* u, float factor) {
    for (int64_t j = 0; j < count; ++j) {
      const Candidate c{x[j] * factor, u == nullptr ? 0.0f : u[j], lo + j};
      if (int64_t(heap_.size()) < k_) {
        heap_.push_back(c);
        std::push_heap(heap_.begin(), heap_.end(), before);
      } else if (!(c.z <= heap_.front().z) && before(c, heap_.front())) {
        std::pop_heap(heap_.begin(), heap_.end(), before);
        heap_.back() = c;
        std::push_heap(heap_.begin(), heap_.end(), before);
      }
    }
  }

  const std::vector<Candidate>& sorted() {
    std::sort(heap_.begin(), heap_.end(), before);
    return heap_;
  }

 private:
  std::vector<Candidate> heap_;
  int64_t k_ = 0;
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> candidate_advantages(
    Tensor hidden, Tensor weight, std::optional<Tensor> reward_grad, std::optional<Tensor> reward_embedding,
    std::optional<Tensor> candidate_ids, int64_t top_k, std::optional<Tensor> bias, std::optional<Tensor> row_temperature,
    double temperature, double logit_scale, std::optional<double> softcap, int64_t vocab_size, int64_t tile_rows,
    int64_t tile_columns, int64_t level) {
  const RowPass& pass = row_pass(level);
  const HeadSettings head{bias, row_temperature, temperature, logit_scale, softcap};
  const Tiling tiling{tile_rows, tile_columns};
  const bool chosen = !candidate_ids.has_value();
  const int64_t n = hidden.size(0), k = chosen ? top_k : candidate_ids->size(1);
  Tensor ids = torch::stable::empty({n, k}, ScalarType::Long), z = empty_floats(n, k), u = empty_floats(n, k);
  auto* id_of = static_cast<int64_t*>(ids.mutable_data_ptr());
  float *z_of = floats(z), *u_of = floats(u);
  torch::stable::fill_(z, -__builtin_inf());
  torch::stable::zero_(u);
  if (!chosen) torch::stable::copy_(ids, *candidate_ids);
  std::vector<Best> best(chosen ? std::min(tile_rows, n) : 0);

  const auto visit = [&](int64_t row, int64_t lo, int64_t count, const float* x, const float* reward, float factor) {
    if (chosen) {
      Best& candidates = best[row % tile_rows];
      if (lo == 0) candidates.start(k);
      candidates.add(lo, count, x, reward, factor);
      if (lo + count < vocab_size) return;
      int64_t at = row * k;
      for (const Candidate& c : candidates.sorted()) {
        id_of[at] = c.id, z_of[at] = c.z, u_of[at] = c.u;
        ++at;
      }
      return;
    }
    for (int64_t at = row * k; at < (row + 1) * k; ++at) {
      const int64_t j = place_of(id_of[at], lo, count);
      if (j < 0) continue;
      z_of[at] = x[j] * factor;
      if (reward != nullptr) u_of[at] = reward[j];
    }
  };

  Tensor nobody = torch::stable::empty({n}, ScalarType::Long);  // no column is the sampled one here
  torch::stable::zero_(nobody);
  ProductColumns logits(pass, Matrix::of("hidden", hidden), Matrix::of("weight", weight), tile_rows, tile_columns);
  if (!reward_grad || !reward_embedding) {
    return {ids, z, u, fold_rows(pass, logits, nullptr, nobody, head, {vocab_size, 0}, tiling, visit)};
  }
  ProductColumns reward(
      pass, Matrix::of("reward_grad", *reward_grad), Matrix::of("reward_embedding", *reward_embedding), tile_rows, tile_columns);
  return {ids, z, u, fold_rows(pass, logits, &reward, nobody, head, {vocab_size, reward_embedding->size(0)}, tiling, visit)};
}

}  // namespace datc
