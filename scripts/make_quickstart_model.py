"""Make the quickstart's model and data: `python scripts/make_quickstart_model.py --output DIR` (cached)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from miles_disagg.prompts.quickstart import main

if __name__ == "__main__":
    main()
