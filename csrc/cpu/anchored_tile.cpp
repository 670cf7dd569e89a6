#include "anchored_tile.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "parallel.h"

namespace grpo {
namespace {

struct Variant {
  const char* name;
  AnchoredTileKernel kernel;
};

std::vector<Variant> detect() {
  std::vector<Variant> variants;
#ifdef GRPO_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    variants.push_back({"avx512", anchored_tile_avx512});
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) variants.push_back({"avx2", anchored_tile_avx2});
#endif
  variants.push_back({"generic", anchored_tile_generic});
  return variants;
}

const std::vector<Variant>& variants() {
  static const std::vector<Variant> found = detect();
  return found;
}

}  // namespace

const char* const* supported_instruction_sets() {
  static const std::vector<const char*> names = [] {
    std::vector<const char*> list;
    for (const Variant& variant : variants()) list.push_back(variant.name);
    list.push_back(nullptr);
    return list;
  }();
  return names.data();
}

int anchored_tile(const AnchoredTile& arguments, int threads, const char* instruction_set) {
  for (const Variant& variant : variants()) {
    if (instruction_set && std::strcmp(variant.name, instruction_set) != 0) continue;
    // 2^17 exponentials are about 80 us of work: below that a thread's start costs more than it saves.
    const int64_t elements = arguments.rows * arguments.cols;
    const int useful = static_cast<int>(std::min<int64_t>(std::max(threads, 1), elements >> 17));
    parallel_ranges(arguments.cols, 64, useful,
                    [&](int64_t begin, int64_t end) { variant.kernel(arguments, begin, end); });
    return 0;
  }
  return 1;
}

}  // namespace grpo
