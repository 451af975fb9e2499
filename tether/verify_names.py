"""Says what probably happened where the names in a directory are not those of its model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from adapters.contract import Manifest

Shapes = Mapping[str, tuple[int, ...]]
_PACKED = re.compile(r"(?P<stem>.*\.experts)\.[^.0-9][^.]*(?:\.\w+)?$")
MOST = 10


def explain_names(shapes: Shapes, expected: Shapes, *, got: Manifest, recorded: Manifest | None) -> list[str]:
    """One line for each kind of accident that fits.

    Args:
        shapes, expected: of the tensors that are there and that the model needs, by name.
        got: describes those that are there.
        recorded: what the export wrote, if the directory is one.
    """
    unexpected = sorted(shapes.keys() - expected.keys())
    packed = [name for name in unexpected if _holds_all_experts(name, expected)]
    lines = []
    if packed:
        lines.append(
            f"packed experts: {', '.join(packed[:MOST])} hold(s) all experts of a layer in one tensor; expected one "
            "tensor per expert, as in ...experts.0.gate_proj.weight"
        )
    missing = {name: expected[name] for name in sorted(expected.keys() - shapes.keys())}
    renamed = _renamed({name: shapes[name] for name in unexpected if name not in packed}, missing, got, recorded)
    if renamed:
        lines.append("renamed: " + ", ".join(renamed[:MOST]))
    return lines


def _holds_all_experts(name: str, expected: Shapes) -> bool:
    match = _PACKED.fullmatch(name)
    return match is not None and any(other.startswith(f"{match['stem']}.0.") for other in expected)


def _renamed(unexpected: Shapes, missing: Shapes, got: Manifest, recorded: Manifest | None) -> list[str]:
    """`old -> new`, by content where the export's record tells, else by shape and likeness of the name."""
    digests = {spec.name: spec.digest for spec in got.tensors}
    exported = {spec.digest: spec.name for spec in recorded.tensors if spec.name in missing} if recorded else {}
    left, lines = dict(missing), []
    for name, shape in unexpected.items():
        old = exported.get(digests[name])
        how = "equal content"
        if old is None or old not in left:
            fitting = [other for other, want in left.items() if want == shape]
            old, how = next(iter(difflib.get_close_matches(name, fitting, n=1, cutoff=0.5)), None), "same shape"
        if old is not None:
            del left[old]
            lines.append(f"{old} -> {name} ({how})")
    return lines
