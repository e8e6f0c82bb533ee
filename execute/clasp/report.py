"""The study's results: figures from the parts, and a Markdown page with its pictures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .apart import BOTH, FARTHEST
from .pictures import draw_agreement, draw_persistence, draw_speed
from .probes import CACHES
from .speed import BASELINE
from .study import FREE_LAYERS, REDUCED
from .tables import DISTANCES, agreement_table, cache_table, over_prompts, persistence
from .verdict import beside, best_lookahead, break_even, draft_cost

ELSEWHERE = (("this model", None, None), ("head share 2%", 0.02, None), ("head share 2%, wide steps free", 0.02, 1.0))
MOST_DRAFTS = 8
VERIFIED = 3  # drafts of a typical verification in turn
DRAFT_COSTS, RATES = (0.3, 0.5, 0.7, 0.9), (0.5, 0.6, 0.7, 0.8, 0.9)  # of models that are not here
_KINDS = ("give", "take", "optimise")


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    """Everything the page says, as data."""
    skipped = sorted({entry["skipped"] for entry in found["agreement"]})
    times = found["times"]
    full = times["full-1"]
    return {
        "settings": found["settings"], "host": found["host"], "versions": found["versions"],
        "num_layers": found["num_layers"], "agreement": list(agreement_table(found["agreement"])),
        "caches": list(cache_table(found["caches"])), "apart": found.get("apart"),
        "reduced": list(_reduced(found["reduced"])),
        "persistence": {str(count): list(_persistence(found["sets"], count)) for count in skipped},
        "times": {name: seconds / full for name, seconds in times.items()}, "full_step_s": full,
        "speed": found["speed"], "verdict": list(_verdict(found, skipped)), "elsewhere": list(_elsewhere(times)),
    }


def _reduced(entries: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for count in REDUCED:
        mine = [entry for entry in entries if entry["skipped"] == count]
        gap, interval = over_prompts([(e["prompt"], e["gap_closed"], 1.0) for e in mine])
        yield {"skipped": count, "num_states": len(mine), "num_sets": mine[0]["num_sets"],
               "median_rank": float(np.median([e["rank"] for e in mine])),
               "exact": sum(e["rank"] == 1 for e in mine) / len(mine), "gap_closed": gap, "interval": interval,
               **{key: float(np.mean([e[key] for e in mine])) for key in ("cosine", "best", "mean")}}


def _persistence(sets: Sequence[dict[str, Any]], count: int) -> Iterator[dict[str, Any]]:
    found = persistence(sets, count)
    for distance in DISTANCES:
        if distance in found:
            value, interval = over_prompts([(name, jaccard, 1.0) for name, jaccard in found[distance]])
            yield {"distance": distance, "jaccard": value, "interval": interval, "num_pairs": len(found[distance])}


def _verdict(found: dict[str, Any], skipped: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Per number of layers: what α is needed and what was found, here and with other heads and step widths."""
    times, layers = found["times"], found["num_layers"]
    full = times["full-1"]
    head, steps = times["head"] / full, [times[f"full-{width}"] / full for width in range(1, MOST_DRAFTS + 1)]
    measured = {row["skipped"]: row["agreement"] for row in agreement_table(found["agreement"]) if row["kind"] == "dp"}
    for count in skipped:
        costs = {"optimise": times[f"optimise-{count}"] / full}
        kinds = [("int8 copy", times[f"int8-{count}"] / full, steps)] if f"int8-{count}" in times else []
        for name, share, wide in ELSEWHERE:
            draft = times[f"draft-{count}"] / full if share is None else draft_cost(count / layers, share)
            kinds.append((name, draft, steps if wide is None else [wide] * len(steps)))
        for name, draft, these in kinds:
            wide = these[VERIFIED]
            beside_lookahead, beside_pays = beside(measured[count], draft, these, **costs)
            lookahead, pays = best_lookahead(measured[count], draft, most=MOST_DRAFTS, verify=wide, **costs)
            yield {"where": name, "skipped": count, "draft": draft, "verify": wide, "head_share": head,
                   "acceptance_rate": measured[count], "lookahead": lookahead, "speedup": pays,
                   "lookahead_beside": beside_lookahead, "speedup_beside": beside_pays,
                   "break_even": break_even(draft, most=MOST_DRAFTS, verify=wide, **costs)}


