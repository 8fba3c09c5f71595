"""A bfloat16 GGUF for llama.cpp, with the very weights that the exported model has: both come from the
package's quantised GGUF.

    python -m benches.peers.to_gguf QUANTISED.gguf BFLOAT16.gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

# The writer writes these itself.
_OWN = ("GGUF.", "general.architecture", "general.quantization_version", "general.file_type")


def convert(source: Path, target: Path) -> None:
    """Matrices become bfloat16; vectors stay float32, as llama.cpp wants them."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_BF16))
    for name, field in reader.fields.items():
        if not name.startswith(_OWN):
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim > 1:
            bf16 = GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, bf16), raw_dtype=bf16)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    convert(options.source, options.target)


if __name__ == "__main__":
    main()
