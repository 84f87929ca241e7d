"""``python -m tensorrt_llm_ext.cli``: the command where its script is not on the path."""

from tensorrt_llm_ext.cli import main

main(prog_name="trtllm-extract")
