"""`python -m pipeline.sweep --multirun KEY=a,b ...`: stages of dvc.yaml again, with other settings, beside the results.

Each job composes its own config from conf/. Of the stages named in `sweep.stages`, it runs those whose parameters
differ from params.yaml, and those that read what these write; other inputs are the workspace's own. Outputs go to the
job's folder, so nothing in artifacts/ or reports/ changes. `dvc repro` stays the way to results that are kept.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from pipeline import config, provenance
from pipeline.__main__ import one_line, run_stage
from pipeline.measure.memory import allocation_failure

ROOT = Path.cwd()
CONF = Path(__file__).parents[1] / "conf"
FAILED: list[Path] = []

OmegaConf.register_new_resolver("process", lambda: str(os.getpid()), replace=True)  # in conf/: a folder of one's own


@dataclass
class GraphStage:
    """A stage of dvc.yaml: its name (STAGE or STAGE@KEY), paths by argument name, outputs, and parameter keys."""

    name: str
    paths: dict[str, Path]
    outs: set[Path]
    params: list[str]


def read_graph(root: Path) -> list[GraphStage]:
    """The stages of `root`/dvc.yaml in the order of their dependencies."""
    import networkx
    from dvc.repo import Repo

    with Repo(str(root)) as repo:
        ordered = list(networkx.topological_sort(repo.index.graph.reverse(copy=True)))
        return [_graph_stage(stage, root) for stage in ordered]


def _graph_stage(stage: Any, root: Path) -> GraphStage:
    words = stage.cmd.split()
    paths = {name: Path(path) for name, _, path in (w.partition("=") for w in words if "=" in w)}
    outs = {Path(out.fs_path).relative_to(root) for out in stage.outs}
    params = [key for dep in stage.params for key in dep.params]
    return GraphStage(words[words.index("pipeline") + 1], paths, outs, params)


def stages_to_run(
    graph: list[GraphStage], allowed: list[str], old: dict[str, Any], new: dict[str, Any]
) -> list[GraphStage]:
    """Allowed stages whose parameters changed between two compiled configs, and allowed readers of their outputs."""
    chosen: list[GraphStage] = []
    written: set[Path] = set()
    for stage in graph:
        if stage.name.partition("@")[0] not in allowed and stage.name not in allowed:
            continue
        changed = any(_at(old, key) != _at(new, key) for key in stage.params)
        reads = any(path in written or any(out in path.parents for out in written) for path in stage.paths.values())
        if changed or reads:
            chosen.append(stage)
            written |= stage.outs
    return chosen


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def run_job(params: config.Params, stages: list[GraphStage], folder: Path) -> dict[str, Any]:
    """Run `stages` in order with outputs under `folder`; returns {stage: its metrics} and writes it as summary.json."""
    moved: dict[Path, Path] = {}
    summary: dict[str, Any] = {}
    for stage in stages:
        moved |= {out: folder / out for out in stage.outs}
        paths = {name: moved.get(path, path) for name, path in stage.paths.items()}
        name, _, key = stage.name.partition("@")
        for out in stage.outs:
            (folder / out).parent.mkdir(parents=True, exist_ok=True)
        summary[stage.name] = run_stage(name, key or None, paths, params)["metrics"]
        provenance.write_json(folder / "summary.json", summary)
    return summary


def refuse_secrets(words: list[str]) -> None:
    """Raises ConfigError for a secret in the command or in the config of a job: before Hydra, which copies both.

    What Hydra itself refuses is left to it.
    """
    from hydra import compose, initialize_config_dir
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    for word in words:
        config.refuse_secret("an override", word.partition("=")[0])
        config.refuse_secret(word.partition("=")[0].lstrip("+~"), word)
    try:
        overrides = OverridesParser.create().parse_overrides([w for w in words if not w.startswith("-")])
        overrides = [o for o in overrides if not o.get_key_element().startswith("hydra")]
        (jobs,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = [compose("config", overrides=job) for job in jobs]
    except (HydraException, OmegaConfBaseException):
        return
    for job in composed:
        _refuse_secrets_below("", OmegaConf.to_container(job))


def _refuse_secrets_below(path: str, value: Any) -> None:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        _refuse_secrets_below(f"{path}.{key}" if path else str(key), inner)
    if isinstance(value, str):
        config.refuse_secret(path, value)


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir)
    OmegaConf.resolve(cfg)
    settings = OmegaConf.to_container(cfg)
    assert isinstance(settings, dict)
    try:
        new = config.parse(OmegaConf.to_yaml(cfg), folder)
        old = OmegaConf.to_container(OmegaConf.load(ROOT / "params.yaml"))
        assert isinstance(old, dict)
        stages = stages_to_run(read_graph(ROOT), new.sweep.stages, old, settings)  # type: ignore[arg-type]
        if not stages:
            raise config.ConfigError(
                f"sweep.stages: none of {', '.join(new.sweep.stages)} depends on what was overridden; add the stage"
            )
        run_job(new, stages, folder)
    except (ValueError, OSError, MemoryError, RuntimeError) as e:
        text = one_line(e) if not isinstance(e, RuntimeError) else allocation_failure(e)
        if text is None:
            raise
        # the other jobs go on; the exit code at the end tells that one failed
        print(f"error: {text}", file=sys.stderr)
        provenance.write_json(folder / "summary.json", {"error": text})
        FAILED.append(folder)
        return
    print(f"{', '.join(s.name for s in stages)}: {folder / 'summary.json'}")


if __name__ == "__main__":
    try:
        refuse_secrets(sys.argv[1:])
    except config.ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    main()
    sys.exit(1 if FAILED else 0)
