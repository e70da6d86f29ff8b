"""`python -m pipeline.sweep --multirun KEY=a,b ...`: stages of dvc.yaml again, with other settings, beside the results.

Each job composes its own config from conf/. Of the stages named in `sweep.stages`, it runs those whose parameters
differ from params.yaml, and those that read what these write; other inputs are the workspace's own. Outputs go to the
job's folder, so nothing in artifacts/ or reports/ changes. `dvc repro` stays the way to results that are kept.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from pipeline import config, provenance
from pipeline.__main__ import one_line, run_stage

ROOT = Path.cwd()
FAILED: list[Path] = []


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
    except (ValueError, OSError) as e:
        # the other jobs go on; the exit code at the end tells that one failed
        print(f"error: {one_line(e)}", file=sys.stderr)
        provenance.write_json(folder / "summary.json", {"error": one_line(e)})
        FAILED.append(folder)
        return
    print(f"{', '.join(s.name for s in stages)}: {folder / 'summary.json'}")


if __name__ == "__main__":
    main()
    sys.exit(1 if FAILED else 0)
