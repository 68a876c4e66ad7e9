"""The verdicts in a folder of `mixfl reproduce`, by study and version of its protocol.

A new version of a study has runs and verdicts of its own. The old verdicts stay in the folder, and
the report shows them beside the new ones.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mixfl.errors import MixflError
from mixfl.report.document import Finding
from mixfl.runs.folder import write_whole
from mixfl.studies.study import Study

FILE = "verdicts.json"


def keep(out: Path, study: Study, findings: Sequence[Finding]) -> None:
    if not findings:
        return
    known = _read(out)
    known.setdefault(study.id, {})[str(study.version)] = [asdict(f) for f in findings]
    text = json.dumps(known, indent=1, sort_keys=True) + "\n"
    if not (out / FILE).exists() or (out / FILE).read_text() != text:
        write_whole(out / FILE, text.encode())


def earlier(out: Path, study: Study) -> list[Finding]:
    """The verdicts of the study's other versions."""
    of_study = _read(out).get(study.id, {})
    others = sorted((v for v in of_study if v != str(study.version)), key=int, reverse=True)
    try:
        return [Finding(**f) for v in others for f in of_study[v]]
    except TypeError:
        raise MixflError(f"{out / FILE} was changed by hand: remove it.") from None


def _read(out: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    try:
        return json.loads((out / FILE).read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise MixflError(f"{out / FILE} is damaged: remove it.") from None
