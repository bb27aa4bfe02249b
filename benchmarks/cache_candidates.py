"""Candidates over caches: ours, dense and in pages of each size, cuDNN, and what bounds them, a plain read and a copy.

Importing this adds them to candidates.FACTORIES.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch.nn import functional

from benchmarks import candidates
from benchmarks.cache_cases import CacheCase
from benchmarks.candidates import DTYPES, FACTORIES, Call, Unavailable, settings
from benchmarks.cases import PAGES

CHOSEN = 0.25  # of the pages, in the case of chosen ones
CHOSEN_PAGE = 64

_READ_SOURCE = r"""
extern "C" __global__ void plain_read(const int4* data, int count, int* sink) {
  const int stride = gridDim.x * blockDim.x;
  int4 sum = {0, 0, 0, 0};
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  for (; at + 7 * stride < count; at += 8 * stride) {
    int4 x[8];
    #pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = __ldcs(data + at + k * stride);
    #pragma unroll
    for (int k = 0; k < 8; ++k) sum.x ^= x[k].x, sum.y ^= x[k].y, sum.z ^= x[k].z, sum.w ^= x[k].w;
  }
  for (; at < count; at += stride) sum.x ^= __ldcs(data + at).x;
  // Never true of all bits, and the compiler does not know.
  if ((sum.x & sum.y & sum.z & sum.w) == 0x5ca1ab1e) *sink = sum.x;
}
"""


# Inputs


def _random(shape: tuple[int, ...], case: CacheCase, seed: int) -> torch.Tensor:
    generator = torch.Generator(settings.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=settings.device, dtype=DTYPES[case.dtype])


@lru_cache(maxsize=4)
def queries(case: CacheCase) -> torch.Tensor:
    """(batch, heads, len_q, head_dim)"""
    return _random((case.batch, case.heads, case.len_q, case.head_dim), case, 0)


@lru_cache(maxsize=1)
def _dense_cache(batch: int, heads_kv: int, length: int, head_dim: int, dtype: str) -> tuple[torch.Tensor, ...]:
    case = CacheCase(batch, heads_kv, heads_kv, length, head_dim, dtype=dtype)
    return tuple(_random((batch, heads_kv, length, head_dim), case, seed) for seed in (1, 2))


def dense_cache(case: CacheCase) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, (batch, heads_kv, length, head_dim); sequences of one length."""
    if case.lengths is not None:
        raise Unavailable("sequences of several lengths have no dense cache")
    return _dense_cache(case.batch, case.heads_kv, case.length, case.head_dim, case.dtype)


@dataclass(frozen=True)
class Pool:
    """The same keys and values in pages that lie anywhere."""

    k: torch.Tensor  # (pages, page_size, heads_kv, head_dim)
    v: torch.Tensor
    table: torch.Tensor  # int32 (batch, most pages of a sequence)
    lengths: torch.Tensor  # int32 (batch)


def pool(case: CacheCase, page: int) -> Pool:
    counts = [-(-length // page) for length in case.sequence_lengths]
    generator = torch.Generator(settings.device).manual_seed(3)
    places = torch.randperm(sum(counts), generator=generator, device=settings.device)
    rows = torch.split(places.int(), counts)
    table = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    lengths = torch.tensor(case.sequence_lengths, dtype=torch.int32, device=settings.device)
    shape = (sum(counts), page, case.heads_kv, case.head_dim)
    if case.lengths is not None or case.length % page != 0:
        return Pool(_random(shape, case, 1), _random(shape, case, 2), table, lengths)
    return Pool(*(_in_pages(x, places, shape) for x in dense_cache(case)), table, lengths)


def _in_pages(dense: torch.Tensor, places: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    pages = torch.empty(shape, dtype=dense.dtype, device=dense.device)
    pages[places] = dense.transpose(1, 2).reshape(shape)
    return pages


# Ours


def cache_dense(case: CacheCase) -> Call:
    """The kernels of caches on a dense one."""
    flashmsa = candidates._import_ours()
    q, (k, v) = queries(case), (x.transpose(1, 2) for x in dense_cache(case))
    return lambda: flashmsa.paged_attention(q, k, v, None, None, backend=candidates._backend())


def cache_attention(case: CacheCase) -> Call:
    """The call to `attention`, which chooses by itself."""
    flashmsa = candidates._import_ours()
    q, (k, v) = queries(case), dense_cache(case)
    mask = flashmsa.Causal() if case.len_q > 1 else None
    return lambda: flashmsa.attention(q, k, v, mask=mask, backend=candidates._backend())


def cache_paged(case: CacheCase, page: int, **options: Any) -> Call:
    flashmsa = candidates._import_ours()
    q, pages = queries(case), pool(case, page)
    options["backend"] = candidates._backend()
    return lambda: flashmsa.paged_attention(q, pages.k, pages.v, pages.table, pages.lengths, **options)


def cache_quarter(case: CacheCase) -> Call:
    """Each sequence's queries see a quarter of its pages, drawn anew for each."""
    count = case.length // CHOSEN_PAGE
    generator = torch.Generator(settings.device).manual_seed(4)
    draws = torch.rand(case.batch, 1, count, generator=generator, device=settings.device)
    chosen = draws.argsort(-1)[..., : round(CHOSEN * count)].int().contiguous()
    return cache_paged(case, CHOSEN_PAGE, query_pages=chosen)


def gather(case: CacheCase, page: int) -> Call:
    flashmsa = candidates._import_ours()
    pages = pool(case, page)
    return lambda: flashmsa.gather_pages(pages.k, pages.v, pages.table, pages.lengths)


# What stands beside


def cache_cudnn(case: CacheCase) -> Call:
    if case.len_q > 1:
        raise Unavailable("SDPA aligns a causal mask at the first key")
    q, (k, v) = queries(case), dense_cache(case)

    def call() -> torch.Tensor:
        with candidates._pin("cudnn"):
            return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return call


def copy(case: CacheCase) -> Call:
    """K and V copied by the device."""
    source = dense_cache(case)
    target = [torch.empty_like(x) for x in source]
    return lambda: [to.copy_(x) for to, x in zip(target, source, strict=True)]


@cache
def _read_kernel() -> Any:
    try:
        return torch.cuda._compile_kernel(_READ_SOURCE, "plain_read")
    except (RuntimeError, OSError, AttributeError) as error:  # a private function of torch
        raise Unavailable(f"the plain read does not compile: {error}") from error


def plain_read(case: CacheCase) -> Call:
    """As many bytes as K and V have, read once by a kernel that does nothing else."""
    data = torch.ones(case.bytes // 16, 4, dtype=torch.int32, device=settings.device)
    if settings.device != "cuda":
        return lambda: data.sum()
    kernel, sink = _read_kernel(), torch.zeros(1, dtype=torch.int32, device=settings.device)
    grid = (4 * torch.cuda.get_device_properties().multi_processor_count, 1, 1)
    return lambda: kernel(grid=grid, block=(512, 1, 1), args=[data, data.shape[0], sink])


def release() -> None:
    """Drops the cached inputs."""
    queries.cache_clear()
    _dense_cache.cache_clear()


FACTORIES |= {
    "flashmsa-cache-dense": cache_dense,
    "flashmsa-cache-attention": cache_attention,
    "flashmsa-cache-quarter": cache_quarter,
    "cudnn-cache": cache_cudnn,
    "copy": copy,
    "plain-read": plain_read,
}
FACTORIES |= {f"flashmsa-cache-page{page}": partial(cache_paged, page=page) for page in PAGES}
FACTORIES |= {f"flashmsa-gather-page{page}": partial(gather, page=page) for page in (64, 16)}
