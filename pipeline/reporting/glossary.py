"""Words of the first screen that its table does not explain, each in one line."""

from __future__ import annotations

from pipeline.reporting import markdown
from pipeline.reporting.study import Study


def words(study: Study) -> str:
    greedy = study.config.speculate.sampling.temperature == 0
    lines = [
        "**target**: the model whose answers are wanted, here `base`, `gptq` or `awq`; **plain decoding**: one step of "
        "it for each token, no draft.",
        "**greedy**: the most likely token is always taken, so that an answer is not left to chance." if greedy else "",
        "**GPTQ**: rounds the weights column by column and lets those not yet rounded make up for the error.",
        "**AWQ**: scales up the weights of the inputs that matter most, so that plain rounding hurts them least.",
        "**block**: all rows answer the same prompts in turns, so that what slows the machine slows them alike.",
        "**noise floor**: how far apart two copies of the same row come out; no smaller difference is claimed.",
        "**natural**: answers end where the model ends them; **forced**: all at one set length.",
        "**nats**: the unit of KL, from natural logarithms: 1 nat = 1.44 bits.",
    ]
    return "Words:\n\n" + markdown.bullets([line for line in lines if line])
