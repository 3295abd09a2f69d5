"""Believed grants, unconfirmed releases and kept leases as a state machine with small clocks, explored in every order
of events: the rules of docs/waiting.md, docs/releases.md and docs/keep.md, and what happens where one of them is left
out. Fences, extensions, several callers of a client and clients of redis-py have configurations of their own. Random
walks of the real code ask this model at each step (kept_walks.py, model_judge.py).

Two or three clients, one name. Each client has connection A (SUBSCRIBE, JOIN, LOOK, LEAVE; its replies and all pushes)
and B (SET NX GET, REL), each a FIFO in both directions; nothing is delivered or executed in time unless it happens so.
    PYTHONPATH=tests python -m support.round_trips [--config believe] [--break same-entry-rejoin]
"""

import argparse
import sys
import time
from collections import deque

from support.round_trip_configs import BREAKS, CONFIGS, LEASE, LIMIT, LONGER, VARIANTS, M
from support.uncollected import uncollected

# Time is relative: what ends in so many ticks counts down, the age of what was asked counts up from its sending.
# Commands, each one script or command, executed at once:
#   SET tok        NX GET PX lease; asked again with the same token it is confirmed; recalls what is kept
#   JOIN place     take it if free and nobody is before; else queue. Sent at most once for a place, ever
#   LOOK place     as JOIN, but for a place that is neither the key nor queued: "gone"; it never queues, never takes
#   REL tok        unmarked: delete; marked: grant. One script, nothing is left to do for who reads the reply
#   LEAVE place    out of the queue, and as REL if it was granted
#   CONF place     as LOOK, but what lasts longer than a moment stays as it is: its end was moved (with heirs only)
#   EXT tok        the lease lasts for LONGER from now on
#   redis-py's: SET, asked again and again, and DEL! tok, which deletes a token that is still as it was set


# A client. pc: S idle, A has sent SET, E has sent JOIN, Q queued, H holds, K keeps, D done, X dead
PC, TOK, LEFT, AGE, BASE, CONF, WANTED, TIMER, GOALS, REL, FROZEN, SUB, AOUT, BOUT, AIN, BIN, PIN, LATE = range(18)
FENCE, ROUND, EXT, HEIR = range(18, 22)
#   LEFT what is left of what it believes to hold; AGE of the request in flight, -1 none; BASE of the last look answered
#   "queued", -1 none; CONF 0 provisional 2 confirmed; WANTED it knows that others wait; REL releases not answered;
#   SUB -1 redis-py; ROUND of its callers had the lease before; EXT age of the extension in flight, -1 none;
#   HEIR 1: the caller that waits has taken over the place of one that left, and asks for LONGER
NEW = ["S", -1, 0, -1, -1, 0, 0, 0, 0, (), 0, 1, (), (), (), (), (), (), 0, 0, -1, 0]


class World:
    __slots__ = ("bad", "bud", "cl", "fence", "high", "key", "queue", "taint")  # fence: the last; high: of those used

    def __init__(self, s):
        self.key, self.queue, clients, self.bud, self.taint, self.bad, self.fence, self.high = s
        self.cl = list(clients)

    def frozen(self):
        if self.fence:
            self.rank_fences()
        return (
            self.key,
            self.queue,
            tuple(c if type(c) is tuple else tuple(c) for c in self.cl),
            self.bud,
            self.taint,
            self.bad,
            self.fence,
            self.high,
        )

    def rank_fences(self):
        """Only their order counts, and there are few of them at a time."""
        found = {self.fence, self.high, *(c[FENCE] for c in self.cl)}
        found.update(m[2] for c in self.cl for m in c[AIN] if m[0] == "grant")
        found.update(m[3] for c in self.cl for f in (AIN, BIN) for m in c[f] if m[0] in ("acq", "set"))
        ranks = {fence: n for n, fence in enumerate(sorted(found - {0}), 1)} | {0: 0}
        if all(fence == rank for fence, rank in ranks.items()):
            return
        for i in range(len(self.cl)):
            c = self.of(i)
            c[FENCE] = ranks[c[FENCE]]
            for f in (AIN, BIN):
                c[f] = tuple(
                    (*m[:2], ranks[m[2]]) if m[0] == "grant" else
                    (*m[:3], ranks[m[3]], *m[4:]) if m[0] in ("acq", "set") else m
                    for m in c[f]
                )  # fmt: skip
        self.fence, self.high = ranks[self.fence], ranks[self.high]

    def of(self, i):
        c = self.cl[i]
        if type(c) is tuple:
            c = self.cl[i] = list(c)
        return c


