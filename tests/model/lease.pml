/*
 * The lease protocol (docs/leases.md; pd_serve/kv/lease.py, workers/decode/quarantine.py, workers/prefill/machine.py) as a model for spin.
 *
 * One decode worker with BLOCKS blocks grants LEASES leases, one after another or side by side, of one block each, to PEERS prefill
 * processes. A lease is known by its number, which stands for lease id and epoch: records and windows name (block, number, writer).
 *
 *   peers     one worker and its restart (the default), or two workers at once (TWO_WORKERS)
 *   lane      one-sided writes that nobody can refuse (the default), or checked messages, which may also come twice (CHECKED)
 *   late      a Prefill frame, a write, Abandon, Completed and Quiesced each take as long as they like, and overtake each other
 *   lost      records only with their link; a frame at any time (its router is gone)
 *   faults    FAULTS times one of: a process dies, a link is cut, a process stands still (it may go on later)
 *   time      none: a deadline or a cancel comes at any moment. Only a peer that is cut off or stands still is fenced by force
 *
 * Checked: the assertions. Every run ends (there are bounds on everything, and no cycles), and init looks at the blocks when it has.
 * A macro of the list below plants the mistake it names; test_lease_model.py requires a counterexample of each.
 *   FREE_ON_TIMEOUT FREE_ON_ABORT FREE_ON_PEER_LOST   the owner's letting go is taken for the writer's
 *   ACCEPT_OLD_EPOCH        a record or write is taken as the block's present lease's
 *   RESTART_IS_SAME_PEER    a new process speaks for the old one
 *   NO_TOMBSTONES           a Prefill that comes after its Abandon is begun
 *   QUIESCED_BEFORE_FLUSH   "no more will be issued" instead of "no more will land"
 *   FREE_BEFORE_WINDOW_CLOSED   a finished request's blocks go back while a second copy of a write would be let in
 *   ABANDON_UNANSWERED NO_HARD_FENCE   a lease never heard of is not answered for; a silent writer is waited for
 */

#ifndef LEASES
#define LEASES 3
#endif
#ifndef FAULTS
#define FAULTS 1
#endif
#ifndef BLOCKS
#define BLOCKS 2
#endif
#define PEERS 2
#define NOBODY LEASES

mtype:lease = { unused, granted, abandoned, quarantined, filled, over };
mtype:job = { unknown, computing, flushing, ended };
mtype:put = { unsent, flying, landed, refused };

typedef Lease {                 /* decode's */
    mtype:lease state = unused;
    byte block;
    byte writer;
    bool window;                /* a checked write is let in */
    bool owned;                 /* the request holds the filled block */
    bool silent;                /* the writer has let go before the window was closed */
};
Lease lease[LEASES];
byte holder[2] = NOBODY;   /* the lease a block was given to; NOBODY: it is free */
byte num_granted;

typedef Job {                   /* the writer's */
    mtype:job stage = unknown;
    mtype:put put = unsent;
    bool again;                 /* a second copy of the write is under way */
    bool spent;                 /* never to be begun (again) */
    bool owes_quiesced;         /* after a flush; of a stopped job, or the answer to an Abandon */
};
Job job[LEASES];

typedef Wire {                  /* under way, for one lease */
    bool prefill;
    bool abandon;
    bool completed;
    bool quiesced;
    bool quiesced_by_other;     /* another process than the lease's writer sent it */
};
Wire wire[LEASES];

typedef Peer {
    bool alive;
    bool still;                 /* stands still */
    bool link;
    bool joined;                /* as decode sees it */
    bool fenced;                /* decode knows that it is dead */
};
Peer peer[PEERS];
byte num_faults;

#ifdef TWO_WORKERS
#define IS_MIRRORED(g) (g == 0)             /* the first lease of worker 1 first is the same with the names changed */
#else
#define IS_MIRRORED(g) false
#endif
#define WRITER(g) peer[lease[g].writer]
#define RUNS(g) (WRITER(g).alive && !WRITER(g).still)
#define WAITS_FOR_WRITER(g) (lease[g].state == abandoned || lease[g].state == quarantined)
#define IS_HELD(g) (WAITS_FOR_WRITER(g) || lease[g].state == granted)
#define IS_HELD_BY(g, p) (IS_HELD(g) && lease[g].writer == p)
#if LEASES == 3
#define HOLDS_ANY(p) (IS_HELD_BY(0, p) || IS_HELD_BY(1, p) || IS_HELD_BY(2, p))
#else
#define HOLDS_ANY(p) (IS_HELD_BY(0, p) || IS_HELD_BY(1, p))
#endif
#define IS_DONE(g) (job[g].stage != computing && job[g].stage != flushing && job[g].put == unsent && !job[g].again && !job[g].owes_quiesced)
#define IS_SPOKEN_OF(g) (wire[g].prefill || wire[g].abandon || wire[g].completed || wire[g].quiesced)
#define IS_UNREACHABLE(p) (peer[p].alive && (peer[p].still || !peer[p].link))

