#!/usr/bin/env python3
"""A server's decode loop in small: append each new token to a paged FP8 cache, select tokens, attend to them.

One attention layer with DeepSeek's geometry and random weights, the up-projections absorbed into the query and the
output, as serving engines do. At each step the result is held against attention in float64 over the same selected
tokens, as they were before quantisation: what is seen is the price of FP8, and it must stay below a bound.

    python decode_loop.py --device cpu
    python decode_loop.py --device cuda --steps 256 --heads 128 --topk 2048

Exit status: 0 if every step was within the bound, 1 if not.
"""

import argparse
import sys

import torch

import chiasma

LATENT, ROPE, NOPE_HEAD, V_HEAD = 512, 64, 128, 128
PAGE = 64
# Relative L2 error of a step's output. e4m3 keeps 4 significant bits, which costs a number up to 1/16 and 1/38 on
# average (root mean square); attention over few tokens averages little of it.
BOUND = 6e-2


class AttentionLayer:
    """Random weights. Token states of width `hidden` go in and come out."""

    def __init__(self, heads, hidden, device, generator):
        def weight(*shape):
            return torch.randn(*shape, generator=generator).to(device) * shape[-1] ** -0.5

        self.heads = heads
        self.sm_scale = (NOPE_HEAD + ROPE) ** -0.5
        self.to_latent = weight(LATENT, hidden)
        self.to_rope_key = weight(ROPE, hidden)
        self.to_query = weight(heads, NOPE_HEAD + ROPE, hidden)
        self.key_up = weight(heads, NOPE_HEAD, LATENT)  # latent -> key of a head
        self.value_up = weight(heads, V_HEAD, LATENT)  # latent -> value of a head
        self.to_hidden = weight(hidden, heads * V_HEAD)

    def rotate(self, values, positions):
        """Rotary embedding of values [tokens, ..., 64]."""
        frequencies = 10000.0 ** -(torch.arange(0, ROPE, 2, device=values.device) / ROPE)
        angles = positions.to(values.device).float().view(-1, *[1] * (values.dim() - 1)) * frequencies
        even, odd = values[..., ::2], values[..., 1::2]
        turned = torch.stack([even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1)
        return turned.flatten(-2)

    def cache_rows(self, states, positions):
        """What the cache keeps of each token: the normalised latent, and the rotary key."""
        latent = torch.nn.functional.rms_norm(states @ self.to_latent.T, (LATENT,))
        return latent.bfloat16(), self.rotate(states @ self.to_rope_key.T, positions).bfloat16()

    def queries(self, states, positions):
        """The pair that decode() takes: queries in latent space [tokens, heads, 512], and their rotary part."""
        query = torch.einsum("hdx,tx->thd", self.to_query, states)
        absorbed = torch.einsum("thd,hdl->thl", query[..., :NOPE_HEAD], self.key_up)
        return absorbed.bfloat16(), self.rotate(query[..., NOPE_HEAD:], positions).bfloat16()

    def output(self, attended):
        values = torch.einsum("thl,hvl->thv", attended.float(), self.value_up)
        return values.flatten(1) @ self.to_hidden.T


def select(query_pair, rows, topk):
    """A simple stand-in for an indexer: the topk tokens by the score of the mean query."""
    query = torch.cat(query_pair, -1).float().mean(1)  # [b, 576]
    scores = torch.einsum("bd,bnd->bn", query, rows.float())
    return scores.topk(min(topk, rows.shape[1])).indices


def full_precision(query_pair, rows, chosen, sm_scale):
    """Float64 attention over the chosen tokens, as they were before quantisation."""
    keys = torch.gather(rows, 1, chosen[..., None].expand(-1, -1, rows.shape[-1])).double()
    scores = torch.einsum("bhd,bnd->bhn", torch.cat(query_pair, -1).double(), keys) * sm_scale
    return torch.einsum("bhn,bnl->bhl", scores.softmax(-1), keys[..., :LATENT])


def relative_error(value, reference):
    return ((value.double() - reference).norm() / reference.norm()).item()


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2, help="requests")
    parser.add_argument("--heads", type=int, default=16, help="1 to 128")
    parser.add_argument("--topk", type=int, default=96, help="tokens that each step attends to")
    parser.add_argument("--prompt", type=int, default=128, help="tokens that stand in the cache at the start")
    parser.add_argument("--hidden", type=int, default=512, help="width of a token's state")
    return parser.parse_args()


def main():
    options = parse_options()
    torch.set_grad_enabled(False)
    generator = torch.Generator().manual_seed(0)
    device, batch = torch.device(options.device), options.batch
    layer = AttentionLayer(options.heads, options.hidden, device, generator)

    pages = -(-(options.prompt + options.steps) // PAGE)  # of each request; dealt out in a random order
    block_table = torch.randperm(batch * pages, generator=generator).view(batch, pages).int().to(device)
    cache = torch.zeros(batch * pages, PAGE, LATENT + 16 + 2 * ROPE, dtype=torch.uint8, device=device)
    kept = torch.zeros(batch, 0, LATENT + ROPE, dtype=torch.bfloat16, device=device)  # for the comparison alone

    def append(states, first):
        """states [batch, n, hidden] become tokens first, first + 1, ... of their requests."""
        nonlocal kept
        n = states.shape[1]
        positions = torch.arange(first, first + n, device=device)
        latent, rope = layer.cache_rows(states.flatten(0, 1), positions.repeat(batch))
        slots = chiasma.translate_indices(positions.expand(batch, n), block_table, page=PAGE)
        chiasma.quantize_and_append(latent, rope, cache, slots.long().flatten())
        kept = torch.cat([kept, torch.cat([latent, rope], -1).view(batch, n, -1)], 1)

    append(torch.randn(batch, options.prompt, options.hidden, generator=generator).to(device), 0)
    state = torch.randn(batch, options.hidden, generator=generator).to(device)
    worst = 0.0
    for step in range(options.steps):
        position = options.prompt + step
        append(state[:, None], position)
        query_pair = layer.queries(state, torch.full((batch,), position))
        chosen = select(query_pair, kept, options.topk)
        indices = chiasma.translate_indices(chosen, block_table, page=PAGE)
        out, _ = chiasma.decode(query_pair, cache, indices, sm_scale=layer.sm_scale)

        error = relative_error(out, full_precision(query_pair, kept, chosen, layer.sm_scale))
        worst = max(worst, error)
        if not error <= BOUND:
            print(f"step {step}: relative error {error:.3g}, more than {BOUND}", file=sys.stderr)
            return 1
        noise = torch.randn(state.shape, generator=generator).to(device)  # in place of the rest of the model
        state = torch.nn.functional.rms_norm(state + layer.output(out) + noise, (options.hidden,))
    print(f"{options.steps} steps on {device}, {options.heads} heads: relative error <= {worst:.2e}, bound {BOUND}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
