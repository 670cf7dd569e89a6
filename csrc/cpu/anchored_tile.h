// Anchored softmax of one logits tile on the CPU. Raw pointers, no torch.
#pragma once
#include <cstdint>

namespace grpo {

// tile [rows, cols] (row stride `stride`, in floats): row r is vocabulary entry v0 + r, column j is a token; holds <W[v0+r], h_j>.
// On return it holds E = exp(tile * inverse_temperature - offset[j]), with E = 0 where v0 + r == targets[j];
// sum[j] += sum_r E and weighted_sum[j] += sum_r E * (logit - offset[j]). A NaN logit makes both NaN.
struct AnchoredTile {
  float* tile;
  int64_t rows, cols, stride;
  int64_t first_row;  // v0
  float inverse_temperature;
  const float* offset;     // [cols]
  const int64_t* targets;  // [cols], vocabulary entries
  double* sum;             // [cols]
  double* weighted_sum;    // [cols]
};

// Columns [begin, end) only; one function per instruction set.
using AnchoredTileKernel = void (*)(const AnchoredTile&, int64_t begin, int64_t end);
void anchored_tile_generic(const AnchoredTile&, int64_t begin, int64_t end);
void anchored_tile_avx2(const AnchoredTile&, int64_t begin, int64_t end);
void anchored_tile_avx512(const AnchoredTile&, int64_t begin, int64_t end);

// Names of the instruction sets this machine can run, best first ("generic" is always last).
const char* const* supported_instruction_sets();  // null-terminated

// Launcher. `instruction_set` is one of the above or null for the best; returns 0, or 1 if this machine does not have it.
int anchored_tile(const AnchoredTile& arguments, int threads, const char* instruction_set);

}  // namespace grpo
