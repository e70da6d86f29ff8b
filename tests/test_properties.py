"""What holds for every input: config, readers of text, packed layouts, acceptance, and any damage to a checkpoint."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import random
import string
import tempfile
from pathlib import Path
from unittest import mock

import fuzz_checkpoints
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_fixtures import PARAMS

from pipeline import config, readers
from pipeline.checkpoint.awq import pack_awq, unpack_awq
from pipeline.engine.accept import accept_sampled
from pipeline.sources import SourceError

TREE = dataclasses.asdict(PARAMS)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


def places(value: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The path of every key, at any depth."""
    if not isinstance(value, dict):
        return [path]
    return [found for key, inner in value.items() for found in [(*path, key), *places(inner, (*path, key))]]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(set(places(TREE)))), st.integers(0, 64) | st.integers(0, 64).map(float) | JSON)
def test_any_value_at_any_key_is_taken_as_it_is_or_refused_by_name(path, value):
    tree = copy.deepcopy(TREE)
    *parents, leaf = path
    node = tree
    for key in parents:
        node = node[key]
    node[leaf] = value
    try:
        made = config.check(config.build(config.Params, tree))
    except config.ConfigError as e:
        assert "\n" not in str(e) and path[0] in str(e) and len(str(e)) < 1000
    else:
        found = dataclasses.asdict(made)
        assert found == tree
        for key in path:
            found = found[key]
        number = isinstance(found, float) and isinstance(value, int)
        assert type(found) is type(value) or number, "nothing is converted but an integer where a number is due"


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=300) | st.text(alphabet="a:[]{}-&*!|>\"'\n\t ?,#", max_size=60))
def test_any_text_for_params_is_refused_in_one_line(text):
    with pytest.raises(config.ConfigError) as e:
        config.parse(text, Path("params.yaml"))
    assert "\n" not in str(e.value) and len(str(e.value)) < 1000


def test_params_come_back_from_their_own_text():
    assert config.parse(yaml.safe_dump(TREE), Path("params.yaml")) == PARAMS


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=string.ascii_letters + string.digits, min_size=8, max_size=30), st.text(max_size=40))
def test_a_secret_of_the_environment_is_cut_out_wherever_it_stands(secret, around):
    with mock.patch.dict("os.environ", {"SOME_TOKEN": secret}):
        assert secret not in config.redacted(f"{around}{secret}{around}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("any")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=200) | st.text(max_size=100).map(str.encode), suffix=st.sampled_from(["", ".gz"]))
@pytest.mark.parametrize("reader", sorted(readers.READERS))
def test_any_bytes_are_documents_or_refused_by_file(folder, reader, raw, suffix):
    path = folder / f"a_gut.jsonl{suffix}"
    path.write_bytes(raw)
    try:
        found = list(readers.READERS[reader].read([path], "text"))
    except SourceError as e:
        assert str(path) in str(e) and "\n" not in str(e)
    else:
        assert all(isinstance(d.text, str) and isinstance(d.id, str) for d in found)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(["text", "task_id", "prompt", "canonical_solution", "x"]), JSON)))
@pytest.mark.parametrize("reader", ["rows", "humaneval"])
def test_any_rows_are_documents_or_refused_by_file(folder, reader, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        found = list(readers.READERS[reader].read([path], "text"))
    except SourceError as e:
        assert str(path) in str(e) and "\n" not in str(e)
    else:
        assert len(found) == len(rows)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), max_size=5))
def test_texts_come_back_from_jsonl_as_they_were(folder, texts):
    """Whatever separates lines in Unicode, only a line feed separates rows."""
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts), "utf-8", newline="\n")
    assert [d.text for d in readers.READERS["rows"].read([path], "text")] == texts


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32))
def test_awq_packing_and_unpacking_are_inverse(rows, words, seed):
    generator = torch.Generator().manual_seed(seed)
    codes_RN = torch.randint(0, 16, (rows, 8 * words), dtype=torch.uint8, generator=generator)
    words_RW = torch.randint(-(2**31), 2**31, (rows, words), generator=generator).int()
    assert torch.equal(unpack_awq(pack_awq(codes_RN)), codes_RN)
    assert torch.equal(pack_awq(unpack_awq(words_RW)), words_RW)


def simplex(size: int) -> st.SearchStrategy[torch.Tensor]:
    """Distributions over `size` tokens in 64ths, zeros among them: exact in float32."""
    cuts = st.lists(st.integers(0, 64), min_size=size - 1, max_size=size - 1).map(sorted)
    return cuts.map(lambda c: torch.tensor([b - a for a, b in itertools.pairwise([0, *c, 64])]) / 64)


@settings(max_examples=300, deadline=None)
@given(simplex(4), simplex(4))
def test_one_drafted_token_leaves_exactly_the_targets_distribution(q_V, p_V):
    """Summed over what may be drafted and over the uniform: kept with min(1, p / q), else drawn from the residual."""
    emitted_V = torch.zeros(4, dtype=torch.float64)
    for token in q_V.nonzero()[:, 0].tolist():
        kept = min(1.0, float(p_V[token] / q_V[token]))
        for uniform, share in ((kept * (1 - 1e-6), kept), (kept + 1e-6, 1 - kept)):
            if share == 0 or uniform >= 1:
                continue
            with mock.patch("torch.multinomial", return_value=0) as drawn:
                accepted, _ = accept_sampled(
                    torch.tensor([token]), q_V[None], torch.stack([p_V, p_V]), torch.tensor([uniform]), None
                )
            residual_V = drawn.call_args.args[0].double()
            outcome_V = torch.nn.functional.one_hot(torch.tensor(token), 4).double() if accepted else residual_V
            emitted_V += float(q_V[token]) * share * outcome_V
    assert torch.allclose(emitted_V, p_V.double(), atol=1e-5)


SEEDS: list[bytes] = []


@settings(max_examples=200, deadline=None)
@given(number=st.integers(0, len(fuzz_checkpoints.FORMATS) - 1), changes=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_any_damage_to_a_checkpoint_is_read_or_refused_in_one_line(number, changes, seed):
    """The short form of `python -m tests.fuzz_checkpoints`: odd values in the settings and headers, flipped bytes."""
    SEEDS.extend([] if SEEDS else fuzz_checkpoints.seeds())
    generator = random.Random(seed)
    parts = fuzz_checkpoints.divided(SEEDS[number])
    for _ in range(changes):
        which = generator.randrange(len(parts))
        if which < 2 and generator.random() < 0.7:
            with_odd_value = fuzz_checkpoints.spoilt(json.loads(parts[which]), generator)
            parts[which] = json.dumps(with_odd_value).encode()
        elif parts[which]:
            place = generator.randrange(len(parts[which]))
            flipped = bytes([parts[which][place] ^ (1 << generator.randrange(7))])
            parts[which] = parts[which][:place] + flipped + parts[which][place + 1 :]
            break  # bytes may no longer be JSON
    with tempfile.TemporaryDirectory() as at:
        fuzz_checkpoints.execute(fuzz_checkpoints.joined(parts), Path(at))
