"""The header of a GGUF file to be written, as the package gguf writes it, and where tensors lie after it."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import numpy as np

from mxcli.files.gguf_file import ALIGNMENT
from mxcli.files.gguf_package import gguf_package
from mxcli.files.gguf_settings import QUANTIZATION_VERSION, Write
from mxcli.files.layouts.layout import Entry


def header_of(architecture: str, file_type: int, settings: Sequence[Write], entries: Sequence[Entry]) -> bytes:
    """The header of a file with these tensors in this order, padded to where the first one begins."""
    gguf = gguf_package()
    writer = gguf.GGUFWriter(None, architecture)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_file_type(file_type)
    writer.add_quantization_version(QUANTIZATION_VERSION)
    for write in settings:
        write(writer)
    for entry in entries:
        kind = gguf.GGMLQuantizationType[entry.block_type or entry.dtype]
        # The package takes the shape of bytes for a block type, and the shape of elements for any other.
        element = np.dtype(np.uint8 if entry.block_type else np.void)
        writer.add_tensor_info(entry.name, entry.shape or (1,), element, entry.nbytes, raw_dtype=kind)
    stream = BytesIO()
    writer.fout, writer.state = [stream], type(writer.state).EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    written = stream.getvalue()
    return written + bytes(-len(written) % ALIGNMENT)
