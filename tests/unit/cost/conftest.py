"""Makes `published_models.py`, the table of published models, importable from the tests beside it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
