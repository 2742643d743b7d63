"""Options for how samples are made from a trace, which ``simulate`` and ``demo`` have in common."""

from __future__ import annotations

from typing import Annotated

import typer

from flexd.stream.sample_kinds import SampleKind, SampleLengths

SamplesOption = Annotated[
    SampleKind,
    typer.Option(
        "--samples",
        help="How a trace becomes samples: pieces of histories that do not overlap, at most one of a user in a step "
        "(sequences), or a sample for every event, given to the ranks in turn (impressions) or all of a user to one "
        "rank (impressions-by-user).",
    ),
]
LengthsOption = Annotated[
    SampleLengths,
    typer.Option(
        "--lengths",
        help="Only samples with a full history (fixed), or samples as long as the histories of their users (real).",
    ),
]
