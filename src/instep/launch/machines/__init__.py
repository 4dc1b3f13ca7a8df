"""The machines of one job: how their launching processes meet, agree, work in rounds, and lose each other.

    board        what they write on and read from; knock: who is at the endpoint
    company      roll call before anything starts: agreement (pure) of facts; clocks and the timekeeper
    crew         one of the machines; lead, of the one that decides; rounds (pure); line: how they speak
    peers        who reaches whom; links and checkup: how fast, for the doctor

Ranks: none; these are the processes that launch them.
"""
