"""Print the three prompts whose vectors lie nearest to one prompt's: python demo/neighbours.py DATASET PROMPTS ID"""

import json
import sys

from tensorrt_llm_ext.store import open_vectors

dataset, prompts, request_id = sys.argv[1:]
with open(prompts, encoding="utf-8") as file:
    texts = {row["id"]: " ".join(row["text"].split()) for row in map(json.loads, file)}

vectors = open_vectors(dataset)
column = "final_post_last"
print(f"\nNearest to {request_id} by the cosine of {column}: {texts[request_id]}")
for neighbour in vectors.nearest(column, vectors.vector(request_id, column), k=4)[1:]:  # the first is the prompt itself
    print(f"  {1 - neighbour.distance:.3f}  {neighbour.request_id}  {texts[neighbour.request_id][:90]}")
