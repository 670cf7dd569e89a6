// The tile kernel's text, compiled once per instruction set with GRPO_KERNEL (function name) and GRPO_LANES (floats per vector) set.
// Only C headers and internal linkage: a standard template instantiated here with AVX-512 code could be the copy that the
// linker keeps for the whole module, and would then crash on a machine without it.
#include <stdint.h>
#include <string.h>

#include "anchored_tile.h"

namespace grpo {
namespace {

typedef float Floats __attribute__((vector_size(GRPO_LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(GRPO_LANES * 4)));

inline Floats load(const float* p) {
  Floats v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Floats v) { memcpy(p, &v, sizeof v); }

// exp by range reduction x = k ln2 + r, |r| <= ln2/2, and a degree-6 polynomial (Cephes expf): relative error below 2e-7.
// The argument is at least -87.3 (see `difference`) and is held at 88: 2^k is then a normal float, and sums of larger terms overflow
// to infinity, which the caller tests for. The comparison is written so that NaN passes through, and 2^k is multiplied (not added to
// the exponent bits) so that it stays NaN.
inline Floats exponential(Floats x) {
  x = x > 88.0f ? Floats{} + 88.0f : x;
  const float round_to_integer = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
  const Floats shifted = x * 1.44269504088896341f + round_to_integer;
  const Floats k = shifted - round_to_integer;
  Floats r = x - k * 0.693359375f;  // ln2 in two parts, so that r keeps its low bits
  r = r - k * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  Ints bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4B400000 + 127) << 23;  // 0x4B400000 is round_to_integer's pattern
  Floats scale;
  memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

// logit / T - offset, from -87.3 up, where E is 1e-38: below, a logit of -inf would make E * d a NaN. NaN passes through.
inline Floats difference(Floats logit, float inverse_temperature, Floats offset) {
  const Floats d = logit * inverse_temperature - offset;
  return d < -87.3f ? Floats{} - 87.3f : d;
}

// Four vectors of neighbouring tokens at a time: the sums stay in registers while the vocabulary runs by. They are summed in three
// levels (32 entries in float32, a tile of those in float32, tiles in float64), so that the error grows neither with the vocabulary
// nor, as one long float32 sum would, to 1e-6 of the total within a tile.
constexpr int64_t kRun = 32;

template <int kVectors>
inline void columns(const AnchoredTile& a, int64_t j) {
  Floats offset[kVectors], sum[kVectors], weighted[kVectors];
  for (int i = 0; i < kVectors; ++i) {
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
        const Floats d = difference(load(p + i * GRPO_LANES), a.inverse_temperature, offset[i]);
        const Floats e = exponential(d);
        store(p + i * GRPO_LANES, e);
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
    const Floats d = difference(Floats{} + *p, a.inverse_temperature, Floats{} + a.offset[j]);
    const Floats e = exponential(d);
    *p = e[0];
    a.sum[j] += e[0];
    a.weighted_sum[j] += static_cast<double>(e[0]) * d[0];
  }
}

}  // namespace

void GRPO_KERNEL(const AnchoredTile& a, int64_t begin, int64_t end) {
  // The target's own term must never enter the sum: s - 1 would lose all digits of 1 - p when p is near 1. Its logit is set 100
  // below the offset, where E is 1e-38 and E * d is as small.
  for (int64_t j = begin; j < end; ++j) {
    const int64_t r = a.targets[j] - a.first_row;
    if (r >= 0 && r < a.rows) a.tile[r * a.stride + j] = (a.offset[j] - 100.0f) / a.inverse_temperature;
  }
  int64_t j = begin;
  for (; j + 4 * GRPO_LANES <= end; j += 4 * GRPO_LANES) columns<4>(a, j);
  for (; j + GRPO_LANES <= end; j += GRPO_LANES) columns<1>(a, j);
  for (; j < end; ++j) column(a, j);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t r = a.targets[i] - a.first_row;
    if (r >= 0 && r < a.rows) a.tile[r * a.stride + i] = 0.0f;
  }
}

}  // namespace grpo
