// The instruction sets that the kernels are compiled for, and which of them this machine has.
#pragma once
#include "anchored_tile.h"
#include "logit_gradient.h"

namespace grpo {

// Each kernel works on columns [begin, end) of its arguments.
struct InstructionSet {
  const char* name;
  void (*anchored_tile)(const AnchoredTile&, int64_t begin, int64_t end);
  void (*logit_gradient)(const LogitGradient&, int64_t begin, int64_t end);
};

// Names of the instruction sets this machine can run, best first ("generic" is always last); null-terminated.
const char* const* supported_instruction_sets();

// The one of that name, the best for a null name, or null where this machine does not have it.
const InstructionSet* find_instruction_set(const char* name);

}  // namespace grpo
