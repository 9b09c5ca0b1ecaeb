"""Safetensors files in a few lines, for the tests of the command line. Shares nothing with the program under test."""
import json
import struct

import numpy as np

# BF16 and F8_E4M3 have no numpy type; they are handled as their bits.
TYPES = {"U8": np.uint8, "I8": np.int8, "F8_E4M3": np.uint8, "BF16": np.uint16, "F16": np.uint16, "I32": np.int32, "I64": np.int64,
         "F64": np.float64, "F32": np.float32}


def write(path, tensors, metadata=None):
    """tensors: {name: (dtype name, array)}, stored in that order without padding."""
    header, offset = {}, 0
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, array) in tensors.items():
        assert array.dtype == TYPES[dtype], name
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def read(path):
    """Returns {name: (dtype name, array)} and the metadata."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        array = np.frombuffer(data[begin:end], TYPES[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = (entry["dtype"], array)
    return tensors, metadata


def bf16_bits(values):
    """Nearest even; for finite values."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_values(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
