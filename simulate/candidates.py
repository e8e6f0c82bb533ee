"""Every pipeline that a profile's models allow on a number of devices.

A *model* is what a profile knows step times and agreement of.  Stages of a pipelined candidate compute at once and
hold devices of their own; those of a synchronous one take turns, so they share devices as far as memory allows.  On a
CPU a device is a core, and a stage on several has been measured so; an accelerator's stage may be sharded over
several devices, which a stated law prices (pipespec_model.fair).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipespec_model.errors import InputError
from pipespec_model.fair import SERIAL_SHARE, sharding_gain
from pipespec_model.latency import Scaled
from pipespec_model.profile import Profile, StageLatency
from pipespec_model.spec import Handshake, LinkSpec, PipelineSpec, StageSpec, Strategy

from .models import model_names, stages_of

PIPELINED_LOOKAHEADS = ((0, 1, 2, 4, 8), (0, 2, 6))
SYNCHRONOUS_LOOKAHEADS = ((1, 2, 3, 4, 6, 8), (1, 3, 6))
"""Tried on each link: of up to two, and of more links, whose number of combinations grows with the power."""
MOST_STAGES = 5
SHARDS = (1, 2, 4, 8)
"""Tensor parallelism divides attention heads, of which there is a power of two."""


@dataclass(frozen=True)
class Site:
    """A stage where it could run: on ``devices`` of them, ``shards`` times cut."""

    stage: StageSpec
    devices: int
    shards: int = 1


@dataclass(frozen=True)
class Candidate:
    """A pipeline and what it holds; ``shards`` one a stage."""

    pipeline: PipelineSpec
    devices: int
    shards: tuple[int, ...]

    @property
    def design(self) -> tuple[str, str, str]:
        """The candidate but for its lookaheads."""
        return self.pipeline.strategy, self.label, self.pipeline.handshake

    @property
    def executable(self) -> bool:
        """Whether ``execute`` can run it: a stage over several accelerators is not there yet."""
        return max(self.shards) == 1

    @property
    def label(self) -> str:
        """The pipeline's label with the devices of each stage that holds several: ``{int8,full×2}``."""
        held = (max(stage.threads if not stage.block else 1, n) for stage, n in zip(
            self.pipeline.stages, self.shards, strict=True))
        names = (stage.name + (f"×{n}" if n > 1 else "") for stage, n in zip(self.pipeline.stages, held, strict=True))
        return "{" + ",".join(names) + "}"


@dataclass(frozen=True)
class Limits:
    """What a candidate may use.

    devices : held at once; memory_bytes : of one device, None = not looked at
    serial_share : of a step, that sharding over accelerators does not shorten
    """

    devices: int
    memory_bytes: float | None = None
    serial_share: float = SERIAL_SHARE
    handshakes: tuple[Handshake, ...] = ("overlapped", "blocking")

    def __post_init__(self) -> None:
        if isinstance(self.devices, bool) or self.devices < 1:
            raise InputError("--devices", "must be >= 1", self.devices)
        sharding_gain(1, self.serial_share)  # refuses a share that is none
        if self.memory_bytes is not None and not self.memory_bytes > 0:
            raise InputError("--memory", "must be > 0", self.memory_bytes)