def _elsewhere(times: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Of a drafter of some cost that is right so often: what it would gain in turn and beside its model, where wide
    steps cost nothing.  LOI is the default; a choice of layers costs what it does here with most layers skipped."""
    optimise = max(seconds for name, seconds in times.items() if name.startswith("optimise")) / times["full-1"]
    for draft in DRAFT_COSTS:
        gains = [(best_lookahead(rate, draft, most=MOST_DRAFTS, optimise=optimise)[1],
                  beside(rate, draft, [1.0] * MOST_DRAFTS, optimise=optimise)[1]) for rate in RATES]
        yield {"draft": draft, "gains": gains}


def write(data: dict[str, Any], out: Path) -> None:
    """``clasp.md``, ``clasp.json`` and the pictures."""
    (out / "clasp.json").write_text(json.dumps(data, indent=1, allow_nan=False), encoding="utf-8")
    draw_agreement(data["agreement"], data["num_layers"], out / "clasp-agreement.svg")
    draw_persistence(data["persistence"], out / "clasp-persistence.svg")
    draw_speed(data["speed"], out / "clasp-speed.svg")
    (out / "clasp.md").write_text("\n".join(page(data)) + "\n", encoding="utf-8")


def page(data: dict[str, Any]) -> Iterator[str]:
    settings, host = data["settings"], data["host"]
    yield f"# Layer skipping on {settings['model']}\n"
    yield (f"{settings['dtype']}, {data['num_layers']} layers, greedy, batch 1; {host['cpu']}, {host['cores']} cores.  "
           f"{len(settings['evaluation_prompts'])} evaluation prompts, tuned on others.  Intervals: 90%, bootstrap "
           "over prompts.\n")
    yield "## Next tokens that a skipping model gets right\n\n![Agreement and cosine](clasp-agreement.svg)\n"
    yield from table(("layers skipped", "chosen by", "agreement", "cosine"), (
        (row["skipped"], row["kind"], _with(row["agreement"], row["interval"]),
         _with(row["cosine"], row["cosine_interval"], 3)) for row in data["agreement"]))
    yield "\n## Whose cache?\n\nThe fixed set's choices along the answer, by who computed the entries before it:\n"
    yield from table(("layers skipped", "full model all", "full model the prompt", "skipping model all"), (
        (row["skipped"], *(_with(*row[kind]) for kind in CACHES)) for row in data["caches"]))
    yield f"\n## The programme against every set of {FREE_LAYERS} layers\n"
    yield from table(("skipped", "sets", "states", "median rank", "best found", "cosine: mean set", "programme", "best",
                      "gap closed"), (
        (row["skipped"], row["num_sets"], row["num_states"], f"{row['median_rank']:g}", f"{100 * row['exact']:.0f}%",
         f"{row['mean']:.4f}", f"{row['cosine']:.4f}", f"{row['best']:.4f}", _with(row["gap_closed"], row["interval"]))
        for row in data["reduced"]))
    yield "\n## How alike are the sets of near tokens?\n\n![Overlap](clasp-persistence.svg)\n"
    counts = list(data["persistence"])
    yield from table(("tokens apart", *(f"M = {count}" for count in counts)), (
        (entries[0]["distance"], *(_with(entry["jaccard"], entry["interval"]) for entry in entries))
        for entries in zip(*data["persistence"].values(), strict=True)))
    yield f"\n## Times, in full single-token steps ({1e3 * data['full_step_s']:.1f} ms)\n"
    yield from table(("pass", "cost"), ((name, f"{cost:.2f}") for name, cost in data["times"].items()))
    yield from _speed(data["speed"])
    if data["apart"]:
        yield from _apart(data["apart"])
    yield "\n## What would make it pay\n"
    yield from table(("where", "layers skipped", "draft cost", "verification", "acceptance found", "needed",
                      "best lookahead", "in turn", "best lookahead", "beside each other"), (
        (row["where"], row["skipped"], f"{row['draft']:.2f}", f"{row['verify']:.2f}", f"{row['acceptance_rate']:.2f}",
         "never" if row["break_even"] is None else f"{row['break_even']:.2f}", row["lookahead"],
         f"{row['speedup']:.2f}", row["lookahead_beside"], f"{row['speedup_beside']:.2f}") for row in data["verdict"]))
    yield from _other_models(data["elsewhere"])


def _other_models(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "\nOf any model whose wide steps cost nothing, by draft cost and acceptance (in turn / beside each other):\n"
    yield from table(("draft cost", *(f"right {100 * rate:.0f}%" for rate in RATES)), (
        (row["draft"], *(f"{in_turn:.2f} / {beside_:.2f}" for in_turn, beside_ in row["gains"])) for row in rows))


def _speed(speed: dict[str, Any]) -> Iterator[str]:
    yield "\n## Real runs\n\n![Speed](clasp-speed.svg)\n"
    chosen = " and ".join(f"`{name}`" for name in speed["chosen"].values())
    yield f"Chosen on the calibration prompts: {chosen}.  On the evaluation prompts:\n"
    for threads, title in ((1, "one core"), (2, "two cores")):
        rows = speed.get(f"evaluation-{threads}")
        if not rows:
            continue
        shares = ("prefill", "draft", "verify", "optimise", "between")
        categories = list(rows[0]["by_category"])
        yield from table((title, "tokens/s", "speed-up", "acceptance", "tokens a round", "same text",
                          *(f"{name} %" for name in shares), *categories), (
            (f"`{row['name']}`", f"{row['tokens_per_s']:.1f}", _with(row["speedup"], row["interval"]),
             "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.2f}",
             f"{row['mean_acceptance_length']:.2f}", f"{row['identical_prompts']}/{row['num_prompts']}",
             *(f"{100 * row['time_shares'].get(name, 0):.1f}" for name in shares),
             *(f"{row['by_category'][name]:.2f}" for name in categories)) for row in rows))
        yield ""
    yield "Tuning, on the calibration prompts:\n"
    yield from table(("setting", "speed-up"), ((f"`{row['name']}`", _with(row["speedup"], row["interval"]))
                                                for row in speed["tuning"]))


def _apart(found: dict[str, Any]) -> Iterator[str]:
    yield "\n## Beside its model, in a process of its own\n"
    yield "Two stages, a core each.  Evaluation prompts:\n"
    yield from table(("pipeline", "tokens/s", "speed-up, one core", "speed-up, both cores", "acceptance",
                      "tokens a step", "same text"), (
        (f"`{row['name']}`", f"{row['tokens_per_s']:.1f}", _with(row["speedup"], row["interval"]),
         _with(row["speedup_both"], row["interval_both"]),
         "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.2f}",
         f"{row['mean_acceptance_length']:.2f}", f"{row['identical_prompts']}/{row['num_prompts']}")
        for row in found["evaluation"]))
    yield "\nThe hand-over (medians; shares of the wall time of the stage that does it):\n"
    yield from table(("pipeline", "tokens each", "give ms", "take ms", "choose layers ms", "give %", "take %",
                      "choose layers %"), (
        (f"`{name}`", f"{row['rows']:.2f}", *(f"{1e3 * row[f'{kind}_s']:.2f}" for kind in _KINDS),
         *(f"{100 * row[f'{kind}_share']:.1f}" for kind in _KINDS)) for name, row in found["handover"].items()))
    yield ("\nDrafts that were right, by distance from the last token whose entries the full model computed; "
           "calibration prompts, all lookaheads:\n")
    rows = found["distances"]
    farthest = max(entry["distance"] for entries in rows.values() for entry in entries)
    yield from table(("run", *(f"{d}{' and more' if d == FARTHEST else ''}" for d in range(1, farthest + 1))), (
        (f"`{name}`", *(next((f"{_with(e['right'], e['interval'])} of {e['num_drafts']}" for e in entries
                              if e["distance"] == d), "") for d in range(1, farthest + 1)))
        for name, entries in rows.items()))
    yield "\nTuning, on the calibration prompts, against plain decoding on one core:\n"
    yield from table(("pipeline", "speed-up"), ((f"`{row['name']}`", _with(row["speedup"], row["interval"]))
                                                for row in found["tuning"] if row["name"] not in (BASELINE, BOTH)))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(str(cell) for cell in row)} |"


def _with(value: float, interval: Sequence[float], digits: int = 2) -> str:
    return f"{value:.{digits}f} ({interval[0]:.{digits}f}–{interval[1]:.{digits}f})"
