#define GRPO_KERNEL anchored_tile_generic
#define GRPO_LANES 4
#include "anchored_tile_kernel.h"
