#include "dispatch.h"

#include <cstring>
#include <vector>

namespace grpo {

#define GRPO_DECLARE(set)                                             \
  void anchored_tile_##set(const AnchoredTile&, int64_t, int64_t);    \
  void logit_gradient_##set(const LogitGradient&, int64_t, int64_t);
GRPO_DECLARE(generic)
GRPO_DECLARE(avx2)
GRPO_DECLARE(avx512)
#undef GRPO_DECLARE

namespace {

std::vector<InstructionSet> detect() {
  std::vector<InstructionSet> found;
#ifdef GRPO_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    found.push_back({"avx512", anchored_tile_avx512, logit_gradient_avx512});
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    found.push_back({"avx2", anchored_tile_avx2, logit_gradient_avx2});
#endif
  found.push_back({"generic", anchored_tile_generic, logit_gradient_generic});
  return found;
}

const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> found = detect();
  return found;
}

}  // namespace

const char* const* supported_instruction_sets() {
  static const std::vector<const char*> names = [] {
    std::vector<const char*> list;
    for (const InstructionSet& set : instruction_sets()) list.push_back(set.name);
    list.push_back(nullptr);
    return list;
  }();
  return names.data();
}

const InstructionSet* find_instruction_set(const char* name) {
  for (const InstructionSet& set : instruction_sets())
    if (!name || std::strcmp(set.name, name) == 0) return &set;
  return nullptr;
}

}  // namespace grpo
