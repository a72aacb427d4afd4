// The ops, as bindings.cpp registers them. Checks of the arguments are the caller's; what is wrong here is a RuntimeError.
//
// Everywhere: N tokens, V vocabulary, D and K widths; floats are float32, bfloat16 or float16 in any layout unless said
// otherwise; bias [V] and row_temperature [N] are contiguous float32; token_ids [N] contiguous int64. tile_rows x tile_columns is
// the tile in which the op works, level the instruction set (`row_pass`).
#pragma once

#include <tuple>

#include "fold.h"

namespace datc {

// What fold_rows returns.
Tensor linear_credit(
    Tensor hidden, Tensor weight, Tensor token_ids, std::optional<Tensor> reward_grad, std::optional<Tensor> reward_embedding,
    std::optional<Tensor> bias, std::optional<Tensor> row_temperature, double temperature, double logit_scale,
    std::optional<double> softcap, int64_t vocab_size, int64_t tile_rows, int64_t tile_columns, int64_t level);

// Gradients of hidden [N, D] and, where asked for, of weight [V, D] in its dtype and bias [V] float32 (otherwise empty).
// hidden float32 contiguous; saved [5 or more, N] float32 as the package's finaliser lays it out.
std::tuple<Tensor, Tensor, Tensor> linear_credit_backward(
    Tensor incoming, Tensor logprob, Tensor saved, Tensor hidden, Tensor weight, Tensor token_ids, std::optional<Tensor> bias,
    std::optional<Tensor> row_temperature, double temperature, double logit_scale, std::optional<double> softcap,
    int64_t vocab_size, int64_t ignore_index, bool hidden_needed, bool weight_needed, bool bias_needed, int64_t tile_rows,
    int64_t tile_columns, int64_t level);

Tensor logits_credit(
    Tensor logits, Tensor token_ids, std::optional<Tensor> reward_grad, std::optional<Tensor> reward_embedding,
    std::optional<Tensor> reward, std::optional<Tensor> row_temperature, double temperature, double logit_scale,
    std::optional<double> softcap, int64_t vocab_size, int64_t tile_rows, int64_t tile_columns, int64_t level);

// Gradient of logits [N, V], in their dtype.
Tensor logits_credit_backward(
    Tensor incoming, Tensor logprob, Tensor saved, Tensor logits, Tensor token_ids, std::optional<Tensor> row_temperature,
    double temperature, double logit_scale, std::optional<double> softcap, int64_t vocab_size, int64_t ignore_index,
    int64_t tile_columns, int64_t level);

// ids [N, k], z [N, k], u [N, k] of the candidates, and what fold_rows returns. candidate_ids [N, k] contiguous int64, or the
// top_k columns of largest z.
std::tuple<Tensor, Tensor, Tensor, Tensor> candidate_advantages(
    Tensor hidden, Tensor weight, std::optional<Tensor> reward_grad, std::optional<Tensor> reward_embedding,
    std::optional<Tensor> candidate_ids, int64_t top_k, std::optional<Tensor> bias, std::optional<Tensor> row_temperature,
    double temperature, double logit_scale, std::optional<double> softcap, int64_t vocab_size, int64_t tile_rows,
    int64_t tile_columns, int64_t level);

// weight [N] and temperature [B], float64; credit [N] and advantage [B] float64, lengths [B] int64, frozen [N] bool, contiguous.
std::tuple<Tensor, Tensor> allocate_weights(
    Tensor credit, Tensor advantage, Tensor lengths, std::optional<Tensor> frozen, double ceiling, bool sign);

// The name of the instruction set behind a level.
std::string instruction_set(int64_t level);

}  // namespace datc
