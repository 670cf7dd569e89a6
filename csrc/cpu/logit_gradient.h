// From the kept distances of a logits tile to the gradient of its logits, on the CPU. Raw pointers, no torch.
#pragma once
#include <cstdint>

namespace grpo {

// tile [rows, cols] (row stride `stride`, in floats), as `anchored_tile` leaves it with keep_distances: d = x - offset[j].
// On return it holds, for every entry as if it were not the target, the gradient of the product <W[v0+r], h_j>:
//   -p (slope[j] + entropy_slope[j] log p) dx/dz,  log p = d - log_total[j],
// (log_total must not be far below 0, for d is held at -87.3: the offset is the target's logit or the row's largest),
//   dx/dz = inverse_temperature[j] (1 - (x / (softcap inverse_temperature[j]))^2), the bracket without a softcap 1.
// With c and e the loss's derivatives by the log-probability and the entropy H: slope = c + e H, entropy_slope = e.
struct LogitGradient {
  float* tile;
  int64_t rows, cols, stride;
  float softcap;                     // 0: none
  const float* inverse_temperature;  // [cols]
  const float* offset;               // [cols]
  const float* log_total;            // [cols]
  const float* slope;                // [cols]
  const float* entropy_slope;        // [cols]
};

// Launcher, as `anchored_tile`.
int logit_gradient(const LogitGradient& arguments, int threads, const char* instruction_set);

}  // namespace grpo
