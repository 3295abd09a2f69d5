"""What round_trips.py explores: configurations, rules that are left out, and variants in which nothing is found."""

M, LEASE, LONGER = 2, 4, 6  # ticks: a moment (also the time between looks), a lease, one that was extended
LIMIT = 3_000_000  # states of a walk

BREAKS = {  # what is left out or done otherwise: the configurations that must find it
    "confirm-queues": (
        "believe",
        "the confirmation of a believed grant may queue or take a free name, as today's ENTER",
    ),
    "same-entry-rejoin": ("believe2", "a look queues a place again that was granted and lost"),
    "believe-other-connection": (
        "release",
        "pushes come over a third connection, and after a cut a place is joined again",
    ),
    "base-unanswered": ("believe2", "the provisional deadline counts from the last look sent, answered or not"),
    "moment-from-receipt": ("believe2", "the provisional deadline counts from when the message came"),
    "provisional-past-lease": ("short", "the provisional deadline is not bounded by send of the confirmation + lease"),
    "provisional-past-look": ("short", "a look in flight serves as confirmation, its lease counts from the belief"),
    "timer-from-receipt": (
        "frozen",
        "the next look is due so long after the reply to the last came, not after it was sent",
    ),
    "slow-second": ("frozen", "only who is first looks every moment; the others every lease"),
    "one-connection": ("release", "all of a name goes over A, and then a confirmation may queue, as today's ENTER"),
    "lease-from-receipt": ("believe2", "the deadline of a lease counts from when the reply came"),
    "grant-unmarked": ("three", "a grant sets an unmarked token though more are waiting, as today's grant.lua"),
    "release-overtaken": ("believe2", "the next SET goes over A while the release before it goes over B"),
    "release-needs-reader": (
        "ahead",
        "a release is a compare-and-delete; who reads its reply hands over if it was marked",
    ),
    "nobody-resends": ("ahead", "a release whose connection broke is not sent again"),
    "no-kill": ("believe", "commands of a connection that was cut are executed late, not ended before the next ask"),
    "leave-overtaken": ("cancel", "the next SET goes over B while a LEAVE is not answered yet"),
    "keep-without-mark": ("keep", "who finds a kept token recalls it, but does not mark it"),
    "recall-lost": ("keepcut", "a kept token is recalled once, when it is marked, not with every look"),
    "recall-before-reply": ("keep", "a recall of a token whose SET is not answered yet is ignored"),
    "grant-while-giving": ("keep", "a keeper that has sent its lease back gives it out again"),
    "keep-wanted": ("keep", "a lease is kept though others were told to wait"),
    "lapse-silent": ("keep", "a keeper whose lease is over by its own clock sends nothing before it asks anew"),
    "keep-unconfirmed": ("keep", "a grant that is not confirmed yet is kept (its token names no channel)"),
    "fence-unstored": ("fences", "the fence that a message tells is not stored, so that the next may be the same"),
    "foreign-marked": ("foreign", "who finds a token of redis-py marks it, so that its owner cannot delete it"),
    "foreign-told": ("foreign", "who waits for redis-py's lock looks no more, as if its release told somebody"),
    "extend-early": ("renew", "a lease is extended before it is confirmed, and the confirmation sets it anew"),
    "look-unanswered": (
        "heirs",
        "a grant is believed though the look of a caller that left is not answered: it may have set its lease",
    ),
    "local-restart": ("callers", "who gets the lease from a caller of its client counts it from then"),
}

