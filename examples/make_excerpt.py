#!/usr/bin/python3
"""Cuts real_activations.safetensors out of a larger file of the same layout.

usage: make_excerpt.py WHOLE.safetensors EXCERPT.safetensors

Takes one query token and the tokens it attends to most, puts these into a small paged cache in random order, together
with some that are not selected, and renumbers the indices. Needs numpy only.
"""
import json
import struct
import sys

import numpy as np

REQUEST, QUERY_TOKEN = 0, 1
NUM_SELECTED = 480
NUM_PAGES, PAGE = 8, 64
SEED = 20


def read(path):
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    dtypes = {"BF16": np.uint16, "I32": np.int32}
    tensors = {}
    metadata = header.pop("__metadata__")
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(data[begin:end], dtypes[entry["dtype"]]).reshape(entry["shape"])
    return tensors, metadata


def write(path, tensors, metadata):
    dtypes = {np.dtype(np.uint16): "BF16", np.dtype(np.int32): "I32"}
    header, offset = {"__metadata__": metadata}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": dtypes[values.dtype], "shape": values.shape, "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in tensors.values():
            file.write(values.tobytes())


def bf16_to_float(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def mean_probabilities(q, keys, sm_scale):
    scores = bf16_to_float(q) @ bf16_to_float(keys).T * sm_scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)


def main():
    whole, metadata = read(sys.argv[1])
    rows = whole["kv"].reshape(-1, whole["kv"].shape[-1])
    q = whole["q"][REQUEST, QUERY_TOKEN]
    slots = whole["indices"][REQUEST, QUERY_TOKEN]
    order = np.argsort(-mean_probabilities(q, rows[slots], float(metadata["sm_scale"])), kind="stable")
    kept = slots[order[: NUM_PAGES * PAGE]]  # the first NUM_SELECTED are selected, the rest fill the pages

    place = np.random.default_rng(SEED).permutation(NUM_PAGES * PAGE)  # slot of each kept token
    kv = np.empty((NUM_PAGES * PAGE, rows.shape[1]), np.uint16)
    kv[place] = rows[kept]
    indices = np.sort(place[:NUM_SELECTED]).astype(np.int32)
    write(
        sys.argv[2],
        {
            "kv": kv.reshape(NUM_PAGES, PAGE, -1),
            "q": q.reshape(1, 1, *q.shape),
            "indices": indices.reshape(1, 1, -1),
        },
        {"sm_scale": metadata["sm_scale"], "note": "excerpt of real activations, see examples/README.md"},
    )


if __name__ == "__main__":
    main()
