"""No simulated pipeline leaves its bounds; limits in which they meet."""

from __future__ import annotations

import numpy as np
import pytest
from drawn_pipelines import drawn, simulated

from pipespec_model.acceptance import IID
from pipespec_model.bounds import bounds
from pipespec_model.errors import InputError
from pipespec_model.latency import Constant
from pipespec_model.profile import Profile, StageLatency
from pipespec_model.spec import LinkSpec, PipelineSpec, StageSpec
