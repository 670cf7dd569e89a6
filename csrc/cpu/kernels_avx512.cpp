#define GRPO_LANES 16
#define GRPO_FUNCTION(name) name##_avx512
#include "anchored_tile_kernel.h"
#include "logit_gradient_kernel.h"
