"""Membership: which nodes of a job take part, and how their launchers agree on that.

Each launcher registers once in the control store (`registration`), then its node agent (`agent`) sends a heartbeat
every second and follows the job state that the leader (`leader`) publishes:

    nodes             how many keys were given out; the node that hosts the store has key 0
    node/3            NodeInfo of the node with key 3, written once
    heartbeat/3       its Heartbeat, every second
    lead              the key of the node that leads
    job               JobState, published by the leader twice a second

`generations` (pure) decides from the heartbeats which nodes start ranks together, and refuses those that disagree with
the others (`agreement`, pure). `checkup` measures the links between nodes, for the doctor.

Ranks: none; these are the launchers.
"""
