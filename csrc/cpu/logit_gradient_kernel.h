// The kernel's text, compiled once per instruction set; see simd.h.
#include "logit_gradient.h"
#include "simd.h"

namespace grpo {
namespace {

struct GradientColumns {
  Floats log_total, slope, entropy_slope, inverse_temperature, offset, to_cap;

  // `at` reads a [cols] array at these columns.
  template <typename Read>
  GradientColumns(const LogitGradient& a, const Read& at)
      : log_total(at(a.log_total)),
        slope(at(a.slope)),
        entropy_slope(at(a.entropy_slope)),
        inverse_temperature(at(a.inverse_temperature)),
        offset(at(a.offset)),
        to_cap(a.softcap > 0.0f ? 1.0f / (inverse_temperature * a.softcap) : Floats{}) {}

  Floats operator()(Floats distance) const {
    const Floats log_p = distance - log_total;
    const Floats capped = (distance + offset) * to_cap;  // tanh(z / softcap); 0 without a softcap
    return -exponential(log_p < -87.3f ? Floats{} - 87.3f : log_p) * (slope + entropy_slope * log_p) * inverse_temperature *
           (1.0f - capped * capped);
  }
};

}  // namespace

void GRPO_FUNCTION(logit_gradient)(const LogitGradient& a, int64_t begin, int64_t end) {
  int64_t j = begin;
  for (; j + GRPO_LANES <= end; j += GRPO_LANES) {
    const GradientColumns columns(a, [j](const float* p) { return load(p + j); });
    float* p = a.tile + j;
    for (int64_t r = 0; r < a.rows; ++r, p += a.stride) store(p, columns(load(p)));
  }
  for (; j < end; ++j) {
    const GradientColumns column(a, [j](const float* p) { return Floats{} + p[j]; });
    float* p = a.tile + j;
    for (int64_t r = 0; r < a.rows; ++r, p += a.stride) *p = column(Floats{} + *p)[0];
  }
}

}  // namespace grpo