class Protocol:
    def __init__(self, config, wrong):
        self.goals, self.keep = config["goals"], config["keep"]
        self.lease = config.get("lease", LEASE)
        self.faults, self.wrong = config["faults"], wrong
        self.begin_queued = config.get("begin") == "queued"
        self.quick = (config.get("quick", 0) or wrong == "push-elsewhere") and wrong != "release-needs-reader"
        self.split = wrong in ("believe-other-connection", "push-elsewhere")
        self.safety_only = self.split or wrong == "no-kill-safety"
        self.one = wrong == "one-connection"
        self.rejoin = wrong in ("believe-other-connection", "rejoin-after-cut")
        self.fenced, self.renew, self.local = (config.get(each, 0) for each in ("fenced", "renew", "local"))
        self.foreign, self.heirs = config.get("foreign", ()), config.get("heirs", 0)
        self.ahead = config.get("ahead", 0)
        self.longest = max(M, self.lease, LONGER * self.heirs)

    def start(self):
        clients = []
        for i, n in enumerate(self.goals):
            c = list(NEW)
            c[GOALS] = n
            if i in self.foreign:
                c[SUB] = -1
            clients.append(tuple(c))
        s = (None, (), tuple(clients), self.faults, 0, 0, 0, 0)
        if not self.begin_queued:
            return s
        w = World(s)  # client 0 holds, the others are queued in order
        for i in range(len(clients)):
            self.begins(w, i)
            while busy := [(j, f) for j, c in enumerate(w.cl) for f in (AOUT, BOUT, AIN, BIN) if c[f]]:
                j, f = busy[0]
                (self.execute if f in (AOUT, BOUT) else self.deliver)(w, j, f)
        return w.frozen()

    # --- the server

    def push(self, w, i, message):
        c = w.of(i)
        if c[SUB] == 1:
            f = PIN if self.split and message[0] == "grant" else AIN
            if f == PIN and c[f]:
                return True  # lost, where one is still under way: else there were no end of them
            if message not in c[f]:
                c[f] += (message,)
            return True
        return False

    def grant(self, w, me=None):
        while w.queue and w.queue[0] != me:
            first, w.queue = w.queue[0], w.queue[1:]
            fence = w.fence + self.fenced
            if self.push(w, first[0], ("grant", first[1], fence)):
                w.fence = w.fence if self.wrong == "fence-unstored" else fence
                more = bool(w.queue) and self.wrong != "grant-unmarked"
                w.key = (*first, int(more), 0, M)
                return True
        return False

    def serve(self, w, i, cmd):
        """Execute; the reply, or None."""
        verb, tok, *rest = cmd  # rest: for how long it asks, where that differs
        k, me = w.key, (i, tok)
        mine = k is not None and k[:2] == me
        if verb == "SUB":
            w.of(i)[SUB] = 1
            return None
        if verb == "EXT":
            if mine:
                w.key = (*k[:4], LONGER)
            return ("ext", tok, int(mine))
        if verb == "SET":
            if k is None or mine:
                w.key = (i, tok, k[2] if mine else 0, self.keep if i not in self.foreign else 0, self.lease)
                w.fence += self.fenced
                return ("set", tok, 1, w.fence)
            if k[0] == i and (not self.ahead or w.cl[i][TOK] == tok):
                w.bad = 5
            if k[3] and i not in self.foreign:
                self.push(w, k[0], ("recall", k[1]))
            return ("set", tok, 0, 0)
        if verb in ("JOIN", "LOOK", "CONF"):
            joins, length = verb == "JOIN", rest[0] if rest else self.lease
            if mine or (k is None and (joins or me in w.queue) and not self.grant(w, me)):
                w.queue = tuple(e for e in w.queue if e != me)
                moved = verb == "CONF" and mine and k[4] > M
                w.key = (i, tok, int(bool(w.queue)), self.keep, k[4] if moved else length)
                w.fence += self.fenced
                return ("acq", tok, int(bool(w.queue)), w.fence, *rest)
            if me not in w.queue:
                if not joins:
                    return ("gone", tok, *rest)
                w.queue += (me,)
            k = w.key
            if k[0] == i and not self.ahead:
                w.bad = 5
            if k[3] and not (self.wrong == "recall-lost" and k[2]):
                self.push(w, k[0], ("recall", k[1]))
            marks = k[0] not in self.foreign or self.wrong == "foreign-marked"
            if marks and not (self.wrong == "keep-without-mark" and k[3]):
                w.key = (k[0], k[1], 1, k[3], k[4])
            if not marks and self.wrong == "foreign-told":
                return ("que", tok, self.lease + M)
            first = w.queue[0] == me or self.wrong != "slow-second"
            return ("que", tok, min(k[4], M) if first else self.lease, *rest)
        if verb == "LEAVE":
            w.queue = tuple(e for e in w.queue if e != me)
            if mine and not self.grant(w):
                w.key = None
            return None
        if verb == "DEL!" and mine:
            w.key = k if k[2] else None
            return ("rel", tok)
        if verb == "DEL" and mine and k[2]:
            return ("marked", tok)
        if mine and not (k[2] and self.grant(w)):
            w.key = None
        return ("rel", tok)

    def execute(self, w, i, f, lost=False):
        c = w.of(i)
        cmd, c[f] = c[f][0], c[f][1:]
        reply = self.serve(w, i, cmd)
        if self.quick and reply is not None and reply[0] == "rel" and (f == BOUT or self.one):
            c[REL] = tuple(t for t in c[REL] if t != reply[1])
        elif reply is not None and not lost and f != LATE:
            c[AIN if f == AOUT else BIN] += (reply,)

    # --- a client

    def fresh(self, w, i):
        """The smallest number nothing refers to any more stands for one never used before."""
        c = w.cl[i]
        used = {c[TOK], *c[REL]}
        for f in (AOUT, BOUT, AIN, BIN, PIN, LATE):
            used.update(m[1] for m in c[f])
        if w.key and w.key[0] == i:
            used.add(w.key[1])
        used.update(p for j, p in w.queue if j == i)
        n = 0
        while n in used:
            n += 1
        return n

    def begins(self, w, i):
        c = w.of(i)
        tok = self.fresh(w, i)
        c[PC], c[TOK], c[AGE], c[GOALS] = "A", tok, 0, c[GOALS] - 1
        c[AOUT if self.wrong == "release-overtaken" or self.one else BOUT] += (("SET", tok),)

    def joins(self, w, i):
        c = w.of(i)
        tok = self.fresh(w, i)
        c[PC], c[TOK], c[AGE], c[BASE], c[WANTED], c[TIMER] = "E", tok, 0, -1, 0, 0
        c[AOUT] += (("JOIN", tok, *self.asks(c)),)

    def length(self, c):
        return LONGER if c[HEIR] else self.lease

    def asks(self, c):
        return (self.length(c),) if self.heirs else ()

    def looks(self, c, verb="LOOK"):
        verb = "JOIN" if self.one else verb
        c[AGE] = 0
        if self.wrong not in ("look-unanswered", "provisional-past-look"):
            c[BASE] = -1
        c[AOUT] += ((verb, c[TOK], *self.asks(c)),)

    def claims(self, w, c, fence):
        """It has the lease with this fence from now on, unless it has one, or the lease has ended."""
        if self.fenced and not c[FENCE] and c[LEFT] > 0:
            if fence <= w.high:
                w.bad = 6
            c[FENCE] = w.high = fence

    def holds(self, c, waiting):
        c[PC], c[CONF] = "H", 2
        c[LEFT] = self.lease if self.wrong == "lease-from-receipt" else self.length(c) - c[AGE]
        c[AGE], c[BASE], c[TIMER] = -1, -1, 0
        if self.keep and waiting:
            c[WANTED] = 1

    def ends(self, c, release=True):
        if release:
            verb = "DEL!" if c[SUB] < 0 else "DEL" if self.wrong == "release-needs-reader" else "REL"
            c[AOUT if self.one else BOUT] += ((verb, c[TOK]),)
            c[REL] += (c[TOK],)
        c[PC] = "S" if c[GOALS] else "D"
        c[TOK], c[LEFT], c[AGE], c[BASE], c[CONF], c[WANTED], c[TIMER] = -1, 0, -1, -1, 0, 0, 0
        c[FENCE], c[ROUND], c[EXT], c[HEIR] = 0, 0, -1, 0

    def lets_go(self, c):
        sure = c[CONF] == 2 or self.wrong == "keep-unconfirmed"
        calm = not c[WANTED] or self.wrong == "keep-wanted"
        if self.keep and sure and calm and c[LEFT] > 0 and c[SUB] >= 0:
            c[PC] = "K"
        else:
            self.ends(c)

    def deliver(self, w, i, f):
        c = w.of(i)
        (what, tok, *rest), c[f] = c[f][0], c[f][1:]
        pc, mine = c[PC], c[TOK] == tok
        if what == "rel":
            c[REL] = tuple(t for t in c[REL] if t != tok)
        elif what == "marked":
            c[BOUT] += (("REL", tok),)
        elif what == "grant":
            self.told(w, c, tok, rest[0])
        elif what == "recall":
            if mine and pc == "K":
                if self.wrong == "grant-while-giving":
                    c[WANTED] = 1
                    if tok not in c[REL]:
                        c[BOUT] += (("REL", tok),)
                        c[REL] += (tok,)
                else:
                    self.ends(c)
            elif mine and (pc == "H" or (pc == "A" and self.wrong != "recall-before-reply")):
                c[WANTED] = 1
        elif not mine or (self.heirs and what in ("acq", "que", "gone") and rest[-1] != self.length(c)):
            return  # it was asked by one who left
        elif what == "set":
            if pc == "A" and rest[0]:
                self.holds(c, 0)
                self.claims(w, c, rest[1])
            elif pc == "A" and c[SUB] < 0:  # it asks again
                c[PC], c[TOK], c[AGE], c[GOALS] = "S", -1, -1, c[GOALS] + 1
            elif pc == "A":
                self.joins(w, i)
        elif what == "ext":
            if pc == "H":
                c[LEFT], c[EXT] = (LONGER - c[EXT]) * rest[0], -1
        elif what == "acq":
            if pc in ("E", "Q", "H"):
                extended = c[LEFT]
                self.holds(c, rest[0])
                self.claims(w, c, rest[1])
                if self.wrong == "extend-early":
                    c[LEFT] = max(c[LEFT], extended)
        elif what == "que":
            if pc in ("E", "Q"):
                late = 0 if self.wrong == "timer-from-receipt" else c[AGE]
                c[PC], c[BASE], c[AGE], c[TIMER] = "Q", min(c[AGE], M), -1, max(0, rest[0] - late)
            elif pc == "H":  # only with pushes of another connection
                c[LEFT] = 0
        elif what == "gone":
            if pc in ("E", "Q"):
                self.joins(w, i)
            elif pc == "H":
                self.ends(c, release=False)

    def told(self, w, c, tok, fence):
        """A message says that its place was granted the name."""
        if c[TOK] == tok and c[PC] == "Q":
            base = c[BASE]
            if self.wrong == "base-unanswered" and c[AGE] >= 0:
                base = c[AGE]
            if self.wrong == "moment-from-receipt":
                base = 0
            verb = "LOOK"
            if 0 <= base < M:
                sent = c[AGE] if c[AGE] >= 0 and self.wrong != "provisional-past-look" else 0
                left = M - base if self.wrong == "provisional-past-lease" else min(M - base, self.length(c) - sent)
                c[PC], c[LEFT], c[CONF], c[BASE], c[TIMER] = "H", max(0, left), 0, -1, 0
                self.claims(w, c, fence)
                verb = "JOIN" if self.wrong == "confirm-queues" else "CONF" if self.heirs else verb
            if c[AGE] < 0:
                self.looks(c, verb)
        elif c[TOK] != tok and tok not in c[REL] and self.wrong != "no-leave-unknown":
            c[AOUT] += (("LEAVE", tok),)

    # --- what can happen

    def must(self, s):
        """(what, after) of what happens in the end if nothing fails, but for time."""
        for i, c in enumerate(s[2]):
            for f, name in ((AOUT, "A"), (BOUT, "B"), (LATE, "a cut connection")):
                if c[f]:
                    w = World(s)
                    self.execute(w, i, f)
                    yield f"server executes {i}: {' '.join(map(str, c[f][0]))} ({name})", w
            if c[FROZEN] or c[PC] == "X":
                continue
            for f, name in ((AIN, "A"), (BIN, "B"), (PIN, "pushes")):
                if c[f]:
                    w = World(s)
                    self.deliver(w, i, f)
                    yield f"{i} hears {' '.join(map(str, c[f][0]))} ({name})", w
            if c[PC] == "Q" and not c[TIMER] and c[AGE] < 0:
                w = World(s)
                self.looks(w.of(i), "JOIN" if self.wrong == "same-entry-rejoin" else "LOOK")
                yield f"{i} looks (timer)", w
            elif c[PC] == "H":
                w = World(s)
                self.lets_go(w.of(i))
                yield f"{i} lets go", w
            elif c[PC] == "K" and not c[LEFT]:
                w = World(s)
                self.ends(w.of(i), release=self.wrong != "lapse-silent")
                yield f"{i}'s kept lease is over", w

    def ticks(self, s):
        w = World(s)
        if w.key:
            k = w.key
            w.key = (*k[:4], k[4] - 1) if k[4] > 1 else None
            w.taint = s[4] or int(w.key is None)
        for i, c in enumerate(s[2]):
            if c[PC] in "SDX":
                continue
            c = w.of(i)
            c[LEFT] = max(0, c[LEFT] - 1)
            c[TIMER] = max(0, c[TIMER] - 1)
            if c[AGE] >= 0:
                c[AGE] = min(self.longest, c[AGE] + 1)
            if c[BASE] >= 0:
                c[BASE] = min(M, c[BASE] + 1)
            if c[EXT] >= 0:
                c[EXT] = min(LONGER, c[EXT] + 1)
        return w

    def may(self, s):
        cuts, crashes, freezes, cancels = s[3]
        for i, c in enumerate(s[2]):
            if c[PC] == "X" or c[FROZEN]:
                continue
            if c[PC] == "S" and (self.wrong == "leave-overtaken" or not any(m[0] == "LEAVE" for m in c[AOUT])):
                yield from self.starts(s, i)
            elif c[PC] == "K":
                w = World(s)
                self.ends(w.of(i))
                yield f"{i} keeps no longer", w
                if c[GOALS] and c[LEFT]:
                    w = World(s)
                    k = w.of(i)
                    k[PC], k[GOALS] = "H", k[GOALS] - 1
                    yield f"{i} takes its kept lease", w
            yield from self.within(s, i, c)
            if cancels and c[PC] in "AEQ":
                w = World((*s[:3], (cuts, crashes, freezes, cancels - 1), *s[4:]))
                g = w.of(i)
                if c[PC] != "A":
                    g[AOUT] += (("LEAVE", g[TOK]),)
                self.ends(g, release=c[PC] == "A")
                yield f"{i} gives up", w
            if self.heirs and cancels and c[PC] in "EQ" and c[GOALS] and not c[HEIR]:
                w = World((*s[:3], (cuts, crashes, freezes, cancels - 1), *s[4:]))
                g = w.of(i)
                g[PC], g[AGE], g[HEIR], g[GOALS] = "Q", -1, 1, g[GOALS] - 1
                yield f"{i}'s caller leaves, another one waits by its place", w
            if cuts and c[SUB] >= 0 and (c[AOUT] or c[AIN] or c[PC] in "AEQHK"):
                for n in range(len(c[AOUT]) + 1):
                    w = World((*s[:3], (cuts - 1, crashes, freezes, cancels), *s[4:]))
                    self.cut_a(w, i, n)
                    yield f"{i}'s A is cut, {n} of {len(c[AOUT])} executed", w
            if cuts and c[SUB] >= 0 and (c[BOUT] or c[BIN]):
                for n in range(len(c[BOUT]) + 1):
                    w = World((*s[:3], (cuts - 1, crashes, freezes, cancels), *s[4:]))
                    self.cut_b(w, i, n)
                    yield f"{i}'s B is cut, {n} of {len(c[BOUT])} executed", w
            if crashes and c[PC] not in "SD":
                for n in range(len(c[AOUT]) + 1):
                    for m in range(len(c[BOUT]) + 1):
                        w = World((*s[:3], (cuts, crashes - 1, freezes, cancels), *s[4:]))
                        for _ in range(n):
                            self.execute(w, i, AOUT, lost=True)
                        for _ in range(m):
                            self.execute(w, i, BOUT, lost=True)
                        dead = list(NEW)
                        dead[PC], dead[SUB] = "X", 0
                        w.cl[i] = dead
                        yield f"{i} dies, {n} of A and {m} of B executed", w
            if freezes and c[PC] not in "SD":
                w = World((*s[:3], (cuts, crashes, freezes - 1, cancels), *s[4:]))
                w.of(i)[FROZEN] = 1
                yield f"{i} freezes", w

    def starts(self, s, i):
        w = World(s)
        self.begins(w, i)
        yield f"{i} asks (SET)", w
        if self.ahead:
            w = World(s)
            w.of(i)[GOALS] -= 1
            self.joins(w, i)
            yield f"{i} joins", w

    def within(self, s, i, c):
        """What a holder may do before it lets go."""
        if c[PC] == "H" and self.local > c[ROUND] and c[GOALS] and c[LEFT]:
            w = World(s)
            h = w.of(i)
            h[GOALS], h[ROUND] = h[GOALS] - 1, h[ROUND] + 1
            if self.wrong == "local-restart":
                h[LEFT] = self.lease
            yield f"{i} hands the lease to another of its callers", w
        sure = c[CONF] == 2 or self.wrong == "extend-early"
        if c[PC] == "H" and self.renew and sure and c[EXT] < 0 and not c[ROUND] and c[LEFT]:
            w = World(s)
            h = w.of(i)
            h[BOUT] += (("EXT", h[TOK]),)
            h[EXT], h[ROUND] = 0, 1  # once
            yield f"{i} extends its lease", w

    def cut_a(self, w, i, n):
        for _ in range(n):
            self.execute(w, i, AOUT, lost=True)
        c = w.of(i)
        if self.wrong in ("no-kill", "no-kill-safety"):
            c[LATE] += c[AOUT]
        owed = tuple(cmd for cmd in c[AOUT] if cmd[0] in ("LEAVE", "SET"))
        if self.one:
            c[AGE] = 0 if c[PC] == "A" else c[AGE]
            owed = (*(cmd for cmd in c[AOUT] if cmd[0] == "LEAVE"), *(("REL", t) for t in c[REL]))
            owed += (("SET", c[TOK]),) if c[PC] == "A" else ()
        c[AIN], c[SUB], c[AOUT] = (), 0, (("SUB", -1), *owed)
        if c[PC] in "EQ" or (c[PC] == "H" and c[CONF] == 0):
            self.looks(c, "JOIN" if self.rejoin and c[PC] == "E" else "LOOK")

    def cut_b(self, w, i, n):
        for _ in range(n):
            self.execute(w, i, BOUT, lost=True)
        c = w.of(i)
        if self.wrong in ("no-kill", "no-kill-safety"):
            c[LATE] += c[BOUT]
        c[BIN], c[EXT] = (), -1  # whether it was extended is not known
        again = () if self.wrong == "nobody-resends" else tuple(("REL", t) for t in c[REL])
        if self.wrong == "nobody-resends":
            c[REL] = ()
        c[BOUT] = again + ((("SET", c[TOK]),) if c[PC] == "A" else ())
        if c[PC] == "A":
            c[AGE] = 0

    # --- what must be so

    def unsafe(self, s):
        key, queue, clients, _, _, bad, _, _ = s
        if sum(c[PC] in "HK" and c[LEFT] > 0 for c in clients) > 1:
            return "(1) two believe to hold"
        if self.safety_only:
            return None
        if bad == 6:
            return "(6) a fence is not higher than that of a holder before"
        if bad:
            return "(5) a client is told that its own released token holds the name"
        if key and clients[key[0]][PC] in "HK" and clients[key[0]][TOK] == key[1] and clients[key[0]][LEFT] > key[4]:
            return "(7) a lease claims to last longer than its key"
        for i, p in queue:
            c = clients[i]
            if c[PC] != "X" and not (c[TOK] == p and c[PC] in "EQ") and ("LEAVE", p) not in c[AOUT]:
                return f"(3) a ghost in the queue: place {p} of {i}"
        if key:
            c = clients[key[0]]
            t = key[1]
            if (
                c[PC] != "X"
                and not (c[TOK] == t and c[PC] in "AEQHK")
                and t not in c[REL]
                and ("LEAVE", t) not in c[AOUT]
            ):
                return f"(3) a ghost holds: token {t} of {key[0]}"
        return None

    def waits(self, c):
        return c[PC] in "AEQ" and not c[FROZEN] and c[SUB] >= 0

    def fair(self, s):
        """The next of one fair course of events without faults: (after, ticked)."""
        if self.wrong in ("release-needs-reader",):  # nobody reads what an idle client is told
            for what, w in self.must(s):
                i = int(what[0]) if what[0].isdigit() else None
                if i is None or not ("(B)" in what and s[2][i][PC] in "SD"):
                    return w.frozen(), 0
        else:
            for _, w in self.must(s):
                return w.frozen(), 0
        return self.ticks(s).frozen(), 1

    def course(self, s):
        """What the fair course is, until nobody waits, at most 40 events."""
        for _ in range(40):
            if not any(self.waits(c) for c in s[2]):
                return
            after, ticked = self.fair(s)
            yield "a tick" if ticked else next(what for what, w in self.must(s) if w.frozen() == after)
            s = after

    def forgotten(self, s, cache):
        path = []
        here = set()
        at = s
        while at not in cache:
            if not any(self.waits(c) for c in at[2]):
                cache[at] = (0,) * len(at[2])
                break
            if at in here:
                cache[at] = tuple(99 * self.waits(c) for c in at[2])
                break
            here.add(at)
            after, ticked = self.fair(at)
            path.append((at, ticked))
            at = after
        result = cache[at]
        for at, ticked in reversed(path):
            result = tuple(n + ticked if self.waits(c) else 0 for n, c in zip(result, at[2], strict=False))
            cache[at] = result
        return max(cache[s])

    def bound(self, s):
        """(class, in how many ticks who waits must hold)."""
        cost, gone = 0, False
        for i, c in enumerate(s[2]):
            if c[PC] == "X" or c[FROZEN]:
                gone = True
                asks = any(m[0] in ("SET", "JOIN", "LOOK") for f in (AOUT, BOUT) for m in c[f])
                holds = s[0][4] if s[0] and s[0][0] == i else 0
                cost += max(self.lease * asks, holds) + M * any(j == i for j, _ in s[1])
        if gone:
            return 2, max(M, cost)
        told = M * bool(self.foreign)  # nobody is told of a release by redis-py
        if s[4] or s[3][:3] != self.faults[:3]:
            return 1, M if self.keep or self.lease < M else told
        return 0, told


