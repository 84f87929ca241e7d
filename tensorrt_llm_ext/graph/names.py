"""The tensor names that an engine of ours and its runtime agree on. Outputs are named by ``Tap.column``."""

INPUT_IDS = "input_ids"  # [T]
POSITION_IDS = "position_ids"  # [T]
ATTENTION_ROWS = "attention_rows"  # [B, S]: padded slot -> packed row
PACKED_SLOTS = "packed_slots"  # [T]: packed row -> flat slot, b * S + position
LAST_TOKEN_IDS = "last_token_ids"  # [B]: inclusive prefix sum of the lengths; only with a `last` tap
SEQUENCE_LENGTHS = "sequence_lengths"  # [B]; only with a `mean` tap
HOST_LENGTHS = "host_context_lengths"  # [B], in host memory: the lengths again, for what is decided before a pass

MODEL_FILE = "model.onnx"
WEIGHTS_FILE = "weights.bin"

ROPE_COS = "rope_cos"
ROPE_SIN = "rope_sin"
