"""Distilling on tiny random models: what is learnt, what stays untouched, what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config

from pipeline import distill
from pipeline.checkpoint import random_llama
from pipeline.config import Distill
from pipeline.measure.setup import end_ids

RECIPE = Distill(
    layers=[0, -1],
    prompts_per_category=4,
    held_out_per_category=2,
    answer_tokens=12,
    answer_batch_size=3,
    steps=40,
    batch_size=4,
    learning_rate=3e-3,
    temperature=1.0,
    vocab=None,
    prompt_weight=0.0,
    prompt_tokens=None,
    train_embedding=False,
    time_budget_s=60.0,
)
END = 5
ALL = torch.arange(300)


def tiny(**changed: Any) -> LlamaConfig:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    plain = {"vocab_size": 300, "num_hidden_layers": 3, "initializer_range": 0.2, "tie_word_embeddings": True}
    ends = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": END}
    return LlamaConfig(**{**shape, **plain, **ends, "max_position_embeddings": 128, **changed})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target as its folder: 3 layers in bfloat16, a byte-level tokenizer."""
    where = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    LlamaForCausalLM(tiny()).to(torch.bfloat16).save_pretrained(where)
    random_llama.make_tokenizer(300, 128).save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def target(folder):
    return distill.load_target(folder, "cpu")


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [9, 4, 14, 7, 11, 5, 8, 6]
    ids = [torch.randint(6, 300, (n,), generator=generator).tolist() for n in lengths]
    return [{"category": ["code", "prose"][i % 2], "input_ids": p} for i, p in enumerate(ids)]


@pytest.fixture(scope="module")
def answers(folder, prompts):
    speaker = distill.load_speaker(folder, "cpu", torch.float32)
    return distill.answer(speaker, frozenset([END]), prompts, RECIPE.answer_tokens, RECIPE.answer_batch_size)


