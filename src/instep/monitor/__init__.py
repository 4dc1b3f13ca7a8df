"""What a person looks at while a run goes on. It reads the events of a run, and nothing else.

Room: reads events, writes to the terminal; called by cli only; no torch.
"""