@uncollected()
def explore(config, wrong, limit):
    p = Protocol(config, wrong)
    start = p.start()
    came = {start: None}
    todo = deque([start])
    cache, worst = {}, {0: 0, 1: 0, 2: 0}
    steps, late = 0, None
    while todo:
        s = todo.popleft()
        fault = p.unsafe(s)
        if not fault and not p.safety_only:
            ticks = p.forgotten(s, cache)
            kind, bound = p.bound(s)
            worst[kind] = max(worst[kind], ticks)
            if ticks > bound:
                who = [i for i, n in enumerate(cache[s]) if n == ticks]
                law = "(2,4)" if p.keep else "(2)"
                late = s  # the state from which it is told how it goes on
                fault = f"{law} {who} waits {'for ever' if ticks > 90 else f'{ticks} ticks'}, {bound} are due"
        if fault:
            way, at = [], s
            while came[at] is not None:
                at, what = came[at]
                way.append(what)
            return (
                len(came),
                steps,
                worst,
                fault,
                way[::-1] + (["then, without any fault:", *p.course(late)] if late else []),
                s,
            )
        for what, w in (*p.must(s), *p.may(s), ("a tick", p.ticks(s))):
            after = w.frozen()
            steps += 1
            if after not in came:
                came[after] = (s, what)
                todo.append(after)
        if len(came) > limit:
            return len(came), steps, worst, "LIMIT", [], s
    return len(came), steps, worst, None, [], None


