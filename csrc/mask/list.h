// The list of masks. Adding one: a header beside this, a line here, a dataclass in flashmsa/masks.
#pragma once

#include "mask/block_sparse.h"
#include "mask/causal.h"
#include "mask/composite.h"
#include "mask/dense.h"
#include "mask/document.h"

#define FLASHMSA_FOR_EACH_MASK(X) \
  X(Dense)                        \
  X(Causal)                       \
  X(Document)                     \
  X(Composite)                    \
  X(BlockSparse)
