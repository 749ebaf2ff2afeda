"""In-place activation, the engine's side: what a stock SGLang server loads, and where it lies.

`miles_inplace` below is a package of its own: SGLang imports it by that name from `PLUGIN_PATH`, in an environment that
has nothing of ours, so it imports nothing but torch, numpy and the standard library. The replica's side, which decides
and asks, is `replica.inplace`.
"""

from pathlib import Path

PLUGIN_PATH = Path(__file__).parent
HOOK = "miles_inplace.apply"
