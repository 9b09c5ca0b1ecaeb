#!/usr/bin/env python3
"""Saves a decode problem for `chiasma decode`, and checks the program's answer against chiasma.decode().

    python save_for_cli.py input.safetensors
    chiasma decode --input input.safetensors --output output.safetensors

or both at once, the answer read back:

    python save_for_cli.py input.safetensors --cli PATH_OF_CHIASMA --output output.safetensors

Exit status: 0 if the answers agree (or no --cli was given), 1 if they do not.
"""

import argparse
import subprocess
import sys

import torch
from safetensors.torch import load_file, save_file

import chiasma


def make_tensors():
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(8, 64, 576, generator=generator).bfloat16()
    return {
        "q": torch.randn(2, 1, 16, 576, generator=generator).bfloat16(),
        "kv_cache": chiasma.quantize(kv),
        "indices": torch.randint(0, 8 * 64, (2, 1, 100), generator=generator, dtype=torch.int32),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="file to write")
    parser.add_argument("--cli", help="path of the program chiasma; without it the file is only written")
    parser.add_argument("--output", default="output.safetensors", help="file that the program writes")
    options = parser.parse_args()

    tensors = make_tensors()
    save_file(tensors, options.input, metadata={"sm_scale": str(576**-0.5)})
    print("wrote", options.input)
    if not options.cli:
        return 0
    subprocess.run([options.cli, "decode", "--input", options.input, "--output", options.output], check=True)
    answer = load_file(options.output)
    out, lse = chiasma.decode(**tensors)
    # On the CPU the program runs the same kernel; on a GPU another one, which rounds elsewhere.
    difference = (answer["out"].float() - out.float()).norm() / out.float().norm()
    same_lse = torch.allclose(answer["lse"], lse, rtol=1e-3, atol=1e-3)
    print(f"the program's out differs by {difference:.2e}, its lse by {(answer['lse'] - lse).abs().max():.2e}")
    return 0 if difference <= 4e-3 and same_lse else 1


if __name__ == "__main__":
    sys.exit(main())
