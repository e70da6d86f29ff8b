"""Recommended: base, plain decoding.

From the repository's root: python reports/serve/transformers_generate.py "PROMPT"
Measured in the engine lean, with float32 activations, on cpu;
transformers computes in bfloat16 here, vLLM in its --dtype: other speeds, and at near ties other answers.
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

prompt = sys.argv[1] if len(sys.argv) > 1 else "Say in one sentence what a checksum is for."
tokenizer = AutoTokenizer.from_pretrained("artifacts/target")
model = AutoModelForCausalLM.from_pretrained("artifacts/target", dtype="bfloat16", device_map="cpu")
turns = [{"role": "user", "content": prompt}]
chat = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
inputs = tokenizer.apply_chat_template(turns, **chat).to(model.device)
answer = model.generate(**inputs, max_new_tokens=48, do_sample=False)
print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
