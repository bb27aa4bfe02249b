// The CPU backend over paged, or dense, caches: keys and values are read in their pages, by ordinary threads.
#pragma once

#include "core/paged.h"
#include "cpu/forward.h"
#include "pages/pages.h"

namespace flashmsa::cpu {

// out and lse of every row. Whatever lengths, tables and lists of pages hold, nothing outside the tensors is read or
// written, and no slot past a length is looked at. num_splits and batch_invariant change nothing: a row's sums do not
// depend on what else is in the batch.
void paged_attention(const PagedParams& params, const ParallelFor& parallel_for);

// See pages/pages.h.
void gather_pages(const pages::GatherParams& params, const ParallelFor& parallel_for);
void append_kv(const pages::AppendParams& params, const ParallelFor& parallel_for);

}  // namespace flashmsa::cpu
