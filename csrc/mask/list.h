// The list of masks. Adding one: a header beside this, a line here, a dataclass in flashmsa/masks. Hash is none of them: its
// kernels load otherwise (fwd/indexed.cuh), and what they do not serve is lowered to Composite. Nor is Band: to all but the
// forward kernels it is a Composite.
#pragma once

#include "mask/band.h"
#include "mask/block_sparse.h"
#include "mask/causal.h"
#include "mask/composite.h"
#include "mask/dense.h"
#include "mask/document.h"
#include "mask/hash.h"

#define FLASHMSA_FOR_EACH_MASK(X) \
  X(Dense)                        \
  X(Causal)                       \
  X(Document)                     \
  X(Composite)                    \
  X(BlockSparse)
