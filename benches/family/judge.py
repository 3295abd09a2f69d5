"""The bounds of `fastlock bench family --check`: ratios taken in one run, shares of a core, counts. No I/O.

They are meant for the full set as it is written. What was chosen and could not be measured counts as missed. A lock on
several names is judged on one machine by what a name takes, and through the network by what an acquire takes: its
command does the work of three, which on one machine is all that there is, and on a network next to nothing.
"""

from __future__ import annotations

from ..budgets import Verdict
from . import cases
from .pairs import HERE, NETWORK, PairPart, PairRow
from .renewals import LEASE, LEASES, RenewalPart, RenewalRow
from .session import Settings

BOUNDS = {
    cases.REENTRANT: 1.2,
    cases.MULTI_1: 1.2,
    cases.MULTI_3: 1.2,
    cases.READ: 2.5,
    cases.WRITE: 2.5,
    cases.SEMAPHORE: 2.5,
}
"""The time of a pair at most, as a multiple of the plain lock's."""

PER_NAME = 1.2
"""The time of a pair on three names at most, as a multiple of that of three plain pairs."""

CPU, COMMANDS = 2.0, 1.0
"""Per cent of a core, and commands for 100 leases and period, that 10,000 leases of 30 seconds may take."""

WORDS = {HERE: "here", NETWORK: "through the network"}


def judge(settings: Settings, pairs: PairPart, renewals: RenewalPart) -> list[Verdict]:
    """A verdict for each bound of the parts that were chosen."""
    found: list[Verdict] = []
    for api in settings.apis if "pairs" in settings.parts else ():
        for place in (HERE, NETWORK) if settings.rtt else (HERE,):
            found += judge_pairs(api, place, {row.case: row for row in pairs.rows(api, place)})
    for api in settings.apis if "renewal" in settings.parts else ():
        row = next((row for row in renewals.rows if (row.api, row.case) == (api, cases.RENEWED)), None)
        found += judge_renewal(api, row)
    return found


def judge_pairs(api: str, place: str, rows: dict[str, PairRow]) -> list[Verdict]:
    """The verdicts on the pairs at one place."""
    found = []
    for case, bound in BOUNDS.items():
        if place == HERE and case in (cases.MULTI_1, cases.MULTI_3):
            continue
        row = rows.get(case)
        ratio = row.ratio.median if row and row.ratio else None
        noisy = "inside the noise" if row and row.noisy else ""
        found.append(verdict(f"{case}, {WORDS[place]}, {api}, times plain", bound, ratio, noisy))
    three = rows.get(cases.MULTI_3)
    per_name = three.per_name.median if three and three.per_name else None
    return [*found, verdict(f"{cases.MULTI_3}, {WORDS[place]}, {api}, times three plain pairs", PER_NAME, per_name)]


def judge_renewal(api: str, row: RenewalRow | None) -> list[Verdict]:
    """The verdicts on renewal."""
    what = f"{LEASES:,} leases of {LEASE:g} s under renewal, {api}"
    said = "" if row is None else f"{row.leases:,} of {row.lease:g} s were measured: {row.cpu.median:.2g} %"
    exact = row is not None and (row.leases, row.lease) == (LEASES, LEASE)
    return [
        verdict(f"{what}, % of a core", CPU, row.cpu_scaled if row else None, "" if exact else said),
        verdict(f"{what}, commands for 100 leases and period", COMMANDS, row.per_period if row else None),
    ]


def verdict(name: str, bound: float, measured: float | None, detail: str = "") -> Verdict:
    """The verdict on a bound that must not be exceeded."""
    return Verdict(name, bound, measured, measured is not None and measured <= bound, detail)
