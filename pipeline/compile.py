"""`python -m pipeline.compile [OVERRIDE ...]`: compile conf/ into params.yaml, or answer a question about the config.

With --check nothing is written, and the exit code tells whether params.yaml is what conf/ compiles to.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pipeline import config, provenance
from pipeline.__main__ import refused
from pipeline.plan import archived_backends, plan
from pipeline.scratch import drop_broken_lock, restore

CONF, PARAMS, METRICS, REPORT = (
    Path("conf"),
    Path("params.yaml"),
    Path("reports/metrics.json"),
    Path("reports/report.md"),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.compile", description=__doc__.split("\n")[0])
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, such as experiment=smoke quantize.gptq.bits=8")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="exit 1 when params.yaml differs from conf/")
    what.add_argument("--plan", action="store_true", help="print memory, disk and what is missing; write nothing")
    what.add_argument("--needs-quantizers", action="store_true", help="exit 0 when a backend needs envs/quantizers")
    what.add_argument("--verdict", action="store_true", help="print the report's verdict and where it is")
    what.add_argument("--unlock", action="store_true", help="remove a lock file of DVC that a kill left half-written")
    what.add_argument("--restore", action="store_true", help="bring back results that a failed stage lost")
    what.add_argument("--tracking-uri", action="store_true", help="print the MLflow store")
    args = parser.parse_args(argv)
    try:
        if args.unlock:
            drop_broken_lock(Path())
            return 0
        if args.restore:
            restore(Path())
            return 0
        if args.needs_quantizers:
            return 0 if archived_backends(config.load(PARAMS)) else 1
        if args.tracking_uri:
            print(config.load(PARAMS).track.uri)
            return 0
        if args.verdict:
            print(f"{provenance.read_json(METRICS)['recommendation']['verdict']}\nReport: {REPORT}")
            return 0
        text = config.compose(CONF, args.overrides)
        if args.plan:
            print(plan(config.parse(text, PARAMS)))
            return 0
        if args.check:
            return _check(text)
        provenance.write_text(PARAMS, text)
    except (ValueError, OSError) as e:
        return refused(e, [str(PARAMS)])
    return 0


def _check(text: str) -> int:
    if PARAMS.exists() and PARAMS.read_text(encoding="utf-8") == text:
        return 0
    print(f"error: {PARAMS} is not what {CONF}/ compiles to; run `make params` and commit both", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