def run(name, wrong, limit, quiet=False):
    global M
    M = CONFIGS[name].get("moment", 2)
    begun = time.time()
    states, steps, worst, fault, way, s = explore(CONFIGS[name], wrong, limit)
    took = time.time() - begun
    head = f"{name}{' without ' + wrong if wrong else ''}: {states:,} states, {steps:,} steps, {took:.1f} s"
    print(f"{head}, ticks to hold {tuple(worst.values())}: {fault or 'nothing wrong'}")
    if way and not quiet:
        for n, what in enumerate(way, 1):
            print(f"   {n:2}. {what}")
        print(f"      key {s[0]}, queue {s[1]}")
    sys.stdout.flush()
    return fault


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CONFIGS)
    parser.add_argument("--break", dest="wrong", choices=[*BREAKS, *VARIANTS])
    parser.add_argument("--limit", type=int, default=LIMIT)
    parser.add_argument("--traces", action="store_true", help="of all breaks")
    args = parser.parse_args()
    if args.wrong:
        where = args.config or (BREAKS.get(args.wrong) or VARIANTS[args.wrong])[0]
        return 0 if bool(run(where, args.wrong, args.limit)) == (args.wrong in BREAKS) else 1
    if args.config:
        return 1 if run(args.config, None, args.limit) else 0
    bad = [name for name in CONFIGS if run(name, None, args.limit)]
    for wrong, (name, _) in VARIANTS.items():
        if run(name, wrong, min(args.limit, 250_000)) not in (None, "LIMIT"):
            bad.append(wrong)
    for wrong, (name, _) in BREAKS.items():
        if not run(name, wrong, args.limit, quiet=not args.traces):
            bad.append(wrong)
    print("not as it should be: " + ", ".join(bad) if bad else "all as it should be")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
