"""`python train_async.py --config FILE ...` is `miles-disagg train --config FILE ...`."""

import sys

from miles_disagg.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