/* Forget what no longer matters, that fewer states are told apart. */
inline tidy(g) {
    if
    :: job[g].spent -> wire[g].prefill = false;         /* it would be refused */
    :: else
    fi;
    if
    :: lease[g].state == over && job[g].stage != computing && job[g].put != flying && !job[g].again -> job[g].put = unsent;
    :: else
    fi;
    if
    :: lease[g].state == over && !lease[g].window && IS_DONE(g) && !IS_SPOKEN_OF(g) ->
        job[g].stage = ended; job[g].spent = true; lease[g].block = 0; lease[g].writer = 0;
    :: else
    fi
}

/* ---- decode */

inline free_block(g) {
    lease[g].state = over; lease[g].owned = false; lease[g].silent = false;
    holder[lease[g].block] = NOBODY;
}

inline grant(g, b, p) {
    lease[g].state = granted; lease[g].block = b; lease[g].writer = p; lease[g].window = true;
#ifndef CHECKED
    for (other : 0 .. LEASES - 1) {         /* nobody may still write where a block is given out again */
        if
        :: other < g && lease[other].block == b ->
            assert(job[other].put != flying && job[other].stage != computing);
            assert(!(wire[other].prefill && !job[other].spent && WRITER(other).alive));
        :: else
        fi
    }
    other = 0;
#endif
    holder[b] = g;
    wire[g].prefill = true;                 /* Reserved to the router, Prefill from it */
    num_granted++;
}

inline owner_lets_go(g) {
    lease[g].state = abandoned;             /* its window is closed by a later step */
    if
    :: lease[g].silent
#ifdef RESTART_IS_SAME_PEER
    :: !lease[g].silent && (WRITER(g).link || peer[1].joined) -> wire[g].abandon = true;
#else
    :: !lease[g].silent && WRITER(g).link && WRITER(g).joined -> wire[g].abandon = true;
#endif
    :: else
    fi
}

inline writer_let_go(g) {
    if
    :: lease[g].state == abandoned -> lease[g].silent = true;
    :: lease[g].state == quarantined -> free_block(g);
    :: else
    fi
}

/* The lease that a record about g is about: none if that one is over. Sets `about`. */
inline look_up(g) {
#ifdef ACCEPT_OLD_EPOCH
    about = holder[lease[g].block];
    if
    :: about != NOBODY && lease[about].writer != lease[g].writer -> about = NOBODY;
    :: else
    fi
#else
    if
    :: IS_HELD(g) -> about = g;
    :: else -> about = NOBODY;
    fi
#endif
}

/* Decode's events that name one lease. */
proctype DecodeLease(byte g) {
    byte about, other;
end_unopened:
    if                                      /* Open: the writer must be joined; the pool gives the first free block */
    :: d_step { num_granted == g && holder[0] == NOBODY && peer[0].joined -> grant(g, 0, 0) }
    :: d_step { num_granted == g && holder[0] == NOBODY && peer[1].joined && !IS_MIRRORED(g) -> grant(g, 0, 1) }
    :: d_step { num_granted == g && BLOCKS == 2 && holder[0] != NOBODY && holder[1] == NOBODY && peer[0].joined -> grant(g, 1, 0) }
    :: d_step { num_granted == g && BLOCKS == 2 && holder[0] != NOBODY && holder[1] == NOBODY && peer[1].joined -> grant(g, 1, 1) }
    fi;
end_events:
    do
    :: d_step { lease[g].state == granted ->            /* the deadline has passed */
#ifdef FREE_ON_TIMEOUT
        lease[g].window = false; free_block(g);
#else
        owner_lets_go(g);
#endif
        tidy(g) }
    :: d_step { lease[g].state == granted ->            /* cancelled, or the router's link was lost */
#ifdef FREE_ON_ABORT
        lease[g].window = false; free_block(g);
#else
        owner_lets_go(g);
#endif
        tidy(g) }
    :: d_step { wire[g].completed && WRITER(g).joined ->
        wire[g].completed = false;
        look_up(g);
        if
        :: about == NOBODY                              /* stale */
        :: about != NOBODY && lease[about].state == granted ->
            assert(about == g);                         /* no record of another epoch fills */
            assert(job[about].put == landed);           /* all of it is there */
            lease[about].state = filled; lease[about].owned = true;
#ifndef CHECKED
            lease[about].window = false;                /* no matter: nobody looks */
#endif
        :: else -> writer_let_go(about);
        fi; about = 0; tidy(g) }
    :: d_step { wire[g].quiesced ->
        wire[g].quiesced = false; wire[g].quiesced_by_other = false;
        look_up(g);
        if
        :: about == NOBODY                              /* stale */
        :: about != NOBODY && lease[about].state == granted ->   /* the writer has given up */
            lease[about].silent = true; owner_lets_go(about);
        :: else -> writer_let_go(about);
        fi; about = 0; tidy(g) }
    :: d_step { lease[g].state == filled && lease[g].owned ->   /* the request is over */
        lease[g].owned = false;
#ifdef FREE_BEFORE_WINDOW_CLOSED
        free_block(g);
#else
        if
        :: lease[g].window
        :: else -> free_block(g);
        fi;
#endif
        tidy(g) }
    :: d_step { lease[g].window && (lease[g].state == filled || lease[g].state == abandoned || lease[g].state == over) ->   /* WindowClosed */
        lease[g].window = false;
        if
        :: lease[g].state == filled && !lease[g].owned -> free_block(g);
        :: lease[g].state == abandoned ->
            lease[g].state = quarantined;
#ifdef CHECKED
            free_block(g);                              /* that is a fence */
#else
            if
            :: lease[g].silent -> free_block(g);
            :: else
            fi
#endif
        :: else
        fi; tidy(g) }
    od
}

