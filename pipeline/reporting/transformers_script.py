"""reports/serve/transformers_generate.py: a script of a dozen lines that answers a prompt with the choice."""

from __future__ import annotations

import json
from typing import Any

from pipeline.reporting.deployment import FULL, Deployment, Weights, unlike_measured
from pipeline.reporting.study import Study

PACKED_FORMATS = ("gptq", "awq")  # transformers reads these through gptqmodel
DEFAULT_PROMPT = "Say in one sentence what a checksum is for."


def render(study: Study, chosen: Deployment) -> str:
    """A script that answers one prompt; formatted as `ruff format` leaves it."""
    weights = [w for w in (chosen.target, chosen.draft) if w]
    packed = any(w.format in PACKED_FORMATS for w in weights)
    parts = [
        _heading(study, chosen, weights),
        _imports(packed),
        *([PACKED_LOADER] if packed else []),
        _body(study, chosen),
    ]
    return "\n".join(parts)


def _heading(study: Study, chosen: Deployment, weights: list[Weights]) -> str:
    notes = ["", 'From the repository\'s root: python reports/serve/transformers_generate.py "PROMPT"']
    notes += unlike_measured(study, chosen)
    if any(w.format in PACKED_FORMATS for w in weights):
        notes += [
            "transformers runs this format in 4 bits through gptqmodel and optimum, which in practice need a GPU.",
            "Without them the same weights are made dense: right answers anywhere, full-precision memory and speed.",
        ]
    elif any(w.format != FULL for w in weights):
        notes += ["transformers makes these packed weights dense when it loads them: right answers, no gain in speed."]
    return "\n".join([f'"""{chosen.subject}.', *notes, '"""', ""])


def _imports(packed: bool) -> str:
    if not packed:
        return "import sys\n\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
    return (
        "import sys\nfrom importlib.util import find_spec\nfrom pathlib import Path\n\n"
        "import transformers\n"
        "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig\n\n"
        "from pipeline.checkpoint.packed import dequantize\nfrom pipeline.checkpoint.read import read\n"
    )


PACKED_LOADER = """
def load(folder, **options):
    checkpoint = read(Path(folder))
    if find_spec("gptqmodel") or not checkpoint.linears:
        return AutoModelForCausalLM.from_pretrained(folder, **options)
    weights = dict(checkpoint.tensors)
    for name, layer in checkpoint.linears.items():
        weights[f"{name}.weight"] = dequantize(layer)
        weights |= {} if layer.bias_N is None else {f"{name}.bias": layer.bias_N}
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    architecture = getattr(transformers, config.architectures[0])
    model = architecture.from_pretrained(None, config=config, state_dict=weights, **options)
    if (Path(folder) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model

"""


def _body(study: Study, chosen: Deployment) -> str:
    config = study.config
    packed = [w for w in (chosen.target, chosen.draft) if w and w.format in PACKED_FORMATS]
    load = "load" if packed else "AutoModelForCausalLM.from_pretrained"
    options = {"dtype": config.runtime.dtype, "device_map": config.runtime.device}
    trust = {"trust_remote_code": True} if config.model.trust_remote_code else {}
    lines = [
        f'prompt = sys.argv[1] if len(sys.argv) > 1 else "{DEFAULT_PROMPT}"',
        f"tokenizer = AutoTokenizer.from_pretrained({_call(chosen.target.folder, **trust)})",
        f"model = {load}({_call(chosen.target.folder, **options, **trust)})",
    ]
    generation: dict[str, Any] = {"max_new_tokens": config.benchmark.max_new_tokens, **_sampling(study)}
    extra = ""
    if chosen.draft:
        constant = {
            "num_assistant_tokens": chosen.row.draft_len,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
        lines += [f"draft = {load}({_call(chosen.draft.folder, **options, **trust)})"]
        lines += [f"draft.generation_config.{name} = {_literal(value)}" for name, value in constant.items()]
        extra = "assistant_model=draft, "
    elif chosen.ngram_max is not None:
        generation |= {"prompt_lookup_num_tokens": chosen.row.draft_len, "max_matching_ngram_size": chosen.ngram_max}
    lines += [
        *_encoding(study),
        f"answer = model.generate(**inputs, {extra}{_call(**generation)})",
        'print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]
    return "\n".join(lines) + "\n"


def _encoding(study: Study) -> list[str]:
    if not study.records.metrics("prompts")["chat_template"]:
        return ['inputs = tokenizer(prompt, return_tensors="pt").to(model.device)']
    return [
        'turns = [{"role": "user", "content": prompt}]',
        'chat = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}',
        "inputs = tokenizer.apply_chat_template(turns, **chat).to(model.device)",
    ]


def _sampling(study: Study) -> dict[str, Any]:
    sampling = study.config.speculate.sampling
    if sampling.temperature == 0:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or 0,
        "top_p": sampling.top_p,
    }


def _call(*values: Any, **named: Any) -> str:
    return ", ".join([*map(_literal, values), *(f"{name}={_literal(value)}" for name, value in named.items())])


def _literal(value: Any) -> str:
    """A Python literal, strings in double quotes."""
    return json.dumps(value) if isinstance(value, str) else repr(value)
