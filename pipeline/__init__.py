"""Which of {full precision, GPTQ, AWQ} x {plain, speculative decoding} to deploy on this machine, and how sure."""
