"""Hooks inside each rank of a watched script: they write down what it does, and change nothing that it computes.

Ranks: all. No observer issues a collective: ranks are compared afterwards, from their files.
"""