/* ---- prefill */

inline stop(g) {                /* issue nothing more; what flies, flies */
    job[g].stage = ended; job[g].owes_quiesced = true;
}

inline land(g) {
#ifdef CHECKED
#ifdef ACCEPT_OLD_EPOCH
    look_up(g);
#else
    about = g;
#endif
    if
    :: about != NOBODY && lease[about].window ->
        assert(about == g && holder[lease[g].block] == g);
        job[g].put = landed;
    :: else -> job[g].put = refused;
    fi; about = 0;
#else
    assert(holder[lease[g].block] == g && IS_HELD(g));  /* nobody else's block, and not a filled one */
    job[g].put = landed;
#endif
}

#ifdef QUIESCED_BEFORE_FLUSH
#define MAY_QUIESCE(g) true
#else
#define MAY_QUIESCE(g) (job[g].put != flying)
#endif

/* What one lease's writer does and hears. */
proctype WriterJob(byte g) {
    byte about;
end_unopened:
    num_granted > g;
end_events:
    do
    :: d_step { wire[g].prefill && !job[g].spent && RUNS(g) && WRITER(g).link ->
        wire[g].prefill = false;
        job[g].spent = true; job[g].stage = computing }
    :: d_step { wire[g].prefill -> wire[g].prefill = false; tidy(g) }   /* the router is gone, or has been cancelled */
    :: d_step { job[g].stage == computing && job[g].put == unsent && RUNS(g) -> job[g].put = flying }
    :: d_step { job[g].stage == computing && job[g].put != unsent && RUNS(g) -> job[g].stage = flushing }
    :: d_step { job[g].stage == computing && RUNS(g) -> stop(g) }   /* cancelled, preempted, the peer is lost ... */
    :: d_step { wire[g].abandon && RUNS(g) ->
        wire[g].abandon = false;
#ifndef NO_TOMBSTONES
        job[g].spent = true;
#endif
        if
        :: job[g].stage == computing -> stop(g);
#ifdef ABANDON_UNANSWERED
        :: job[g].stage == unknown
#elif defined(NO_TOMBSTONES)
        :: job[g].stage == unknown -> job[g].owes_quiesced = true;
#else
        :: job[g].stage == unknown -> stop(g);
#endif
        :: job[g].stage == flushing || job[g].stage == ended -> job[g].owes_quiesced = true;
        fi; tidy(g) }
    :: d_step { job[g].stage == flushing && RUNS(g) && (job[g].put != flying || !WRITER(g).link) ->     /* FlushDone */
        job[g].stage = ended;
        wire[g].completed = (WRITER(g).link && WRITER(g).joined); tidy(g) }
    :: d_step { job[g].owes_quiesced && RUNS(g) && (MAY_QUIESCE(g) || !WRITER(g).link) ->
        job[g].owes_quiesced = false;
        wire[g].quiesced = (WRITER(g).link && WRITER(g).joined); tidy(g) }
#ifdef RESTART_IS_SAME_PEER
    :: d_step { wire[g].abandon && lease[g].writer == 0 && peer[1].joined ->    /* never heard of it: "never started" */
        wire[g].abandon = false; wire[g].quiesced = true; wire[g].quiesced_by_other = true }
#endif
    :: d_step { job[g].put == flying ->                 /* however late, and though its process stands still */
        land(g); tidy(g) }
#ifdef CHECKED
    :: d_step { job[g].put == flying -> job[g].again = true; land(g); tidy(g) }
    :: d_step { job[g].again -> job[g].again = false; land(g); tidy(g) }
#endif
    od
}

/* ---- processes and links */

