"""What bounded the speed of a run, from its events ([Note: The frontier]); pure, no torch.

`windows` puts the ranks' times side by side, `frontier` finds the rank that the others wait for, `causes` says what
each cause cost, `advice` what to try and what it should bring, `text` all of it in words, `verdict` as one value.
"""
