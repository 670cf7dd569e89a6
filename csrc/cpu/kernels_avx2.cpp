#define GRPO_KERNEL anchored_tile_avx2
#define GRPO_LANES 8
#include "anchored_tile_kernel.h"
