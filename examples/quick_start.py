"""Quantise a cache and decode one step over it, on the GPU if there is one."""

import torch

import chiasma

device = "cuda" if torch.cuda.is_available() else "cpu"
kv = torch.randn(64, 64, 576, dtype=torch.bfloat16, device=device)  # 64 pages of 64 tokens
q = torch.randn(2, 1, 16, 576, dtype=torch.bfloat16, device=device)  # 2 requests, 1 token, 16 heads
indices = torch.randint(64 * 64, (2, 1, 2048), dtype=torch.int32, device=device)  # what an indexer selected
cache = chiasma.quantize(kv)  # uint8 [64, 64, 656], as DeepSeek V3.2 keeps it
out, lse = chiasma.decode(q, cache, indices)
print(tuple(out.shape), tuple(lse.shape), "by", chiasma.plan(q, cache, indices).kernel)