@dataclass
class Catalogue:
    """The models of a profile and the sites that they could have.

    known : stages by name, for a profile by hand: what its names mean (model, device, dtype)
    target : name or choice key of the model that must answer; None = the only one that drafts for nobody
    ``profile`` holds, beside what was given, the step times of every site.
    """

    given: Profile
    limits: Limits
    known: Mapping[str, StageSpec] = field(default_factory=dict)
    target: str | None = None
    profile: Profile = field(init=False)
    sites: dict[str, list[Site]] = field(init=False)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        names = model_names(self.given)
        self.key = self._target(names)
        self.profile = replace(self.given, latency=dict(self.given.latency),
                               acceptance=dict(self.given.acceptance))
        self.sites = {name: self._sites(name) for name in [self.key, *(name for name in names if name != self.key)]}
        self.sites = {name: sites for name, sites in self.sites.items() if sites}
        if self.key not in self.sites:
            raise InputError("--devices", "must suffice for the target alone", self.limits.devices)

    def _target(self, names: list[str]) -> str:
        if self.target is not None:
            for name in names:
                if self.target in (name, name.split("|")[0]):
                    return name
            raise InputError("--target", f"must be one of {', '.join(names)}", self.target)
        if self.given.agreement:
            return self.given.agreement[0].names[-1]
        drafters = {pair.split(">")[0] for pair in self.given.acceptance}
        last = [name for name in names if name not in drafters]
        if len(last) != 1:
            raise InputError("--target", "must be given: more than one model drafts for nobody", last or names)
        return last[0]

    # -- where a model could run ------------------------------------------------------------------

    def _sites(self, name: str) -> list[Site]:
        found = []
        for stage in stages_of(name, self.given, self.known, self.key):
            latency = self.given.stage_latency(stage)
            for shards in SHARDS if _accelerator(stage) else (1,):
                devices = 0 if stage.block else shards if _accelerator(stage) else stage.threads
                if devices > self.limits.devices or not self._fits([(stage, shards)]):
                    continue
                found.append(Site(self._entered(stage, latency, shards), devices, shards))
        return found

    def _entered(self, stage: StageSpec, latency: StageLatency, shards: int) -> StageSpec:
        """The stage on so many devices, its step times in the profile."""
        if shards > 1:
            gain = 1 / sharding_gain(shards, self.limits.serial_share)
            latency = StageLatency(Scaled(latency.step, gain), latency.prefill and Scaled(latency.prefill, gain))
            stage = stage.model_copy(update={"device": f"{shards}x{stage.device}"})
        self.profile.latency[stage.time_key] = latency
        return stage

    def _fits(self, together: Sequence[tuple[StageSpec, int]]) -> bool:
        """Whether these stages, each cut into so many shards, fit into one device's memory together."""
        if self.limits.memory_bytes is None:
            return True
        needed = 0.0
        for stage, shards in together:
            if stage.block:
                continue
            known = [self.given.memory_bytes[key] for key in (stage.choice_key, stage.name)
                     if key in self.given.memory_bytes]
            if not known:
                raise InputError(f"profile.memory_bytes[{stage.name}]", "must be there for --memory",
                                 mend="add the bytes of its weights and cache")
            needed += known[0] / shards
        return needed <= self.limits.memory_bytes

    # -- what can be built of them ----------------------------------------------------------------

    def candidates(self) -> Iterator[Candidate]:
        """Autoregressive, synchronous and pipelined, each placement, handshake and lookahead."""
        for site in self.sites[self.key]:
            yield self._made(_placed((site,), shared=False), (), (site,), site.devices, "autoregressive", "overlapped")
        for chain in self._chains():
            for sites in itertools.product(*(self.sites[name] for name in chain)):
                yield from self._synchronous(sites)
                yield from self._pipelined(sites)

    def _chains(self) -> Iterator[tuple[str, ...]]:
        """Drafters before the target, faster ones first, each pair of neighbours known."""
        others = sorted((name for name in self.sites if name != self.key), key=self._step_s)
        for number in range(1, MOST_STAGES):
            for drafters in itertools.combinations(others, number):
                chain = (*drafters, self.key)
                if all(self._pair_known(a, b) for a, b in itertools.pairwise(chain)) and not any(
                        self.sites[name][0].stage.drafter != "model" for name in chain[1:]):
                    yield chain

    def _step_s(self, name: str) -> float:
        stage = self.sites[name][0].stage
        return 0.0 if stage.block else min(
            self.profile.stage_latency(site.stage).step.mean_s(1, 0) for site in self.sites[name])

    def _pair_known(self, a: str, b: str) -> bool:
        if self.given.agreement:
            return {a, b} <= set(self.given.agreement[0].names)
        one, other = self.sites[a][0].stage, self.sites[b][0].stage
        try:
            model = self.given.pair(one, other)
        except InputError:
            return False
        self.profile.acceptance[f"{one.choice_key}>{other.choice_key}"] = model
        return True

    def _synchronous(self, sites: tuple[Site, ...]) -> Iterator[Candidate]:
        shared = self._fits([(site.stage, site.shards) for site in sites])
        devices = (max if shared else sum)(site.devices for site in sites)
        # Drafters that take turns with a sharded target use its devices, all or one.
        if devices > self.limits.devices or any(site.shards not in (1, sites[-1].shards) for site in sites):
            return
        stages = _placed(sites, shared=shared)
        for ahead in _lookaheads(SYNCHRONOUS_LOOKAHEADS, len(sites) - 1):
            yield self._made(stages, ahead, sites, devices, "speculative", "overlapped")

    def _pipelined(self, sites: tuple[Site, ...]) -> Iterator[Candidate]:
        devices = sum(site.devices for site in sites)
        if devices > self.limits.devices:
            return
        stages = _placed(sites, shared=False)
        for handshake in self.limits.handshakes:
            for ahead in _lookaheads(PIPELINED_LOOKAHEADS, len(sites) - 1):
                yield self._made(stages, ahead, sites, devices, "pipelined", handshake)

    def _made(self, stages: tuple[StageSpec, ...], ahead: tuple[int, ...], sites: tuple[Site, ...], devices: int,
              strategy: Strategy, handshake: Handshake) -> Candidate:
        pipeline = PipelineSpec(stages=stages, links=tuple(LinkSpec(lookahead=n) for n in ahead), strategy=strategy,
                                handshake=handshake)
        for stage, site in zip(stages, sites, strict=True):
            self.profile.latency.setdefault(stage.time_key, self.profile.latency[site.stage.time_key])
        return Candidate(pipeline, devices, tuple(site.shards for site in sites))


def _lookaheads(tried: tuple[tuple[int, ...], tuple[int, ...]], links: int) -> Iterator[tuple[int, ...]]:
    return itertools.product(tried[links > 2], repeat=links)


def _accelerator(stage: StageSpec) -> bool:
    return not stage.block and not stage.device.startswith("cpu")


def _placed(sites: Sequence[Site], *, shared: bool) -> tuple[StageSpec, ...]:
    """Stages with a device each, numbered from 0; ``shared``: all with the same."""
    out, number = [], 0
    for site in sites:
        stage = site.stage
        if _accelerator(stage):
            kind = stage.device.partition(":")[0]
            stage = stage.model_copy(update={"device": f"{kind}:{0 if shared else number}"})
            number += site.devices
        out.append(stage)
    return tuple(out)
