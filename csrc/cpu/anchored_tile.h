// Anchored softmax of one logits tile on the CPU. Raw pointers, no torch.
#pragma once
#include <cstdint>

namespace grpo {

// tile [rows, cols] (row stride `stride`, in floats): row r is vocabulary entry v0 + r, column j is a token; holds <W[v0+r], h_j>.
// With z = tile + bias[r], capped to softcap * tanh(z / softcap), the distance is d = z * inverse_temperature[j] - offset[j].
// On return the tile holds E = exp(d) with E = 0 where v0 + r == targets[j], or with `keep_distances` d itself (any value at the target);
// sum[j] += sum_r E and weighted_sum[j] += sum_r E * d, both without the target. A NaN logit makes both NaN. Distances are held at
// -87.3, where E is 1e-38, and a product of minus infinity is there too, softcap or not: it is how the target is left out.
struct AnchoredTile {
  float* tile;
  int64_t rows, cols, stride;
  int64_t first_row;   // v0
  const float* bias;   // [rows], or null
  float softcap;       // 0: none
  bool keep_distances;
  const float* inverse_temperature;  // [cols]
  const float* offset;               // [cols]
  const int64_t* targets;            // [cols], vocabulary entries
  double* sum;                       // [cols]
  double* weighted_sum;              // [cols]
};

// Launcher. `instruction_set` names one of this machine's, null the best; returns 0, or 1 if this machine does not have it.
int anchored_tile(const AnchoredTile& arguments, int threads, const char* instruction_set);

}  // namespace grpo
