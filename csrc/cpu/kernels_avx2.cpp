#define GRPO_LANES 8
#define GRPO_FUNCTION(name) name##_avx2
#include "anchored_tile_kernel.h"
#include "logit_gradient_kernel.h"
