import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))  # tests import toy_engines.py by name
