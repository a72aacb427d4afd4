// Tensors as the ops use them: strided matrices of any float dtype, read as float32, and products of them by PyTorch's own
// matrix library.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "row_pass.h"

namespace datc {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Runs f(begin, end) over [0, n) on PyTorch's threads; `work` is the number of elements behind one item.
template <class F>
void parallel(int64_t n, int64_t work, const F& f) {
  torch::stable::parallel_for(0, n, std::max<int64_t>(1, 32768 / std::max<int64_t>(1, work)), f);
}

// The place of column `id`, which may be any number, among [lo, lo + count), or -1.
inline int64_t place_of(int64_t id, int64_t lo, int64_t count) { return id >= lo && id < lo + count ? id - lo : -1; }

inline Tensor empty_floats(int64_t count) { return torch::stable::empty({count}, ScalarType::Float); }
inline Tensor empty_floats(int64_t rows, int64_t columns) { return torch::stable::empty({rows, columns}, ScalarType::Float); }
inline float* floats(const Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

// A matrix of float32, bfloat16 or float16 in any layout; it does not own its memory.
struct Matrix {
  char* data;
  ScalarType dtype;
  int64_t rows, columns;
  int64_t row_stride, column_stride;  // in elements

  static Matrix of(const char* name, const Tensor& t) {
    const ScalarType dtype = t.scalar_type();
    STD_TORCH_CHECK(
        dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, name,
        ": expected float32, bfloat16 or float16");
    STD_TORCH_CHECK(t.dim() == 2 && t.is_cpu(), name, ": expected a matrix on the CPU");
    return {static_cast<char*>(t.mutable_data_ptr()), dtype, t.size(0), t.size(1), t.stride(0), t.stride(1)};
  }

  static Matrix of(float* data, int64_t rows, int64_t columns) {
    return {reinterpret_cast<char*>(data), ScalarType::Float, rows, columns, columns, 1};
  }

  int64_t width() const { return dtype == ScalarType::Float ? 4 : 2; }
  char* at(int64_t row, int64_t column) const { return data + (row * row_stride + column * column_stride) * width(); }

  Matrix slice(int64_t first, int64_t stop) const {
    return {at(first, 0), dtype, stop - first, columns, row_stride, column_stride};
  }

  Matrix transposed() const { return {data, dtype, columns, rows, column_stride, row_stride}; }

  // Whether a matrix library takes it as it is.
  bool direct() const {
    return dtype == ScalarType::Float && ((column_stride == 1 && row_stride >= std::max<int64_t>(1, columns)) ||
                                          (row_stride == 1 && column_stride >= std::max<int64_t>(1, rows)));
  }

  Tensor tensor() const {
    return torch::stable::from_blob(
        data, {rows, columns}, {row_stride, column_stride},
        torch::stable::Device(torch::headeronly::DeviceType::CPU), dtype);
  }
};

// Columns [first, first + count) of a row, as float32.
inline void read_row(const RowPass& pass, const Matrix& m, int64_t row, int64_t first, int64_t count, float* to) {
  const char* from = m.at(row, first);
  if (m.column_stride == 1) {
    if (m.dtype == ScalarType::Float) {
      std::memcpy(to, from, count * sizeof(float));
    } else {
      (m.dtype == ScalarType::BFloat16 ? pass.widen_bfloat16 : pass.widen_float16)(
          reinterpret_cast<const uint16_t*>(from), to, count);
    }
    return;
  }
  const int64_t step = m.column_stride;
  if (m.dtype == ScalarType::Float) {
    const float* p = reinterpret_cast<const float*>(from);
    for (int64_t i = 0; i < count; ++i) to[i] = p[i * step];
    return;
  }
  const uint16_t* p = reinterpret_cast<const uint16_t*>(from);
  for (int64_t i = 0; i < count; ++i) {
    (m.dtype == ScalarType::BFloat16 ? pass.widen_bfloat16 : pass.widen_float16)(p + i * step, to + i, 1);
  }
}

// float32 [count] into a row of float32, bfloat16 or float16, rounded to nearest even.
inline void write_row(const float* from, int64_t count, ScalarType dtype, void* to) {
  if (dtype == ScalarType::Float) {
    std::memcpy(to, from, count * sizeof(float));
  } else if (dtype == ScalarType::BFloat16) {
    auto* out = static_cast<uint16_t*>(to);
    for (int64_t i = 0; i < count; ++i) {
      uint32_t bits;
      std::memcpy(&bits, from + i, sizeof bits);
      const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
      out[i] = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
  } else {
    auto* out = static_cast<torch::headeronly::Half*>(to);
    for (int64_t i = 0; i < count; ++i) out[i] = torch::headeronly::Half(from[i]);
  }
}

// A float32 copy in `space` (grown as needed).
inline Matrix float_copy(const RowPass& pass, const Matrix& m, Tensor& space) {
  const int64_t count = std::max<int64_t>(1, m.rows * m.columns);
  if (!space.defined() || space.numel() < count) space = empty_floats(count);
  float* to = floats(space);
  parallel(m.rows, m.columns, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) read_row(pass, m, i, 0, m.columns, to + i * m.columns);
  });
  return Matrix::of(to, m.rows, m.columns);
}

// The matrix itself where the library takes it, else a float32 copy in `space`.
inline Matrix operand(const RowPass& pass, const Matrix& m, Tensor& space) {
  return m.direct() ? m : float_copy(pass, m, space);
}

// out = a b, or out += a b.
inline void multiply(const Matrix& a, const Matrix& b, const Matrix& out, bool add = false) {
  const Tensor left = a.tensor(), right = b.tensor(), result = out.tensor();
  STABLE_TORCH_ERROR_CODE_CHECK(
      add ? aoti_torch_cpu_addmm_out(result.get(), result.get(), left.get(), right.get(), 1.0, 1.0)
          : aoti_torch_cpu_mm_out(result.get(), left.get(), right.get()));
}

}  // namespace datc
