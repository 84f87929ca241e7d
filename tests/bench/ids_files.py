"""Files of random token ids, for measurements."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tensorrt_llm_ext.inputs import Fields

FIELDS = Fields(ids="ids")


def write_ids(path: Path, num_rows: int, length: int, vocab_size: int, seed: int = 0) -> None:
    """Write ``num_rows`` sequences of ``length`` ids as the extension says, .jsonl or .parquet; a seed gives the same ids in both."""
    ids = np.random.default_rng(seed).integers(3, vocab_size, size=(num_rows, length), dtype=np.int32)
    if path.suffix == ".parquet":
        offsets = np.arange(num_rows + 1, dtype=np.int32) * length
        pq.write_table(pa.table({"ids": pa.ListArray.from_arrays(offsets, ids.reshape(-1))}), path)
        return
    with open(path, "w", encoding="ascii") as file:
        file.writelines(json.dumps({"ids": row}) + "\n" for row in ids.tolist())