inline tidy_all() {
    for (g : 0 .. LEASES - 1) { tidy(g) }
    g = 0;
}

inline forget_records(p) {
    for (g : 0 .. LEASES - 1) {
        if
        :: lease[g].writer == p && lease[g].state != unused ->
            wire[g].completed = false;
            if
            :: !wire[g].quiesced_by_other -> wire[g].quiesced = false;
            :: else
            fi
        :: else
        fi
    }
    g = 0;
}

inline die(p) {
    peer[p].alive = false; peer[p].still = false; peer[p].link = false;
    for (g : 0 .. LEASES - 1) {
        if
        :: lease[g].writer == p && lease[g].state != unused ->
            job[g].stage = ended; job[g].owes_quiesced = false; wire[g].prefill = false; wire[g].abandon = false;
#ifndef CHECKED
            if
            :: job[g].put == flying -> job[g].put = unsent;     /* the process was what wrote */
            :: else
            fi
#endif
        :: else
        fi
    }
    tidy_all();
}

inline cut_link(p) {
    peer[p].link = false;
    for (g : 0 .. LEASES - 1) {
        if
        :: lease[g].writer == p -> wire[g].abandon = false;
        :: else
        fi
    }
    tidy_all();
}

inline on_lost(p) {                /* PeerLost: records not heard by now never are */
    peer[p].joined = false; peer[p].fenced = !peer[p].alive;
    forget_records(p);
    for (g : 0 .. LEASES - 1) {
        if
        :: IS_HELD_BY(g, p) ->
            if
            :: lease[g].state == granted -> owner_lets_go(g);
            :: else
            fi;
#ifdef FREE_ON_PEER_LOST
            writer_let_go(g);
#else
            if
            :: peer[p].fenced -> writer_let_go(g);
            :: else
            fi
#endif
        :: else
        fi
    }
    tidy_all();
}

inline on_fenced(p) {              /* PeerFenced: a lost peer's process has ended */
    peer[p].fenced = true;
    for (g : 0 .. LEASES - 1) {
        if
        :: IS_HELD_BY(g, p) -> writer_let_go(g);
        :: else
        fi
    }
    tidy_all();
}

proctype PeerLife(byte p) {
    byte g;
end_events:
    do
    :: d_step { num_faults < FAULTS && peer[p].alive -> num_faults++; die(p); }
    :: d_step { num_faults < FAULTS && peer[p].alive && peer[p].link -> num_faults++; cut_link(p); }
    :: d_step { num_faults < FAULTS && peer[p].alive && !peer[p].still -> num_faults++; peer[p].still = true }
    :: d_step { peer[p].still -> peer[p].still = false }
    :: d_step { peer[p].joined && !peer[p].link -> on_lost(p); }
    :: d_step { !peer[p].joined && !peer[p].fenced && !peer[p].alive && HOLDS_ANY(p) -> on_fenced(p); }
#ifndef NO_HARD_FENCE
    :: d_step { IS_UNREACHABLE(p) && HOLDS_ANY(p) -> die(p); }
#endif
#ifdef TWO_WORKERS
    :: d_step { peer[p].alive && !peer[p].still && !peer[p].link && !peer[p].joined && !HOLDS_ANY(p) ->     /* joined again */
        peer[p].link = true; peer[p].joined = true }
#else
    :: d_step { p == 0 && peer[0].alive && !peer[0].still && !peer[0].link && !peer[0].joined && !HOLDS_ANY(0) && !peer[1].alive ->
        peer[0].link = true; peer[0].joined = true }
#ifdef RESTART_IS_SAME_PEER
    :: d_step { p == 1 && !peer[1].alive && !peer[1].fenced && (!peer[0].link || peer[0].still) ->      /* takes the old one's place */
        peer[1].alive = true; peer[1].link = true; peer[1].joined = true; peer[0].joined = false }
#else
    :: d_step { p == 1 && !peer[1].alive && !peer[1].fenced && (!peer[0].link || peer[0].still) -> peer[1].alive = true }
    :: d_step { p == 1 && peer[1].alive && !peer[1].joined && !peer[1].link && !peer[0].joined && !HOLDS_ANY(0) && !HOLDS_ANY(1) ->
        peer[1].link = true; peer[1].joined = true }
#endif
#endif
    od
}

init {
    byte i;
    atomic {
        peer[0].alive = true; peer[0].link = true; peer[0].joined = true;
#ifdef TWO_WORKERS
        peer[1].alive = true; peer[1].link = true; peer[1].joined = true;
#endif
        for (i : 0 .. LEASES - 1) { run DecodeLease(i); run WriterJob(i) }
        for (i : 0 .. PEERS - 1) { run PeerLife(i) }
        i = 0;
    }
    timeout -> assert(holder[0] == NOBODY && holder[1] == NOBODY);  /* every block has come back */
}