def greedy(target, prompt: list[int], count: int) -> list[int]:
    """One token after the other, without batch, padding or cache."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count and not (len(ids) > len(prompt) and ids[-1] == END):
        ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


def test_answers_are_the_greedy_ones_and_hidden_states_give_the_logits(target, prompts, answers):
    for prompt, a in zip(prompts, answers, strict=True):
        assert a.ids_S.tolist() == greedy(target, prompt["input_ids"], RECIPE.answer_tokens)
        assert (a.prompt_tokens, a.category) == (len(prompt["input_ids"]), prompt["category"])
        logits_SV = target(a.ids_S[None, :-1]).logits[0]
        torch.testing.assert_close(target.lm_head(a.hidden_SD.float()), logits_SV, rtol=5e-3, atol=5e-3)  # kept as fp16


def test_answers_stop_at_the_end_token_and_ignore_the_folders_own_sampling(target, folder, tmp_path, prompts):
    first = greedy(target, prompts[0]["input_ids"], 4)
    settings = {"eos_token_id": [first[-1], END], "do_sample": True, "repetition_penalty": 9.0, "temperature": 2.0}
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    speaker = distill.load_speaker(tmp_path, "cpu", torch.float32)
    (answer,) = distill.answer(speaker, frozenset(end_ids(tmp_path)), prompts[:1], 12, 1)
    end = first.index(first[-1], len(prompts[0]["input_ids"]))
    assert answer.ids_S.tolist() == first[: end + 1]


def test_training_lowers_the_kl_raises_agreement_and_leaves_the_embedding(target, answers):
    draft, head_VD = distill.take_layers(target, RECIPE.layers), target.lm_head.weight
    map_DD = distill.fitted_map(draft, answers, RECIPE.prompt_weight)
    distill.fold(draft, map_DD, head_VD)
    before, loss_before = distill.agreement(draft, ALL, answers), reference_kl(target, draft, answers)
    done = distill.train(draft, map_DD, head_VD, ALL, answers, RECIPE, seed=0)
    distill.fold(draft, map_DD, head_VD)
    after, loss_after = distill.agreement(draft, ALL, answers), reference_kl(target, draft, answers)
    assert loss_after < 0.5 * loss_before
    assert after["value"] > before["value"] + 0.2
    assert after["tokens"] == sum(len(a.ids_S) - a.prompt_tokens for a in answers)
    assert torch.equal(draft.get_input_embeddings().weight, target.get_input_embeddings().weight)
    assert not any(p.requires_grad for p in draft.parameters())
    assert (done["steps"], done["vocab"]) == (40, 300)
    curve = done["loss_curve"]
    assert curve[-1]["step"] == 40 and curve[-1]["kl_nats"] < 0.5 * curve[0]["kl_nats"]
    assert done["trainable_parameters"] == sum(p.numel() for p in draft.parameters()) - 2 * 300 * 32 + 32 * 32


@torch.no_grad()
@pytest.mark.parametrize("prompt_weight", [0.0, 0.3])
def test_fitted_map_is_the_weighted_least_squares_solution_and_says_more_than_the_head_it_replaces(
    target, answers, prompt_weight
):
    draft = distill.take_layers(target, RECIPE.layers)
    map_DD = distill.fitted_map(draft, answers, prompt_weight)
    rows, due, weights = [], [], []
    for a in answers:
        rows.append(draft.model(a.ids_S[None, :-1]).last_hidden_state[0].double())
        due.append(a.hidden_SD.double())
        weights += [prompt_weight] * a.first + [1.0] * (len(a.hidden_SD) - a.first)
    x_ND, y_ND, root_N1 = torch.cat(rows), torch.cat(due), torch.tensor(weights, dtype=torch.float64).sqrt()[:, None]
    ridge_DD = (distill.RIDGE * (root_N1 * x_ND).square().sum(0).mean()).sqrt() * torch.eye(32, dtype=torch.float64)
    rows_ND = torch.cat([root_N1 * x_ND, ridge_DD])
    solution = torch.linalg.lstsq(rows_ND, torch.cat([root_N1 * y_ND, torch.zeros(32, 32, dtype=torch.float64)]))
    torch.testing.assert_close(map_DD.double(), solution.solution, rtol=1e-4, atol=1e-5)
    before = reference_kl(target, draft, answers)
    distill.fold(draft, map_DD, target.lm_head.weight)
    assert reference_kl(target, draft, answers) < before


@torch.no_grad()
def test_folding_gives_the_logits_of_the_map_and_the_targets_head(target, answers):
    draft, map_DD = distill.take_layers(target, [1]), torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
    hidden_SD = draft.model(answers[0].ids_S[None]).last_hidden_state[0]
    distill.fold(draft, map_DD, target.lm_head.weight)
    due_SV = hidden_SD.double() @ map_DD.double() @ target.lm_head.weight.double().T
    torch.testing.assert_close(draft(answers[0].ids_S[None]).logits[0].double(), due_SV, rtol=1e-4, atol=1e-4)


def reference_kl(target, draft, answers) -> float:
    """KL(target || draft) of the positions that predict answers, in float64, one position after the other."""
    total = []
    for a in answers:
        with torch.no_grad():
            p, q = (m(a.ids_S[None, :-1]).logits[0].double().softmax(-1) for m in (target, draft))
        total += [float((p[i] * (p[i] / q[i]).log()).sum()) for i in range(a.prompt_tokens - 1, len(p))]
    return sum(total) / len(total)


def test_loss_is_the_kl_at_the_answers_positions_only(target, answers):
    draft = distill.take_layers(target, [1])
    ids_U = torch.arange(300)
    found = distill.batch_loss(draft, torch.eye(32), target.lm_head.weight, ids_U, answers[:3], RECIPE)
    assert found.item() == pytest.approx(reference_kl(target, draft, answers[:3]), rel=1e-3)


def test_without_the_beginning_of_a_prompt_the_target_still_predicts_the_same(answers):
    whole = answers[0]
    assert whole.prompt_tokens > 4
    short = whole.without_beginning(4)
    assert short.ids_S.tolist() == whole.ids_S[whole.prompt_tokens - 4 :].tolist()
    assert torch.equal(short.hidden_SD[short.first :], whole.hidden_SD[whole.first :])
    assert len(short.hidden_SD) == len(short.ids_S) - 1
    for as_it_is in (None, whole.prompt_tokens, whole.prompt_tokens + 1):
        assert whole.without_beginning(as_it_is) == whole


def test_training_reads_the_end_of_each_prompt_only(target, answers):
    draft = distill.take_layers(target, RECIPE.layers)
    recipe = dataclasses.replace(RECIPE, steps=1, batch_size=len(answers), prompt_tokens=1)
    found = distill.train(draft, torch.eye(32), target.lm_head.weight, ALL, answers, recipe, seed=0)
    assert found["tokens"] == sum(len(a.ids_S) - a.prompt_tokens for a in answers)


def test_likely_ids_are_those_with_most_mass(target, answers):
    ids_U = distill.likely_ids(target.lm_head.weight, answers, 20)
    mass_V = sum(
        target(a.ids_S[None, :-1]).logits[0, a.prompt_tokens - 1 :].double().softmax(-1).sum(0) for a in answers
    )
    outside = [i for i in range(300) if i not in ids_U.tolist()]
    assert len(ids_U) == 20 and ids_U.tolist() == sorted(ids_U.tolist())
    assert mass_V[ids_U].min() > mass_V[outside].max() * 0.99


def test_same_seed_gives_the_same_bytes_and_another_seed_others(target, folder, answers, tmp_path):
    def made(seed: int, where: Path) -> bytes:
        draft = distill.take_layers(target, RECIPE.layers)
        map_DD = distill.fitted_map(draft, answers, RECIPE.prompt_weight)
        recipe = dataclasses.replace(RECIPE, steps=3)
        distill.train(draft, map_DD, target.lm_head.weight, ALL, answers, recipe, seed)
        distill.fold(draft, map_DD, target.lm_head.weight)
        distill.write(draft, folder, torch.bfloat16, where)
        return (where / "model.safetensors").read_bytes()

    torch.manual_seed(123)
    first = made(1, tmp_path / "a")
    torch.manual_seed(456)
    assert made(1, tmp_path / "b") == first
    assert made(2, tmp_path / "c") != first


def test_written_folder_loads_with_its_own_head_and_the_targets_tokenizer(target, folder, tmp_path):
    draft = distill.take_layers(target, [2, 0])
    distill.fold(draft, 2 * torch.eye(32), target.lm_head.weight)
    distill.write(draft, folder, torch.bfloat16, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.num_hidden_layers == 2 and loaded.dtype == torch.bfloat16
    assert not loaded.config.tie_word_embeddings
    assert torch.equal(loaded.lm_head.weight, 2 * loaded.model.embed_tokens.weight)
    original = AutoModelForCausalLM.from_pretrained(folder)
    for mine, its in ((0, 2), (1, 0)):
        its_tensors = original.model.layers[its].state_dict()
        assert all(torch.equal(t, its_tensors[n]) for n, t in loaded.model.layers[mine].state_dict().items())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_layers_of_all_of_the_target_are_the_target(target, answers):
    assert distill.agreement(distill.take_layers(target, [0, 1, 2]), ALL, answers)["value"] == 1.0


def test_layer_types_follow_the_layers():
    types = ["full_attention", "sliding_attention", "full_attention"]
    shape = {**tiny().to_dict(), "layer_types": types, "use_sliding_window": True, "sliding_window": 16}
    shape.pop("model_type")
    draft = distill.take_layers(AutoModelForCausalLM.from_config(Qwen2Config(**shape)), [2, 1])
    assert draft.config.layer_types == ["full_attention", "sliding_attention"]


def test_time_budget_stops_training_and_says_so(target, answers):
    draft = distill.take_layers(target, [0])
    recipe = dataclasses.replace(RECIPE, steps=10**6, time_budget_s=0.3)
    done = distill.train(draft, torch.eye(32), target.lm_head.weight, ALL, answers, recipe, seed=0)
    assert 0 < done["steps"] < 10**6 == done["steps_asked"]


@pytest.mark.parametrize("layers", [[0, 3], [-4], []])
def test_layers_that_are_not_there_are_refused(target, layers):
    with pytest.raises(
        distill.DistillError, match=r"draft.distill.layers: .* has 3 layers; give at least one of -3..2"
    ):
        distill.take_layers(target, layers)


def test_other_architectures_are_refused_by_name(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=8))
    with pytest.raises(distill.DistillError, match="GPT2LMHeadModel does not have"):
        distill.take_layers(model, [0])
    model.save_pretrained(tmp_path)
    with pytest.raises(distill.DistillError, match=r"lean engine, and GPT2LMHeadModel is not one of.*draft=ngram"):
        distill.load_speaker(tmp_path, "cpu", torch.float32)


def test_what_the_draft_cannot_say_is_a_miss(target, answers):
    whole = distill.take_layers(target, [0, 1, 2])
    said = sorted({i for a in answers for i in a.ids_S[a.prompt_tokens :].tolist()})
    found = distill.agreement(whole, torch.tensor(said[1:]), answers)
    missing = sum(a.ids_S[a.prompt_tokens :].tolist().count(said[0]) for a in answers)
    assert missing and found["value"] == pytest.approx(1 - missing / found["tokens"])


def test_prompts_without_the_split_are_refused(tmp_path):
    rows = [{"split": "evaluation", "category": c, "input_ids": [1]} for c in ("code", "code", "prose")]
    assert len(distill.choose(rows, "evaluation", 1, tmp_path)) == 2
    with pytest.raises(distill.DistillError, match=r"no prompt is in the calibration split, .*draft=ngram"):
        distill.choose(rows, "calibration", 1, tmp_path)