CONFIGS = {  # clients, acquires of each, keep, (cuts, crashes, freezes, cancels)
    "believe": {"goals": (1, 1), "keep": 0, "faults": (1, 0, 0, 0)},  # (b), (c)
    "believe2": {"goals": (2, 1), "keep": 0, "faults": (0, 0, 0, 0)},
    "faults": {"goals": (1, 1), "keep": 0, "faults": (1, 1, 1, 0)},
    "short": {
        "goals": (2, 1),
        "keep": 0,
        "faults": (0, 0, 0, 0),
        "lease": 1,
        "moment": 3,
        "quick": 1,
    },  # a lease shorter than the moment
    "three": {"goals": (1, 1, 1), "keep": 0, "faults": (0, 0, 0, 0), "begin": "queued", "quick": 1},
    "frozen": {"goals": (1, 1, 1), "keep": 0, "faults": (0, 0, 1, 0), "begin": "queued", "quick": 1},
    "cancel": {"goals": (1, 2), "keep": 0, "faults": (0, 0, 0, 1), "quick": 1},
    "release": {"goals": (2, 1), "keep": 0, "faults": (1, 0, 0, 0), "quick": 1},  # (a)
    "keep": {"goals": (2, 1), "keep": 1, "faults": (0, 0, 0, 0), "quick": 1},  # (d)
    "keepcut": {"goals": (1, 1), "keep": 1, "faults": (1, 0, 0, 0)},
    "keepfaults": {"goals": (2, 1), "keep": 1, "faults": (0, 1, 1, 0), "quick": 1},
    "keepthree": {"goals": (1, 1, 1), "keep": 1, "faults": (0, 0, 0, 0), "begin": "queued", "quick": 1},
    "keepthreefrozen": {"goals": (1, 1, 1), "keep": 1, "faults": (0, 0, 1, 0), "begin": "queued", "quick": 1},
    "fences": {"goals": (2, 1), "keep": 0, "faults": (0, 0, 0, 0), "quick": 1, "fenced": 1},
    "fencesfaults": {"goals": (1, 1), "keep": 0, "faults": (1, 1, 0, 0), "quick": 1, "fenced": 1},
    "foreign": {"goals": (1, 1, 1), "keep": 0, "faults": (0, 0, 0, 0), "quick": 1, "foreign": (2,)},
    "foreignkeep": {"goals": (2, 1), "keep": 1, "faults": (0, 0, 0, 0), "quick": 1, "foreign": (1,)},
    "renew": {"goals": (2, 1), "keep": 0, "faults": (0, 0, 0, 0), "quick": 1, "renew": 1},
    "renewcut": {"goals": (1, 1), "keep": 0, "faults": (1, 0, 0, 0), "quick": 1, "renew": 1},
    "heirs": {"goals": (2, 1), "keep": 0, "faults": (0, 0, 0, 1), "quick": 1, "heirs": 1},
    "callers": {"goals": (2, 1), "keep": 0, "faults": (1, 0, 0, 0), "quick": 1, "local": 1},
    "ahead": {"goals": (2, 1), "keep": 0, "faults": (1, 0, 0, 0), "quick": 1, "ahead": 1},
    "aheadcancel": {"goals": (2, 1), "keep": 0, "faults": (0, 0, 0, 1), "quick": 1, "ahead": 1},
    "aheadkeep": {"goals": (2, 1), "keep": 1, "faults": (0, 0, 0, 0), "quick": 1, "ahead": 1},
}
# begin="queued": client 0 holds, the others are queued. quick: replies to REL are heard as they are made, as nothing
# comes of them but that a connection that breaks later does not send the release again. foreign: clients of redis-py.
# local: how often a client hands a lease to another of its callers. ahead: a client may join at once, as with strict
# order, also before a release of its own was executed.

VARIANTS = {  # not the rule, but nothing must be found: what the rules make unnecessary
    "push-elsewhere": ("short", "pushes come over a third connection; a place is still joined only once (safety only)"),
    "rejoin-after-cut": ("believe", "after a cut an unanswered JOIN is sent again for the same place, pushes over A"),
    "no-kill-safety": (
        "believe",
        "commands of a connection that was cut are executed late: costs time, but is safe (safety only)",
    ),
    "no-leave-unknown": ("cancel", "a grant to a place that is not known any more is not given back"),
}
