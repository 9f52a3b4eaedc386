"""A discrete-event simulation of a whole cluster: the router's own code on a virtual clock, before workers that are models.

    fleet.py        simulate(): one run                               spec.py          what is simulated
    events.py       the clock, and the event loop the router sees     clients.py       requests come, and what becomes of them
    router_side.py  the router, with its own code for every decision  requests.py      one request on its way
    workers.py      the fleet: deaths, returns, drains, roles         watch.py         looks in between, for pictures
    node.py         a worker of any role                              steps.py         its engine's steps
    prompts.py      its attempts, and prompts that wait               decode_batch.py  its sequences that decode
    caches.py       its KV pool and prefix cache                      network.py       the links between workers

docs/planning.md says what is modelled and what is left out.
"""
