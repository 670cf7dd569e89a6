#define GRPO_LANES 4
#define GRPO_FUNCTION(name) name##_generic
#include "anchored_tile_kernel.h"
#include "logit_gradient_kernel.h"
