"""The sampling options of the commands: one wording and one default each (``pipespec_model.sampling.Sampling``)."""

from __future__ import annotations

from typing import Annotated

import typer

from pipespec_model.sampling import Sampling
from pipespec_model.spec import checked

DRAW = Sampling()
Temperature = Annotated[float, typer.Option(help="0: the best token")]
TopK = Annotated[int, typer.Option(help="only the so many best tokens (0: all)")]
TopP = Annotated[float, typer.Option(help="only the best with this probability together")]
MinP = Annotated[float, typer.Option(help="only those as probable, relative to the best")]
RepetitionPenalty = Annotated[float, typer.Option(help="of tokens that occurred")]
MinNewTokens = Annotated[int, typer.Option(help="no end of sequence before")]
Seed = Annotated[int, typer.Option(help="of the draws; every strategy gives one text")]


def sampling_of(**options: float) -> Sampling:
    """The options as one object; raises InputError naming one that is out of range or without effect."""
    return checked(Sampling, options, "sampling:")
