#include "anchored_tile.h"

#include "dispatch.h"
#include "parallel.h"

namespace grpo {

int anchored_tile(const AnchoredTile& arguments, int threads, const char* instruction_set) {
  const InstructionSet* set = find_instruction_set(instruction_set);
  if (!set) return 1;
  parallel_ranges(arguments.cols, 64, useful_threads(threads, arguments.rows * arguments.cols),
                  [&](int64_t begin, int64_t end) { set->anchored_tile(arguments, begin, end); });
  return 0;
}

}  // namespace grpo
