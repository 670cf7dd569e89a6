// The kernel's text, compiled once per instruction set; see simd.h.
#include "anchored_tile.h"
#include "simd.h"

namespace grpo {
namespace {

// Four vectors of neighbouring tokens at a time: the sums stay in registers while the vocabulary runs by. They are summed in three
// levels (32 entries in float32, a tile of those in float32, tiles in float64), so that the error grows neither with the vocabulary
// nor, as one long float32 sum would, to 1e-6 of the total within a tile.
constexpr int64_t kRun = 32;

// The distance of a logit, from -87.3 up, where E is 1e-38: below, a logit of -inf would make E * d a NaN. NaN passes through.
template <bool kPlain>
inline Floats distance(const AnchoredTile& a, int64_t row, Floats product, Floats inverse_temperature, Floats offset) {
  if (!kPlain) {
    const Ints left_out = product == -__builtin_inff();
    if (a.bias) product += a.bias[row];
    if (a.softcap > 0.0f) product = a.softcap * hyperbolic_tangent(product / a.softcap);
    product = left_out ? Floats{} - __builtin_inff() : product;  // tanh would make -softcap of it
  }
  const Floats d = product * inverse_temperature - offset;
  return d < -87.3f ? Floats{} - 87.3f : d;
}

// kPlain: no bias, no softcap, exponentials kept: the usual head, in which nothing is asked per entry.
template <int kVectors, bool kPlain>
inline void columns(const AnchoredTile& a, int64_t j) {
  Floats inverse_temperature[kVectors], offset[kVectors], sum[kVectors], weighted[kVectors];
  for (int i = 0; i < kVectors; ++i) {
    inverse_temperature[i] = load(a.inverse_temperature + j + i * GRPO_LANES);
    offset[i] = load(a.offset + j + i * GRPO_LANES);
    sum[i] = weighted[i] = Floats{};
  }
  float* p = a.tile + j;
  for (int64_t begin = 0; begin < a.rows; begin += kRun) {
    const int64_t end = begin + kRun < a.rows ? begin + kRun : a.rows;
    Floats run[kVectors], weighted_run[kVectors];
    for (int i = 0; i < kVectors; ++i) run[i] = weighted_run[i] = Floats{};
    for (int64_t r = begin; r < end; ++r, p += a.stride) {
      for (int i = 0; i < kVectors; ++i) {
        const Floats d = distance<kPlain>(a, r, load(p + i * GRPO_LANES), inverse_temperature[i], offset[i]);
        const Floats e = exponential(d);
        store(p + i * GRPO_LANES, !kPlain && a.keep_distances ? d : e);
        run[i] += e;
        weighted_run[i] += e * d;
      }
    }
    for (int i = 0; i < kVectors; ++i) {
      sum[i] += run[i];
      weighted[i] += weighted_run[i];
    }
  }
  for (int i = 0; i < kVectors; ++i)
    for (int lane = 0; lane < GRPO_LANES; ++lane) {
      a.sum[j + i * GRPO_LANES + lane] += sum[i][lane];
      a.weighted_sum[j + i * GRPO_LANES + lane] += weighted[i][lane];
    }
}

// The last columns, fewer than a vector: few enough for float64 sums.
inline void column(const AnchoredTile& a, int64_t j) {
  float* p = a.tile + j;
  for (int64_t r = 0; r < a.rows; ++r, p += a.stride) {
    const Floats d = distance<false>(a, r, Floats{} + *p, Floats{} + a.inverse_temperature[j], Floats{} + a.offset[j]);
    const Floats e = exponential(d);
    *p = a.keep_distances ? d[0] : e[0];
    a.sum[j] += e[0];
    a.weighted_sum[j] += static_cast<double>(e[0]) * d[0];
  }
}

template <bool kPlain>
inline void all_columns(const AnchoredTile& a, int64_t begin, int64_t end) {
  int64_t j = begin;
  for (; j + 4 * GRPO_LANES <= end; j += 4 * GRPO_LANES) columns<4, kPlain>(a, j);
  for (; j + GRPO_LANES <= end; j += GRPO_LANES) columns<1, kPlain>(a, j);
  for (; j < end; ++j) column(a, j);
}

}  // namespace

void GRPO_FUNCTION(anchored_tile)(const AnchoredTile& a, int64_t begin, int64_t end) {
  // The target's own term must never enter the sum: s - 1 would lose all digits of 1 - p when p is near 1. Its product is set to minus
  // infinity, whose distance is held at -87.3, where E is 1e-38 and E * d is as small.
  for (int64_t j = begin; j < end; ++j) {
    const int64_t r = a.targets[j] - a.first_row;
    if (r >= 0 && r < a.rows) a.tile[r * a.stride + j] = -__builtin_inff();
  }
  if (!a.bias && !(a.softcap > 0.0f) && !a.keep_distances)
    all_columns<true>(a, begin, end);
  else
    all_columns<false>(a, begin, end);
  for (int64_t j = begin; j < end; ++j) {
    const int64_t r = a.targets[j] - a.first_row;
    if (r >= 0 && r < a.rows && !a.keep_distances) a.tile[r * a.stride + j] = 0.0f;
  }
}

}  // namespace grpo
