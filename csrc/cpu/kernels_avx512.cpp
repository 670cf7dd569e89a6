#define GRPO_KERNEL anchored_tile_avx512
#define GRPO_LANES 16
#include "anchored_tile_kernel.h"
