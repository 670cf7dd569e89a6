// Vectors of GRPO_LANES floats, for kernels that are compiled once per instruction set. Only C headers and internal linkage: a standard
// template instantiated with AVX-512 code could be the copy that the linker keeps for the whole module, and would then crash on a
// machine without it.
#pragma once
#include <stdint.h>
#include <string.h>

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
// The argument is at least -87.3 (see `distance`) and is held at 88: 2^k is then a normal float, and sums of larger terms overflow
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

// tanh: Cephes' polynomial below 0.625, where 1 - 2 / (e^2x + 1) would lose the digits of a small x; relative error below 3e-7.
inline Floats hyperbolic_tangent(Floats x) {
  const Floats magnitude = x < 0.0f ? -x : x;
  const Floats far = 1.0f - 2.0f / (exponential(magnitude + magnitude) + 1.0f);  // exponential saturates, so far -> 1
  const Floats square = x * x;
  Floats p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square + -5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square + -3.33332819422e-1f;
  const Floats near = p * square * x + x;
  return magnitude < 0.625f ? near : (x < 0.0f ? -far : far);
}

}  // namespace
}  // namespace grpo
